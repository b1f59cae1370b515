"""Patterns from configuration files, which may be hostile: same meaning as in their writers' tools, bounded time.

Regular expressions are Python's `re` to their writers. Those that could back-track for long are matched by the
`regex` package, which alone can stop a match; what it understands beyond `re` is escaped in the pattern first.
"""

from __future__ import annotations

import fnmatch
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import attrs

from vtensors.counts import counted
from vtensors.errors import DeclarationError

MAX_PATTERN = 1000
MATCH_SECONDS = 1.0
CHECKPOINT_SECONDS = 20.0
# `regex` writes out counted repetitions when it compiles: a count of 5,000,000 takes 1.5 GB.
MAX_COUNT = 100_000

# What `re` cannot compile: bad syntax, counts beyond 32 bits, groups nested by the hundred.
_UNCOMPILABLE = (re.error, OverflowError, RecursionError, MemoryError)


@attrs.define
class MatchBudget:
    """Seconds that all patterns of one declaration may take together; shared by its entries.

    seconds: what is left. match_seconds: most that one match may take.
    """

    seconds: float = CHECKPOINT_SECONDS
    match_seconds: float = MATCH_SECONDS

    def spend(self, began: float, text: str, where: str) -> None:
        """Take off the time since `began` (of `time.perf_counter`). Raises DeclarationError when none is left."""
        self.seconds -= time.perf_counter() - began
        if self.seconds <= 0:
            raise _too_slow(
                f"all patterns together take more than {CHECKPOINT_SECONDS:g} s to match", text, where
            )


def glob_test(text: str, where: str, budget: MatchBudget) -> Callable[[str], bool]:
    """Whether a name matches the shell glob as a whole.

    `fnmatch.translate` makes every star an atomic group (Python 3.11), so a match cannot back-track; the time
    of all is still taken off the budget. Errors: a glob that is too long.
    """
    _check_length(text, where)
    return _timed(_compile(fnmatch.translate(text), text, where).match, text, where, budget)


def regex_test(pattern: str, text: str, where: str, budget: MatchBudget) -> Callable[[str], bool]:
    """Whether a name matches the regular expression from its first character on.

    text: the entry as written, for messages. Errors: a pattern that is too long or that `re` refuses; from the
    test, a match that takes too long.
    """
    _check_length(text, where)
    compiled = _compile(pattern, text, where)
    if is_tame(pattern):
        return _timed(compiled.match, text, where, budget)
    match = _stoppable(pattern, compiled.flags, text, where).match

    def test(name: str) -> bool:
        began = time.perf_counter()
        try:
            found = match(name, timeout=budget.match_seconds) is not None
        except TimeoutError as cause:
            raise _too_slow(
                f"the pattern takes more than {budget.match_seconds:g} s to match one name: "
                f"{name if len(name) <= 80 else name[:80] + '...'}",
                text,
                where,
            ) from cause
        budget.spend(began, text, where)
        return found

    return test


def is_tame(pattern: str) -> bool:
    """Whether a match cannot take much longer than a second, so that nothing needs to stop it.

    No group is repeated, and with names of at most 1024 characters (`header_entries.MAX_NAME`) three
    repetitions try some 10^8 places, two with six alternatives 10^7.
    """
    bare = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", bare)
    repeats = len(re.findall(r"(?<!\()[*+?]+", bare))
    choices = bare.count("|")
    if re.search(r"\)[*+?]|\{|\(\?(?!:)|\\", bare) or re.search(r"\\[0-9]", pattern):
        return False
    return repeats <= 3 if choices == 0 else repeats <= 2 and choices <= 6


def _timed(
    match: Callable[[str], object], text: str, where: str, budget: MatchBudget
) -> Callable[[str], bool]:
    def test(name: str) -> bool:
        began = time.perf_counter()
        found = match(name) is not None
        budget.spend(began, text, where)
        return found

    return test


def _compile(pattern: str, text: str, where: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `re` warns of sets that may change their meaning one day
            return re.compile(pattern)
    except _UNCOMPILABLE as problem:
        raise _no_pattern(problem, text, where) from problem


def _stoppable(pattern: str, flags: int, text: str, where: str) -> Any:
    counts = 1
    for numbers in re.findall(r"\{(\d*)(?:,(\d*))?\}", pattern):
        counts *= max([1, *(int(number) for number in numbers if number)])
    if counts > MAX_COUNT:
        raise DeclarationError(
            "the pattern repeats too often",
            file=where,
            seen=repr(text)[:200],
            accepted=f"counts in braces that multiply to at most {MAX_COUNT}",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    # Imported here: it takes 35 ms, and most checkpoints list names or tame patterns.
    import regex

    try:
        # In verbose patterns a bracket may stand in a comment, so they are taken as they are.
        return regex.compile(pattern if flags & re.VERBOSE else only_re(pattern), regex.VERSION0)
    except (regex.error, *_UNCOMPILABLE) as problem:
        raise _no_pattern(problem, text, where) from problem


def _no_pattern(problem: BaseException, text: str, where: str) -> DeclarationError:
    return DeclarationError(
        f"not a regular expression: {problem}",
        file=where,
        seen=repr(text)[:200],
        accepted="re:<Python regular expression> or an exact module name",
        fix="correct the configuration file, or use the one that belongs to the weights",
    )


def only_re(pattern: str) -> str:
    """The pattern with everything escaped that `re` takes literally and `regex` (VERSION0) does not.

    These are braces that are no counts (fuzzy matching) and brackets inside of sets (POSIX classes).
    """
    parts: list[str] = []
    position, in_set = 0, False
    while position < len(pattern):
        mark = pattern[position]
        size = 1
        if mark == "\\":
            named = re.match(r"\\N\{[^}]*\}", pattern[position:])
            size = named.end() if named else 2
        elif in_set:
            in_set = mark != "]"
            mark = "\\[" if mark == "[" else mark
        elif mark == "[":
            # A bracket that closes stands for itself directly behind the opening one.
            opening = re.match(r"\[\^?\]?", pattern[position:])
            size = opening.end() if opening else 1
            in_set = True
        elif mark == "{" and not re.match(r"\{(\d+(,\d*)?|,\d*)\}", pattern[position:]):
            mark = "\\{"
        parts.append(pattern[position : position + size] if size > 1 else mark)
        position += size
    return "".join(parts)


def _check_length(text: str, where: str) -> None:
    if len(text) > MAX_PATTERN:
        raise DeclarationError(
            "the pattern is too long",
            file=where,
            seen=f"{counted(len(text), 'character')} beginning {text[:40]!r}",
            accepted=f"at most {MAX_PATTERN} characters",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )


def _too_slow(problem: str, text: str, where: str) -> DeclarationError:
    return DeclarationError(
        problem,
        file=where,
        seen=repr(text)[:200],
        fix="write the entry without repetitions inside of repetitions, or list the modules' names",
    )
