"""Why a group of tensors is not claimed: each convention's reason, and who contests it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from vtensors.forms import Form, FormMatch, match_form
from vtensors.records import Convention, Declaration, DeclaredScheme, TensorGroup
from vtensors.tensors import TensorInfo

CLAIMED_TWICE = "claimed twice"


@attrs.frozen(kw_only=True)
class Claimant:
    """A convention, the plugin and distribution that bring it, and its reading of the configuration."""

    convention: Convention
    plugin: str
    owner: str
    declaration: Declaration | None

    def is_called(self, name: str) -> bool:
        """Whether the user means this one: by its plugin, distribution or convention name."""
        return name in (self.plugin, self.owner, self.convention.name)


@attrs.frozen(kw_only=True)
class Unclaimed:
    """A group that nobody reads, with each convention's reason, or that several contest."""

    group: TensorGroup
    reasons: tuple[tuple[str, str], ...]

    @property
    def contested(self) -> bool:
        """Whether more than one convention claims it."""
        return any(name == CLAIMED_TWICE for name, _ in self.reasons)

    @property
    def readers(self) -> str:
        """Who reads it, as the beginning of a sentence."""
        return "more than one convention reads" if self.contested else "no convention reads"

    @property
    def fix(self) -> str:
        """What to do, where nothing more is known."""
        if self.contested:
            return "set VT_PREFER=<plugin>, or deny one with VT_PLUGINS=-<plugin>"
        return (
            "see docs/conventions.md for the accepted forms; a plugin can add one (docs/writing-a-plugin.md)"
        )

    def describe(self) -> str:
        """Dtypes and suffixes seen, then why each convention passes."""
        seen = ", ".join(f"{suffix} {info.describe()}" for suffix, info in self.group.tensors.items())
        why = "".join(f"\n    {name}: {reason}" for name, reason in self.reasons)
        return f"{seen}{why}"


def reasons_against(
    group: TensorGroup,
    claimants: Sequence[Claimant],
    refusals: Mapping[tuple[str, str], str],
    contested: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    fighters = {contested[i.name] for i in group.tensors.values() if i.name in contested}
    if fighters:
        yield CLAIMED_TWICE, ", ".join(sorted(fighters))
        return
    for claimant in claimants:
        name = claimant.convention.name
        given = refusals.get((group.module, name))
        yield name, given or reason_by_forms(claimant.convention, claimant.declaration, group)


def reason_by_forms(convention: Convention, declaration: Declaration | None, group: TensorGroup) -> str:
    """Why no form of the convention fits the group: the reason of the form that comes nearest."""
    declared = declaration.scheme_of(group.module) if declaration is not None else None
    block = declared.block if isinstance(declared, DeclaredScheme) and declared.block else (128, 128)
    nearest, nearest_form, most = "has no form with these tensors", None, 0
    for form in convention.forms:
        match = match_form(form, group.tensors, block=block)
        if isinstance(match, FormMatch):
            if declaration is None:
                return f"would fit as {form.scheme}, but no configuration file declares this convention"
            return f"would fit as {form.scheme}, but its configuration does not speak of this module"
        common = _nearness(form, group.tensors)
        if common > most:
            nearest, nearest_form, most = match, form, common
    return nearest if nearest_form is None else f"{nearest_form.scheme} {nearest}"


def _nearness(form: Form, tensors: Mapping[str, TensorInfo]) -> int:
    places = {tensor.suffix: tensor for tensor in form.tensors}
    score = 0
    for suffix, info in tensors.items():
        if suffix in places:
            score += 2 + 3 * (info.dtype in places[suffix].dtypes)
    return score
