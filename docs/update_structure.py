"""Rewrites the generated part of docs/structure.md: one line per module, the first sentence of its docstring.

python docs/update_structure.py           rewrites the part between the markers
python docs/update_structure.py --check   exits 1 if that would change it
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "structure.md"
BEGIN = "<!-- modules: written by docs/update_structure.py -->"
END = "<!-- end of modules -->"
PACKAGES = {
    "core/vtensors": "public API, records, hooks, plugin manager, checkpoint reader, planning, selection",
    "formats/vtensors_formats": "number formats and canonical Weights: exact maths on a CPU, the reference",
    "kernels/vtensors_kernels": "ops: contract, launcher, reference twin; CUDA sources and their compilation",
    "plugins/vtensors_plugins": "the built-in plugins: conventions, architectures, backends, commands",
    "engine/vtensors_engine": "runs models: text, sampling, caches, runner, `LLM`",
}


def module_lines(repository: Path = REPOSITORY) -> list[str]:
    """The generated lines: a heading per package, then a line per module.

    An empty `__init__.py` has no line. Raises ValueError naming a module without a docstring.
    """
    lines: list[str] = []
    for package, summary in PACKAGES.items():
        lines += [f"### `{package}/`", f"{summary[0].upper()}{summary[1:]}.", ""]
        for path in sorted((repository / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if path.name == "__init__.py" and not source.strip():
                continue
            docstring = ast.get_docstring(ast.parse(source))
            name = path.relative_to(repository).as_posix()
            if not docstring:
                raise ValueError(f"{name} has no docstring, whose first sentence would say what it is")
            lines.append(f"- `{name}` — {_first_sentence(docstring)}")
        lines.append("")
    return lines


def _first_sentence(docstring: str) -> str:
    """The docstring up to the first full stop before a blank, on one line."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()


def updated(page: str, lines: list[str]) -> str:
    """The page with the text between its markers replaced by the lines."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, *lines, END + tail])


def main(arguments: list[str]) -> int:
    """Rewrite the page, or with --check compare only; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = updated(page, module_lines())
    if wanted == page:
        return 0
    if arguments == ["--check"]:
        print("docs/structure.md is out of date: run python docs/update_structure.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
