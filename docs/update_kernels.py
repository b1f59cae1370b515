"""Rewrites the table of compiled kernels in docs/kernels.md; needs the extras cuda13 and disassembly, no GPU.

python docs/update_kernels.py           rewrites it
python docs/update_kernels.py --check   exits 1 if that would change it
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vtensors_kernels.compiling.instantiations import all_instantiations
from vtensors_kernels.compiling.machine_code import find_disassembler
from vtensors_kernels.compiling.nvrtc import find_toolkit
from vtensors_kernels.compiling.resource_table import compile_all, resource_table

PAGE = Path(__file__).resolve().parent / "kernels.md"
BEGIN = "<!-- compiled: written by docs/update_kernels.py -->"
END = "<!-- end of compiled -->"


def updated(page: str, table: str) -> str:
    """The page with the table between its markers."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """Rewrite the page, or with --check compare only; returns the exit status."""
    toolkit, disassembler = find_toolkit(), find_disassembler()
    if isinstance(toolkit, str) or isinstance(disassembler, str):
        print(toolkit if isinstance(toolkit, str) else disassembler, file=sys.stderr)
        return 2
    futures = compile_all(all_instantiations(), toolkit, disassembler, threads=os.cpu_count() or 1)
    compiled = [future.result() for future in futures]
    page = PAGE.read_text(encoding="utf-8")
    wanted = updated(page, resource_table(compiled, toolkit))
    if wanted == page:
        return 0
    if arguments == ["--check"]:
        print("docs/kernels.md is out of date: run make kernel-docs", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
