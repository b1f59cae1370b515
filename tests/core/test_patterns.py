from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtensors.errors import DeclarationError
from vtensors.matching import Entry, Matcher, glob_entry, regex_entry, suffix_entry
from vtensors.patterns import MAX_COUNT, MAX_PATTERN, MatchBudget, is_tame, only_re

NAME = "model.layers.10.mlp.experts.3.gate_proj"
EVIL = "re:(a+)+$"
LONG = "a" * 60 + "!"


@pytest.mark.parametrize("make", [glob_entry, regex_entry, suffix_entry])
def test_a_pattern_that_back_tracks_for_ever_is_refused_in_time(make: Callable[..., Entry]) -> None:
    entry = make(r"re:(a|a)*(\w|a)*$", "config.json: ignore", MatchBudget(match_seconds=0.2))
    began = time.perf_counter()
    with pytest.raises(DeclarationError) as caught:
        entry.matches(LONG)
    assert time.perf_counter() - began < 5
    text = str(caught.value)
    assert "config.json: ignore" in text
    assert r"re:(a|a)*" in text
    assert "what to do" in text


def test_the_time_of_all_modules_and_patterns_together_is_bounded() -> None:
    budget = MatchBudget(seconds=0.3)
    matcher = Matcher(entries=tuple(glob_entry(f"*{n}*x{n}*", "config.json", budget) for n in range(2000)))
    began = time.perf_counter()
    names = [f"model.layers.{n}.mlp.gate_proj" for n in range(31_000)]
    with pytest.raises(DeclarationError, match="all patterns together"):
        list(map(matcher.find, names))
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("text", ["*a*a*a*a*a*a*a*a*a*b", "*" * 400 + "b", "?*" * 200 + "b"])
def test_a_glob_of_many_stars_is_matched_at_once(text: str) -> None:
    began = time.perf_counter()
    assert not glob_entry(text, "config.json").matches("a" * 1000)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("re:(", "not a regular expression"),
        ("re:" + "(" * 330 + "a" + ")*" * 330, "not a regular expression"),
        ("re:(?:a{99999999999})", "not a regular expression"),
        ("re:" + "a" * (MAX_PATTERN + 1), "too long"),
        ("re:5{5555555}(a+)+", "repeats too often"),
        ("re:((a{1000}){1000}){1000}", "repeats too often"),
    ],
)
def test_a_pattern_that_cannot_be_compiled_or_is_too_large_is_refused(text: str, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        regex_entry(text, "config.json")


def test_counts_up_to_the_bound_are_compiled() -> None:
    assert regex_entry(f"re:(?:a{{{MAX_COUNT // 10}}})*(b+)+", "config.json").matches("b")


def test_a_glob_that_is_too_long_is_refused() -> None:
    with pytest.raises(DeclarationError, match="too long"):
        glob_entry("*" * (MAX_PATTERN + 1), "config.json")


@pytest.mark.parametrize(
    ("pattern", "tame"),
    [
        (r".*lm_head", True),
        (r"model\.layers\.\d+\.mlp\..*_proj", True),
        (r".*self_attn\.(q|k|v)_proj$", True),
        (r"[*+?{(|]*x", True),
        (r"(?:visual).*", True),
        (r"(a+)+$", False),
        (r"(?:a*)*", False),
        (r"(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)", False),
        (r"a?a?a?a?aaaa", False),
        (r"a{1,30}", False),
        (r"(.)\1*", False),
        (r"(?=a*)a", False),
    ],
)
def test_only_patterns_that_cannot_take_long_are_left_to_re(pattern: str, tame: bool) -> None:
    assert is_tame(pattern) is tame


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"(?:x{e<=1})?(a+)+", "aa"),
        (r"(x{i<=1})+", "xy{i<=1}"),
        (r"(x{i<=1})+", "x{i<=1}"),
        (r"([[:alpha:]])+", "a]"),
        (r"([[:alpha:]])+", ":]"),
        (r"([]a])+", "]a"),
        (r"([^]a])+", "bc"),
        (r"(\[a{,2})+", "[aa"),
        (r"(a{2,}\{)+", "aa{"),
        (r"(\N{DIGIT ONE})+", "11"),
        (r"(?i)(LAYERS)+", "layers"),
        (r"(\d+)+\Z", "12"),
        (r"(layers)+", "model.layers"),
    ],
)
def test_a_pattern_means_what_it_means_to_re(pattern: str, name: str) -> None:
    assert not is_tame(pattern)
    assert regex_entry(f"re:{pattern}", "x").test(name) is (re.compile(pattern).match(name) is not None)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of `re`: sets within sets
@given(
    st.lists(
        st.sampled_from([*"ab.*+?[]{}(|)^$-:&~<=,01\\", "(?:", "[^", r"\d", r"\.", "{1,2}", "[:a:]"]),
        max_size=8,
    ).map("".join),
    st.text(alphabet="ab.[]{}:1e<=", max_size=6),
)
def test_any_pattern_of_re_gives_the_same_answer(pattern: str, name: str) -> None:
    pattern = f"(?:{pattern})(?:)*"  # a repeated group, so that `re` does not get it
    try:
        wanted = re.compile(pattern).match(name) is not None
    except re.error:
        with pytest.raises(DeclarationError):
            regex_entry(f"re:{pattern}", "x")
        return
    assert regex_entry(f"re:{pattern}", "x").test(name) is wanted


def test_nothing_is_escaped_that_both_read_alike() -> None:
    for pattern in (r"a{2}b{1,}c{,3}", r"\{x\}", "[]a]", r"[a\]b]", r"\N{DIGIT ONE}"):
        assert only_re(pattern) == pattern
    assert only_re("x{e<=1}[[:a:]]") == r"x\{e<=1}[\[:a:]]"


def test_the_regex_package_is_not_imported_for_plain_entries() -> None:
    code = (
        "import sys; from vtensors.matching import glob_entry, regex_entry\n"
        "regex_entry('re:.*mlp.gate$', 'x').matches('a'); glob_entry('*a', 'x').matches('a')\n"
        "assert 'regex' not in sys.modules\n"
        "regex_entry('re:(a+)+', 'x').matches('a'); assert 'regex' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
