"""Rewrites the tables of compiled kernels in docs/kernels.md (in short) and docs/kernel-forms.md (every form).

Needs the extras cuda13 and disassembly, no GPU.

python docs/update_kernels.py           rewrites them
python docs/update_kernels.py --check   exits 1 if that would change one
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vtensors_kernels.compiling.instantiations import all_instantiations
from vtensors_kernels.compiling.machine_code import find_disassembler
from vtensors_kernels.compiling.nvrtc import Toolkit, find_toolkit
from vtensors_kernels.compiling.resource_table import Compiled, compile_all, resource_summary, resource_table

DOCS = Path(__file__).resolve().parent
BEGIN = "<!-- compiled: written by docs/update_kernels.py -->"
END = "<!-- end of compiled -->"


def updated(page: str, table: str) -> str:
    """The page with the table between its markers. Raises ValueError where they are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no '{BEGIN}' ... '{END}'")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def wanted_pages(compiled: Sequence[Compiled], toolkit: Toolkit, docs: Path = DOCS) -> dict[str, str]:
    """Each page that this script writes into, by name in docs, with its table as the machine code has it."""
    tables = {
        "kernels.md": resource_summary(compiled, toolkit),
        "kernel-forms.md": resource_table(compiled, toolkit),
    }
    return {name: updated((docs / name).read_text(encoding="utf-8"), table) for name, table in tables.items()}


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with --check compare only; returns the exit status.

    --help, and a word that is no option, end the program before a compiler is looked for.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="rewrite nothing; exit 1 if a page is out of date"
    )
    check = parser.parse_args(arguments).check
    toolkit, disassembler = find_toolkit(), find_disassembler()
    if isinstance(toolkit, str) or isinstance(disassembler, str):
        print(toolkit if isinstance(toolkit, str) else disassembler, file=sys.stderr)
        return 2
    futures = compile_all(all_instantiations(), toolkit, disassembler, threads=os.cpu_count() or 1)
    compiled = [future.result() for future in futures]
    status = 0
    for name, wanted in wanted_pages(compiled, toolkit).items():
        if (DOCS / name).read_text(encoding="utf-8") == wanted:
            continue
        if check:
            print(f"docs/{name} is out of date: run make kernel-docs", file=sys.stderr)
            status = 1
        else:
            (DOCS / name).write_text(wanted, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
