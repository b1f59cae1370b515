"""The table of README.md from the marks in the tests; `python tests/faults/readme_table.py` rewrites it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS / "faults" / "README.md"
BEGIN, END = "<!-- tests by id: written by readme_table.py -->", "<!-- end of tests by id -->"
_GPU = re.compile(r"pytest\.mark\.gpu\b")


def page_with_table(page: str) -> str:
    """The page with the table of every marked test between its markers. Raises ValueError where they are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no '{BEGIN}' ... '{END}'")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def table() -> str:
    """One row per id, sorted; tests by file, those that need a GPU named as such."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS).as_posix()
        for fault, name, gpu in marked_tests(ast.parse(path.read_text(encoding="utf-8"))):
            names = found.setdefault(fault, {}).setdefault(file, [])
            names.append(f"`{name}`" + (" (GPU)" if gpu else ""))
    rows = [
        f"| {fault} | " + "; ".join(f"{file}: {', '.join(names)}" for file, names in files.items()) + " |"
        for fault, files in sorted(found.items(), key=lambda entry: int(entry[0][1:]))
    ]
    return "\n".join(["| id | tests |", "|---|---|", *rows])


def marked_tests(module: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """(id, test, whether it needs a GPU), in the order of the file; marks of parameters count too."""
    lists = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    all_gpu = "pytestmark" in lists and _GPU.search(ast.unparse(lists["pytestmark"])) is not None
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        decorators = [*node.decorator_list]
        decorators += [
            lists[name.id]
            for decorator in node.decorator_list
            for name in ast.walk(decorator)
            if isinstance(name, ast.Name) and name.id in lists
        ]
        gpu = all_gpu or any(_GPU.search(ast.unparse(decorator)) for decorator in node.decorator_list)
        for fault in dict.fromkeys(f for decorator in decorators for f in _faults(decorator)):
            yield fault, node.name, gpu


def _faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "fault"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
