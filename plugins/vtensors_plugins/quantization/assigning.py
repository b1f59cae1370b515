"""From a recipe to assignments: every linear module matched, every shape checked before any work."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.conversion import Assignment, Target
from vtensors.conversion.deciding import load_encoder
from vtensors.errors import RequestError
from vtensors.inspection import part_of
from vtensors.matching import FUSED, Entry
from vtensors.modules import Module, is_quantized
from vtensors.records import EncodeOptions
from vtensors_plugins.quantization.recipes import BUILTIN, DEFAULT_IGNORE, LINEAR, Recipe, Rule

# Parts of a model that are linear layers; `other` is what no architecture plugin knows.
_LINEAR_PARTS = (
    "attention",
    "linear_attention",
    "mlp",
    "experts",
    "shared_expert",
    "lm_head",
    "other",
    "router",
)
_FUSED_AS = {part: fused for fused, parts in FUSED.items() for part in parts}


@attrs.frozen(kw_only=True)
class QuantizeOptions:
    """What the command says for all rules. arithmetic: None = the target publisher's own."""

    share_scales: bool = False
    mse: bool = False
    four_over_six: bool = False
    skip: bool = False
    arithmetic: str | None = None


@attrs.frozen(kw_only=True)
class Assigned:
    """assignments by module name; skipped: modules left as they are because of their shape, with the reason.

    unused: a sentence for every entry of the recipe and every option that touched nothing.
    """

    assignments: Mapping[str, Assignment]
    skipped: Mapping[str, str]
    unused: tuple[str, ...] = ()


def assign(checkpoint: Checkpoint, recipe: Recipe, target: Target, options: QuantizeOptions) -> Assigned:
    """The assignments of a recipe.

    Raises RequestError for a module that is quantized already, for shapes that the scheme cannot take (all of
    them counted, the first named with the rule) unless `skip`, and for a recipe that names no module.
    """
    rules, ignored = recipe.entries(), recipe.ignored()
    chosen: dict[str, Assignment] = {}
    misfits: dict[str, RequestError] = {}
    for name, module in checkpoint.modules.items():
        rule = _rule_of(checkpoint, module, rules, ignored)
        if rule is None:
            continue
        _refuse_quantized(module)
        _refuse_inexpressible(module, rule, target)
        settings = EncodeOptions(
            arithmetic=options.arithmetic or target.writer.arithmetic.get(rule.scheme, "float32"),
            mse=options.mse if rule.mse is None else rule.mse,
            four_over_six=options.four_over_six if rule.four_over_six is None else rule.four_over_six,
        )
        try:
            load_encoder(checkpoint, rule.scheme).layouts(module.shape, settings)
        except RequestError as problem:
            if problem.problem.startswith("nothing encodes"):
                raise
            misfits[name] = problem
            continue
        chosen[name] = Assignment(scheme=rule.scheme, options=settings)
    if misfits and not options.skip:
        raise _misfit_error(misfits)
    if not chosen:
        raise RequestError(
            "the recipe names no linear layer of the checkpoint",
            file=str(checkpoint.provenance.source),
            seen=f"recipe {recipe.name}: {', '.join(t for rule in recipe.rules for t in rule.targets)}",
            accepted="targets that match linear layers, which `vtensors inspect --tree` lists",
            fix="correct the targets of the recipe",
        )
    if options.share_scales:
        chosen = _shared(chosen)
    reasons = {name: f"{p.problem}: {p.seen}, wants {p.accepted}" for name, p in misfits.items()}
    unused = (*_unmatched(checkpoint, recipe), *_idle(options, chosen))
    return Assigned(assignments=chosen, skipped=reasons, unused=unused)


def _unmatched(checkpoint: Checkpoint, recipe: Recipe) -> list[str]:
    """Entries of a recipe of one's own that name nothing: their intent is not carried out."""
    if recipe == BUILTIN.get(recipe.name):
        return []
    every = [entry for _, entries in recipe.entries() for entry in entries if entry.text != LINEAR]
    if recipe.ignore != DEFAULT_IGNORE:
        every += recipe.ignored()
    names = tuple(checkpoint.modules)
    return [
        f"recipe {recipe.name}: '{entry.text}' matches no module"
        for entry in every
        if not any(entry.matches(name) for name in names)
    ]


def _idle(options: QuantizeOptions, chosen: Mapping[str, Assignment]) -> list[str]:
    if any(assignment.scheme == "nvfp4" for assignment in chosen.values()):
        return []
    asked = {
        "--share-scales": options.share_scales,
        "--mse": options.mse,
        "--four-over-six": options.four_over_six,
    }
    return [f"{flag} changes nothing: no module becomes nvfp4" for flag, given in asked.items() if given]


def _rule_of(
    checkpoint: Checkpoint,
    module: Module,
    rules: tuple[tuple[Rule, tuple[Entry, ...]], ...],
    ignored: tuple[Entry, ...],
) -> Rule | None:
    claim = module.claim
    is_matrix = len(module.shape) == 2 and (
        claim.part is not None or claim.roles["codes"].name.endswith(".weight")
    )
    if not is_matrix or part_of(checkpoint, module.name) not in _LINEAR_PARTS:
        return None
    if any(entry.matches(module.name) for entry in ignored):
        return None
    for rule, entries in rules:
        if any(entry.text == LINEAR or entry.matches(module.name) for entry in entries):
            return rule
    return None


def _refuse_quantized(module: Module) -> None:
    if is_quantized(module.scheme):
        raise RequestError(
            "the module is quantized already",
            tensor=module.name,
            seen=f"{module.scheme} ({module.convention})",
            accepted="bf16, f16 or f32",
            fix="quantize the unquantized checkpoint, or vtensors convert --to CONVENTION:SCHEME "
            "--allow-requantize",
        )


def _refuse_inexpressible(module: Module, rule: Rule, target: Target) -> None:
    if is_quantized(rule.scheme) and rule.scheme not in target.writer.schemes:
        raise RequestError(
            f"{target.convention.name} cannot hold this scheme",
            tensor=module.name,
            seen=rule.scheme,
            accepted=", ".join(target.writer.schemes) or "unquantized weights",
            fix="choose another scheme in the recipe, or another convention (--to)",
        )


def _misfit_error(misfits: Mapping[str, RequestError]) -> RequestError:
    name, problem = next(iter(misfits.items()))
    more = f" (and {len(misfits) - 1} more: {', '.join(list(misfits)[1:4])})" if len(misfits) > 1 else ""
    return RequestError(
        problem.problem + more,
        tensor=name,
        seen=problem.seen,
        accepted=problem.accepted,
        fix="--skip leaves such modules as they are",
    )


def _shared(chosen: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Partners of one fused projection share the largest magnitude where both become NVFP4."""
    groups: dict[str, list[str]] = {}
    for name, assignment in chosen.items():
        parent, _, last = name.rpartition(".")
        if last in _FUSED_AS and assignment.scheme == "nvfp4":
            groups.setdefault(f"{parent}.{_FUSED_AS[last]}", []).append(name)
    partners = {name: tuple(names) for names in groups.values() if len(names) > 1 for name in names}
    return {
        name: attrs.evolve(assignment, partners=partners.get(name, ())) for name, assignment in chosen.items()
    }
