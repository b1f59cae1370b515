"""The one matcher for ignore, exclude and target entries, with each writer's own rule.

Matching is done on the names of the checkpoint. Where an entry is written in another prefix dialect of the
same text model (`model.layers.0` for `model.language_model.layers.0`), the other spellings of the module are
tried too. Writers' rules (reference: formats survey, matching rules):

glob     ModelOpt: `a.b*` as a shell glob over the whole name, otherwise the exact name or a parent of it.
exact_re compressed-tensors: `re:` then a regular expression anchored at the start only, otherwise the exact
         name. Class names such as `Linear` are told apart by `is_class_name`.
suffix   transformers fine-grained FP8: exact name, a parent, or a dotted suffix.

An entry that begins with `re:` is a regular expression in every list: no module's name begins so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache

import attrs

from vtensors.patterns import MatchBudget, glob_test, regex_test

# The empty one is that of a base model saved by itself.
DIALECTS = ("model.language_model.", "language_model.model.", "model.", "")
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
REGEX = "re:"
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_UNFUSED = {part: fused for fused, parts in FUSED.items() for part in parts}
# Characters of a name that is compared with all others: the time grows with their square.
_COMPARED = 200
_EXPERT = re.compile(r"\.experts\.\d+\.")


@lru_cache(maxsize=1 << 17)
def spellings(name: str) -> tuple[str, ...]:
    """The module's name and its spellings in the other prefix dialects, the name itself first."""
    if name in HEADS:
        return (name, *(head for head in HEADS if head != name))
    for prefix in DIALECTS:
        rest = name.removeprefix(prefix)
        if (rest != name or not prefix) and rest.startswith(("layers.", "embed_tokens", "norm")):
            return (name, *(other + rest for other in DIALECTS if other != prefix))
    return (name,)


def fused_spellings(name: str) -> Iterator[str]:
    """Names under which a writer may list the module collectively: its fused parent, its experts container."""
    for spelling in spellings(name):
        yield spelling
        parent, _, last = spelling.rpartition(".")
        if last in _UNFUSED:
            yield f"{parent}.{_UNFUSED[last]}"
        expert = _EXPERT.search(spelling)
        if expert:
            yield spelling[: expert.start()] + ".experts"
            if last in _UNFUSED:
                yield f"{spelling[: expert.start()]}.experts.{_UNFUSED[last]}"
            yield f"{spelling[: expert.start()]}.experts.{last}"


@attrs.frozen(kw_only=True)
class Entry:
    """One entry as written, its place, and the compiled test over one spelling of a name."""

    text: str
    where: str
    exact: bool
    test: Callable[[str], bool]

    def matches(self, name: str) -> bool:
        """Whether the entry speaks of the module, in any spelling."""
        return any(self.test(spelling) for spelling in spellings(name))


def glob_entry(text: str, where: str, budget: MatchBudget | None = None) -> Entry:
    """A ModelOpt exclude entry: a shell glob when it has a wildcard, else exact name or parent.

    budget: shared by the entries of a declaration, so that all of them together end in time.
    """
    if text.startswith(REGEX):
        return regex_entry(text, where, budget)
    if any(mark in text for mark in "*?["):
        return Entry(
            text=text, where=where, exact=False, test=glob_test(text, where, budget or MatchBudget())
        )
    return Entry(text=text, where=where, exact=True, test=_same_or_below(text))


def regex_entry(text: str, where: str, budget: MatchBudget | None = None) -> Entry:
    """A compressed-tensors entry: `re:` and a regular expression anchored at the start, else exact.

    budget: as in `glob_entry`. Errors: DeclarationError for what is no regular expression, or takes too long.
    """
    if text.startswith(REGEX):
        test = regex_test(text.removeprefix(REGEX), text, where, budget or MatchBudget())
        return Entry(text=text, where=where, exact=False, test=test)
    return Entry(text=text, where=where, exact=True, test=lambda name: name == text)


def suffix_entry(text: str, where: str, budget: MatchBudget | None = None) -> Entry:
    """A transformers `modules_to_not_convert` entry: exact, a parent, or a dotted suffix. budget: as above."""
    if text.startswith(REGEX):
        return regex_entry(text, where, budget)
    below, dotted = _same_or_below(text), "." + text
    return Entry(text=text, where=where, exact=True, test=lambda name: below(name) or name.endswith(dotted))


def _same_or_below(text: str) -> Callable[[str], bool]:
    prefix = text + "."
    return lambda name: name == text or name.startswith(prefix)


@attrs.define
class Matcher:
    """A list of entries asked many times: exact names by lookup of the name and its parents, patterns in turn."""

    entries: tuple[Entry, ...]
    parents: bool = True
    suffixes: bool = False
    _exact: dict[str, Entry] = attrs.field(init=False, factory=dict)
    _patterns: list[Entry] = attrs.field(init=False, factory=list)
    used: set[str] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        for entry in self.entries:
            if entry.exact:
                self._exact.setdefault(entry.text, entry)
            else:
                self._patterns.append(entry)

    def find(self, name: str) -> Entry | None:
        """The first entry that speaks of the module: exact names before patterns; remembers it as used."""
        found = None
        for spelling in spellings(name):
            for candidate in self._candidates(spelling):
                if candidate in self._exact:
                    self.used.add(candidate)
                    found = found or self._exact[candidate]
            for entry in self._patterns:
                if entry.test(spelling):
                    self.used.add(entry.text)
                    found = found or entry
        return found

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if not self._exact:
            return
        if self.parents:
            end = name.rfind(".")
            while end > 0:
                yield name[:end]
                end = name.rfind(".", 0, end)
        if self.suffixes:
            begin = name.find(".")
            while begin > 0:
                yield name[begin + 1 :]
                begin = name.find(".", begin + 1)

    def unused(self) -> tuple[Entry, ...]:
        """Entries that no asked module (nor its parents) has matched so far."""
        return tuple(entry for entry in self.entries if entry.text not in self.used)


def is_class_name(text: str) -> bool:
    """Whether a target is a module class (`Linear`, `Qwen3Attention`) rather than a module's name."""
    return text.isidentifier() and text[:1].isupper()


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The most similar candidate, for messages; None when nothing is near or the name is very long."""
    if len(name) > _COMPARED:
        return None
    short = [candidate for candidate in candidates if len(candidate) <= _COMPARED][:20000]
    found = get_close_matches(name, short, n=1, cutoff=0.6)
    return found[0] if found else None
