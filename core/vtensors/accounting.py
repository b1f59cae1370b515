"""Every tensor consumed once, waived by name, or refused by name; every weight of the model filled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from vtensors.claim_reasons import Unclaimed
from vtensors.claiming import Claims
from vtensors.consistency import inconsistencies
from vtensors.counts import agreeing, counted
from vtensors.errors import ArchitectureError, ClaimError, VtensorsError
from vtensors.forms import UNUSED_ROLE
from vtensors.grouping import Grouped
from vtensors.matching import nearest
from vtensors.modules import Module, is_quantized
from vtensors.records import ExpectedWeight, ModelPlan
from vtensors.tensors import TensorInfo

INPUT_SCALE_WEIGHT_ONLY = (
    "input scale of a weight-only module (used only when 4-bit activations are asked for)"
)
INPUT_SCALE_DYNAMIC = "input scale beside dynamic activations: not used"
KV_SCALES = "KV-cache scales: the cache is kept in 16 bits unless FP8 is asked for"
SYMMETRIC = "zero point or shape record of a symmetric scheme"
UNUSED_SCALE = "scale beside a weight that its writer left unquantized: not used"
_EXTRA_ROLES = ("weight_zero_point", "input_zero_point", "weight_shape")


# The nearest name is looked up for so many problems of a kind: each takes milliseconds, and there may be 100,000.
_LOOKUPS = 20


@attrs.frozen(kw_only=True)
class Accounting:
    """Where every tensor goes.

    waived: reason -> tensor names. waived_modules: module -> reason. problems: what a load refuses.
    unclaimed: tensors that no convention reads and nothing waives.
    used: module name -> (canonical name, what the model expects), empty without an architecture.
    """

    waived: Mapping[str, tuple[str, ...]]
    waived_modules: Mapping[str, str]
    unclaimed: tuple[str, ...]
    problems: tuple[VtensorsError, ...]
    used: Mapping[str, tuple[str, ExpectedWeight]]


def account(
    modules: Mapping[str, Module],
    claims: Claims,
    grouped: Grouped,
    plan: ModelPlan | None,
    *,
    config_dtype: str | None,
    declared_nothing: bool,
) -> Accounting:
    """The accounting of a checkpoint under an architecture's plan (None: unknown architecture).

    config_dtype: `BF16` or `F16` where config.json names the model's dtype.
    declared_nothing: no configuration file declares a quantization (for messages).
    """
    waive = _Waivers(plan)
    waived: dict[str, list[str]] = {}
    waived_modules: dict[str, str] = {}
    for name, module in modules.items():
        reason = waive.reason(module.tensors[0])
        if reason is not None:
            waived_modules[name] = reason
            if module.claim.part is None or (module.claim.part.expert == 0 == module.claim.part.row_begin):
                waived.setdefault(reason, []).extend(module.tensors)
            continue
        for why, tensor in _waived_roles(module):
            waived.setdefault(why, []).append(tensor)
    left: dict[str, Unclaimed] = {}
    for name, unclaimed in claims.unclaimed.items():
        reasons = {info.name: waive.reason(info.name) for info in unclaimed.group.tensors.values()}
        for tensor, reason in reasons.items():
            if reason is not None:
                waived.setdefault(reason, []).append(tensor)
        if not all(reasons.values()):
            left[name] = unclaimed
    used = {expected.module: (own, expected) for own, expected in (plan.weights if plan else {}).items()}
    attention = {name.rpartition(".")[0] for name, (_, wanted) in used.items() if wanted.part == "attention"}
    stray: list[TensorInfo] = []
    for owner, scales in grouped.kv_scales.items():
        for info in scales.values():
            reason = waive.reason(info.name)
            if reason is None and plan is not None and owner not in attention:
                stray.append(info)
            else:
                waived.setdefault(reason or KV_SCALES, []).append(info.name)

    problems = [
        *_unclaimed_problems(left, used, declared_nothing),
        *_repeated((*grouped.duplicates, *claims.repeated)),
    ]
    alive = {name: module for name, module in modules.items() if name not in waived_modules}
    problems.extend(inconsistencies(alive, grouped.kv_scales, config_dtype))
    if plan is not None:
        problems.extend(_against_plan(alive, used, left))
        problems.extend(_stray_kv_scale(info, attention) for info in stray)
    nobodys = [info for u in left.values() for info in u.group.tensors.values()]
    unclaimed_names = tuple(info.name for info in (*nobodys, *stray))
    return Accounting(
        waived={reason: tuple(names) for reason, names in waived.items()},
        waived_modules=waived_modules,
        unclaimed=unclaimed_names,
        problems=tuple(problems),
        used=used,
    )


@attrs.define
class _Waivers:
    plan: ModelPlan | None

    def reason(self, tensor: str) -> str | None:
        if self.plan is None:
            return None
        return next((w.reason for w in self.plan.waivers if tensor.startswith(w.prefix)), None)


def _waived_roles(module: Module) -> Iterator[tuple[str, str]]:
    part = module.claim.part
    if UNUSED_ROLE in module.claim.roles:
        yield UNUSED_SCALE, module.claim.roles[UNUSED_ROLE].name
    if not is_quantized(module.scheme) or (part is not None and (part.expert or part.row_begin)):
        return
    for role, info in module.claim.roles.items():
        if role in ("input_scale", "input_divisor") and module.declared == "16bit":
            yield INPUT_SCALE_WEIGHT_ONLY, info.name
        elif role == "input_scale" and module.declared == "fp8-dynamic":
            yield INPUT_SCALE_DYNAMIC, info.name
        elif role in _EXTRA_ROLES:
            yield SYMMETRIC, info.name


# --- problems ---------------------------------------------------------------------------------------------


def _unclaimed_problems(
    left: Mapping[str, Unclaimed],
    used: Mapping[str, tuple[str, ExpectedWeight]],
    declared_nothing: bool,
) -> Iterator[VtensorsError]:
    for name, unclaimed in left.items():
        tensors = [info.name for info in unclaimed.group.tensors.values()]
        fits = next((c for c, reason in unclaimed.reasons if reason.startswith("would fit")), None)
        fix = unclaimed.fix
        if fits is not None and declared_nothing:
            count = sum(1 for u in left.values() if any(r.startswith("would fit") for _, r in u.reasons))
            fix = (
                f"{counted(count, 'module')} {agreeing(count, 'looks', 'look')} like {fits}, but no "
                "quantization_config was found in config.json and no hf_quant_config.json: fetch the file "
                "that declares them"
            )
        elif name in used and any(
            _looks_packed(info.dtype, info.shape, used[name][1]) and not unclaimed.contested
            for info in unclaimed.group.tensors.values()
        ):
            fix = f"looks NVFP4-packed but no NVFP4 rule matched {name}; {fix}"
        yield ClaimError(
            f"{unclaimed.readers} these tensors: {', '.join(tensors)}",
            tensor=name,
            seen=unclaimed.describe(),
            fix=fix,
        )


def _repeated(pairs: Sequence[tuple[str, str]]) -> Iterator[VtensorsError]:
    for first, second in pairs:
        yield ClaimError(
            f"gives the same as '{first}'",
            tensor=second,
            seen=f"{first} and {second}",
            accepted="one of them",
            fix="remove one copy of the tensors from the checkpoint",
        )


def _stray_kv_scale(info: TensorInfo, attention: Iterable[str]) -> VtensorsError:
    owner = info.name.rpartition(".")[0]
    near = nearest(owner, attention)
    return ArchitectureError(
        "a KV-cache scale of no attention layer of the model",
        file=info.file,
        tensor=info.name,
        seen=info.describe(),
        accepted=f"scales of the model's attention layers{f', for example below {near!r}' if near else ''}",
        fix="remove the tensor, or use the checkpoint that fits this config.json",
    )


def _against_plan(
    modules: Mapping[str, Module],
    used: Mapping[str, tuple[str, ExpectedWeight]],
    left: Mapping[str, Unclaimed],
) -> Iterator[VtensorsError]:
    lookups = _LOOKUPS
    for name, (_, expected) in used.items():
        module = modules.get(name)
        if module is None:
            if expected.required and not _explained(name, left):
                lookups -= 1
                yield _missing(name, expected, modules if lookups >= 0 else {})
        else:
            yield from _misfit(module, expected)
    lookups = _LOOKUPS
    for name, module in modules.items():
        if name not in used:
            lookups -= 1
            near = nearest(name, used) if lookups >= 0 and len(used) < 5000 else None
            yield ArchitectureError(
                f"the model has no place for {', '.join(module.tensors)}",
                tensor=module.tensors[0],
                seen=f"{module.scheme} {list(module.shape)}",
                accepted=f"the weights of the model{f'; the nearest is {near!r}' if near else ''}",
                fix="remove the tensor, or use the checkpoint that fits this config.json",
            )


def _explained(name: str, left: Mapping[str, Unclaimed]) -> bool:
    """Whether the module is missing because its tensors, or its stacked owner's, are unclaimed."""
    if name in left:
        return True
    stacked = _stacked_name(name)
    return bool(stacked) and (stacked in left or stacked.rpartition(".")[0] in left)


def _stacked_name(name: str) -> str:
    """The tensor of all experts that would hold the module, `` for a module that is not an expert's."""
    owner, _, rest = name.partition(".experts.")
    projection = rest.rpartition(".")[2]
    stacked = "gate_up_proj" if projection in ("gate_proj", "up_proj") else projection
    return f"{owner}.experts.{stacked}" if rest else ""


def _stacked_spelling(name: str) -> str:
    stacked = _stacked_name(name)
    return f", or all experts stacked as '{stacked}'" if stacked else ""


def _missing(name: str, expected: ExpectedWeight, modules: Mapping[str, Module]) -> VtensorsError:
    is_bare = name.rpartition(".")[2] in ("A_log", "dt_bias")
    near = nearest(name, modules) if len(modules) < 5000 else None
    return ArchitectureError(
        "a weight of the model is not in the checkpoint",
        tensor=name if is_bare else f"{name}.weight",
        seen=f"no such tensor{f'; the nearest module is {near!r}' if near else ''}",
        accepted=f"shape {list(expected.shape)}{_stacked_spelling(name)}",
        fix="fetch the whole checkpoint: a shard or the tensor is missing",
    )


def _looks_packed(dtype: str, shape: tuple[int, ...], expected: ExpectedWeight) -> bool:
    """Whether it is a byte matrix of half the width that the model expects."""
    return dtype == "U8" and len(shape) == 2 and (shape[0], 2 * shape[1]) == expected.shape


def _misfit(module: Module, expected: ExpectedWeight) -> Iterator[VtensorsError]:
    codes = module.claim.codes
    if module.shape != expected.shape:
        packed = _looks_packed(codes.dtype, module.shape, expected)
        yield ArchitectureError(
            "the shape does not fit config.json",
            file=codes.file,
            tensor=codes.name,
            seen=f"{list(module.shape)} ({module.scheme})",
            accepted=f"{list(expected.shape)}",
            fix=f"looks NVFP4-packed but no NVFP4 rule matched {module.name}" if packed else "",
        )
    bias = module.claim.roles.get("bias")
    if bias is not None and expected.bias is False:
        yield ArchitectureError(
            "the model has no bias here",
            file=bias.file,
            tensor=bias.name,
            seen=bias.describe(),
            accepted="no bias, by config.json",
            fix="remove the tensor, or correct the bias entry of config.json",
        )
    if bias is None and expected.bias is True:
        yield ArchitectureError(
            "the bias that config.json asks for is not in the checkpoint",
            tensor=f"{module.name}.bias",
            seen="no such tensor",
            accepted=f"shape [{expected.shape[0]}]",
            fix="fetch the whole checkpoint",
        )
