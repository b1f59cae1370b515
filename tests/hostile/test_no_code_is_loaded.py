"""Nothing in the packages can run code that a checkpoint brings: no pickle, no eval, no exec."""

from __future__ import annotations

import ast

import pytest

from project.source_tree import source_files

_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_CALLS = {"eval", "exec", "compile", "__import__"}
# Calls on these by attribute: what they load is pickled.
_ATTRIBUTES = {("torch", "load"), ("torch", "hub"), ("jit", "load"), ("numpy", "load"), ("np", "load")}
_ATTRIBUTES |= {("yaml", "load"), ("os", "system")}


def forbidden(tree: ast.AST) -> list[str]:
    """What the syntax tree imports, calls or passes that could run foreign code."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in _ATTRIBUTES:
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "shell"):
            found.append(str(node.arg))
    return found


def test_no_package_can_run_code_from_a_checkpoint() -> None:
    files = [path for path in source_files() if path.suffix == ".py"]
    found = {str(path): forbidden(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    assert len(files) > 100
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "torch.load(x)", "eval(x)", "exec('x')", "np.load(x)"],
)
def test_the_rules_find_what_they_forbid(source: str) -> None:
    assert forbidden(ast.parse(source))
