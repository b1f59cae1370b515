"""Which convention reads which module: every convention is asked about every group, and nobody scores itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from vtensors.answer_checks import check_answers
from vtensors.claim_reasons import Claimant, Unclaimed, reasons_against
from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeclarationError
from vtensors.forms import ANY_SHAPE, ONE_BLOCK, Form, FormMatch, match_form
from vtensors.records import (
    Claim,
    ClaimRequest,
    Convention,
    DeclaredScheme,
    Refusal,
    StackedPart,
    TensorGroup,
)

# Marks a set of suffixes, dtypes and ranks that no form has.
_NO_FORM: tuple[Form, Mapping[str, int]] = (Form(scheme="", tensors=(), formula="", source=""), {})


@attrs.frozen(kw_only=True)
class Claims:
    """claims by module name; unclaimed by module name; warnings about conventions that failed.

    repeated: pairs of tensors on which two claims give one module.
    """

    claims: Mapping[str, Claim]
    unclaimed: Mapping[str, Unclaimed]
    warnings: tuple[str, ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()


def claim_all(groups: Sequence[TensorGroup], claimants: Sequence[Claimant], *, prefer: str = "") -> Claims:
    """Every group claimed once, or listed as unclaimed with reasons.

    prefer: name of the plugin, distribution or convention that wins where two claim a tensor (`VT_PREFER`).
    Errors: a convention's DeclarationError. One that raises anything else, or returns something that is not a
    claim on the groups given, is left out with a warning; the others go on.
    """
    warnings: list[str] = []
    known = {id(info) for group in groups for info in group.tensors.values()}
    answers: dict[str, list[Claim]] = {}
    refusals: dict[tuple[str, str], str] = {}
    for claimant in claimants:
        name = claimant.convention.name
        try:
            given = list(_ask(claimant, groups))
            check_answers(given, name, known)
        except DeclarationError:  # what the configuration says cannot be followed, for example in time
            raise
        except PLUGIN_FAILURES as problem:  # a broken plugin must not stop the others
            warnings.append(
                f"convention '{name}' ({claimant.owner}) failed and was left out: "
                f"{type(problem).__name__}: {problem}"
            )
            continue
        answers[name] = [answer for answer in given if isinstance(answer, Claim)]
        refusals |= {(a.module, name): a.reason for a in given if isinstance(a, Refusal)}

    standing, owners, contested = _settle(answers, {c.convention.name: c for c in claimants}, prefer)
    claims: dict[str, Claim] = {}
    repeated = []
    for claim in standing:
        first = claims.setdefault(claim.module, claim)
        if first is not claim:
            repeated.append((_codes_name(first), _codes_name(claim)))
    unclaimed = {}
    for group in groups:
        if all(info.name in owners and info.name not in contested for info in group.tensors.values()):
            continue
        unclaimed[group.module] = Unclaimed(
            group=group, reasons=tuple(reasons_against(group, claimants, refusals, contested))
        )
    return Claims(claims=claims, unclaimed=unclaimed, warnings=tuple(warnings), repeated=tuple(repeated))


def _codes_name(claim: Claim) -> str:
    return next(iter(claim.roles.values())).name


def _settle(
    answers: Mapping[str, list[Claim]], claimants: Mapping[str, Claimant], prefer: str
) -> tuple[list[Claim], dict[str, str], dict[str, str]]:
    """Claims that stand, tensor -> the convention that reads it, contested tensor -> who contests it."""
    owners: dict[str, str] = {}
    rivals: dict[str, list[str]] = {}
    for convention, claims in answers.items():
        for claim in claims:
            for info in claim.roles.values():
                first = owners.setdefault(info.name, convention)
                if first != convention:
                    rivals.setdefault(info.name, [first]).append(convention)
    contested: dict[str, str] = {}
    for tensor, names in rivals.items():
        fighters = {name: claimants[name] for name in names}
        winner = _winner(fighters, prefer)
        if winner is None:
            contested[tensor] = " and ".join(f"'{name}' ({c.owner})" for name, c in fighters.items())
        else:
            owners[tensor] = winner
    standing = [
        claim
        for convention, claims in answers.items()
        for claim in claims
        if not rivals
        or all(_stands(info.name, convention, owners, contested) for info in claim.roles.values())
    ]
    return standing, owners, contested


def _stands(tensor: str, convention: str, owners: Mapping[str, str], contested: Mapping[str, str]) -> bool:
    return owners[tensor] == convention and tensor not in contested


def _winner(owners: Mapping[str, Claimant], prefer: str) -> str | None:
    preferred = [name for name, claimant in owners.items() if prefer and claimant.is_called(prefer)]
    if len(preferred) == 1:
        return preferred[0]
    return next(
        (name for name, c in owners.items() if set(owners) - {name} <= set(c.convention.overrides)), None
    )


def _ask(claimant: Claimant, groups: Sequence[TensorGroup]) -> Iterable[Claim | Refusal]:
    convention = claimant.convention
    request = ClaimRequest(groups=groups, declaration=claimant.declaration)
    if convention.claim is not None:
        return convention.claim(request)
    return claim_by_forms(convention, request)


# --- claiming by forms ------------------------------------------------------------------------------------


def claim_by_forms(convention: Convention, request: ClaimRequest) -> Iterator[Claim]:
    """Claims on the groups that fit one of the convention's forms, where its declaration speaks of them.

    Without a declaration nothing is claimed: tensors alone do not say which convention wrote them.
    A form with an expert dimension E gives one claim per expert and projection.
    """
    if request.declaration is None:
        return
    fits: dict[tuple[object, ...], tuple[Form, Mapping[str, int]] | None] = {}
    for group in request.groups:
        signature = tuple((suffix, info.dtype, len(info.shape)) for suffix, info in group.tensors.items())
        if signature not in fits:
            fits[signature] = None if any(_could_fit(form, group) for form in convention.forms) else _NO_FORM
        if fits[signature] is _NO_FORM:
            continue
        declared = request.declaration.scheme_of(group.module)
        if declared is None:
            continue
        # Tens of thousands of modules share a few shapes: each is solved once.
        shapes = (signature, tuple(info.shape for info in group.tensors.values()), declared)
        if shapes not in fits:
            fits[shapes] = _first_fit(convention.forms, group, declared)
        fit = fits[shapes]
        if fit is not None:
            form, dims = fit
            roles = {t.role: group.tensors[t.suffix] for t in form.tensors if t.suffix in group.tensors}
            yield from claims_of(
                convention.name, group.module, FormMatch(form=form, dims=dims, roles=roles), declared
            )


def _first_fit(
    forms: Sequence[Form], group: TensorGroup, declared: DeclaredScheme
) -> tuple[Form, Mapping[str, int]] | None:
    """The first form that fits, those that the declaration names before the others."""
    named = [form for form in forms if declared.algorithm.lower() in form.algorithms]
    for form in [*named, *(form for form in forms if form not in named)]:
        match = match_form(form, group.tensors, block=declared.block or (128, 128))
        if isinstance(match, FormMatch):
            return form, match.dims
    return None


def claims_of(
    convention: str, module: str, match: FormMatch, declared: DeclaredScheme | None
) -> Iterator[Claim]:
    """One claim for a matrix, one per expert and projection for a stacked tensor."""
    dims = match.dims
    shape = (dims["N"], dims["K"])
    if "E" not in dims:
        yield Claim(
            module=module,
            convention=convention,
            scheme=match.form.scheme,
            shape=shape,
            roles=match.roles,
            form=match.form,
            declared=declared,
        )
        return
    owner, _, projection = module.rpartition(".")
    halves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    step = dims["N"] // len(halves)
    transposed = _is_transposed(match.form)
    for expert in range(dims["E"]):
        for number, half in enumerate(halves):
            yield Claim(
                module=f"{owner}.{expert}.{half}",
                convention=convention,
                scheme=match.form.scheme,
                shape=(step, dims["K"]),
                roles=match.roles,
                form=match.form,
                declared=declared,
                part=StackedPart(
                    expert=expert,
                    row_begin=number * step,
                    row_end=(number + 1) * step,
                    transposed=transposed,
                ),
            )


def _is_transposed(form: Form) -> bool:
    codes = form.tensors[0].shapes[0]
    return codes.rstrip("]").rstrip().endswith("N")


def _could_fit(form: Form, group: TensorGroup) -> bool:
    places = {tensor.suffix: tensor for tensor in form.tensors}
    return all(
        suffix in places
        and info.dtype in places[suffix].dtypes
        and any(shape == ANY_SHAPE or _rank(shape) == len(info.shape) for shape in places[suffix].shapes)
        for suffix, info in group.tensors.items()
    ) and all(not tensor.required or tensor.suffix in group.tensors for tensor in form.tensors)


def _rank(pattern: str) -> int:
    inner = pattern.removeprefix(ONE_BLOCK).strip()[1:-1].strip()
    return inner.count(",") + 1 if inner else 0
