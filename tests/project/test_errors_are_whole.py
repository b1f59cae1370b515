"""Every refusal says what was seen and what to do, and counts in grammatical words."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from project.source_tree import REPOSITORY, source_files
from vtensors import errors

# A plain VtensorsError is a broken promise between our own modules: nobody causes it from outside.
REFUSALS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value)
    and issubclass(value, errors.VtensorsError)
    and value is not errors.VtensorsError
} | {"error"}  # what a parser calls the class it is given
# Between our own modules too: no command and no call of the Python API gets there.
INTERNAL = {
    "attention.py": "the state of another kind of layer",
    "gated_delta_net.py": "the state of another kind of layer",
    "cuda.py": "a self-test needs",
    "cuda_nvfp4_binding.py": "a self-test needs",
    "cuda_plain.py": "a self-test needs",
    "cuda_w8a8_binding.py": "a self-test needs|an emulated kernel",
    "encoders.py": "no trial factor",
    "reading.py": "the tensor is not of this weight",
    "runner.py": "there is no room for another sequence|a runner cannot start an empty prompt",
}
PLURAL = re.compile(r" (?:[a-z-]+ )?[a-z-]+s\b(?! (?:of|not))")


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in source_files():
        if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] != "kernels":
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def _refusals() -> Iterator[tuple[Path, ast.Call]]:
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
                yield path, node


def _is_internal(path: Path, call: ast.Call) -> bool:
    known = INTERNAL.get(path.name)
    return known is not None and re.search(known, ast.unparse(call)) is not None


def _problem(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args else None


def test_every_refusal_says_what_was_seen_and_what_to_do() -> None:
    lacking = []
    for path, call in _refusals():
        words = {keyword.arg for keyword in call.keywords}
        # A problem that is put together holds what was seen.
        seen = "seen" in words or not isinstance(_problem(call), ast.Constant)
        if not (seen and words & {"accepted", "fix"}) and not _is_internal(path, call):
            lacking.append(f"{path.relative_to(REPOSITORY)}:{call.lineno}: {ast.unparse(call)[:100]}")
    assert not lacking, "\n".join(lacking)


def test_no_text_puts_a_plural_behind_a_number_that_may_be_one() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {ast.unparse(node)[:100]}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for number, words in zip(node.values, node.values[1:], strict=False)
        if _is_length(number) and isinstance(words, ast.Constant) and PLURAL.match(str(words.value))
    ]
    assert not wrong, "say counted(number, noun) instead:\n" + "\n".join(wrong)


def _is_length(value: ast.expr) -> bool:
    call = value.value if isinstance(value, ast.FormattedValue) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "len"


@pytest.mark.parametrize("source", ['f"{len(x)} shards"', 'f"{len(x):,} stray files"'])
def test_the_search_for_plurals_finds_them(source: str) -> None:
    expression = ast.parse(source, mode="eval").body
    assert isinstance(expression, ast.JoinedStr)
    number, words = expression.values
    assert _is_length(number)
    assert isinstance(words, ast.Constant)
    assert PLURAL.match(str(words.value))
