"""Which module may import which, read from the AST of every file; nothing is imported to find out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from project.source_tree import PACKAGES, files_under, package_folders

RANK = {package: rank for rank, package in enumerate(PACKAGES)}
LAZY_TABLE = Path("core/vtensors/_lazy.py")
DEVICE_MODULES = ("cupy", "cupyx", "cuda")

# "vtensors_engine.llm" or "vtensors_engine.llm:LLM", as an import by name would take it.
MODULE_STRING = re.compile(r"(vtensors\w*)(?:\.\w+)+(?::\w+)?")


def violations(repository: Path) -> list[str]:
    """One line per import that the direction forbids: `file:line: what and why`. Empty when all is well."""
    found: list[str] = []
    for package, folder in zip(PACKAGES, package_folders(repository), strict=True):
        for path in files_under(folder):
            if path.suffix != ".py":
                continue
            name = path.relative_to(repository)
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(name))
            reasons = [*_forbidden_imports(tree, package), *_forbidden_strings(tree, package, name)]
            if package == "vtensors":
                reasons += _torch_at_module_level(tree)
            found += [f"{name}:{line}: {reason}" for line, reason in sorted(reasons)]
    return found


def _imported(node: ast.AST) -> list[str]:
    """The absolute module names that a statement imports, `from a import b` as `a`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def _forbidden_imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for module in _imported(node):
            top = module.partition(".")[0]
            if RANK.get(top, -1) > RANK[package]:
                yield node.lineno, f"{package} may not import {module}"  # type: ignore[attr-defined]
            if top in DEVICE_MODULES and package != "vtensors_kernels":
                yield node.lineno, f"only vtensors_kernels may import {module}"  # type: ignore[attr-defined]


def _forbidden_strings(tree: ast.AST, package: str, name: Path) -> Iterator[tuple[int, str]]:
    """Module names in strings, which `importlib.import_module` or a table of lazy names would resolve."""
    if name == LAZY_TABLE:
        return
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        match = MODULE_STRING.fullmatch(node.value)
        if match and RANK.get(match[1], -1) > RANK[package]:
            yield node.lineno, f"{package} may not name the module {node.value}"


def _torch_at_module_level(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _executed_on_import(tree.body):
        for module in _imported(node):
            if module.partition(".")[0] == "torch":
                yield node.lineno, f"core may import {module} only inside a function"


def _executed_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import: neither function bodies nor TYPE_CHECKING blocks."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from _executed_on_import(statement.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _executed_on_import(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _executed_on_import(handler.body)
