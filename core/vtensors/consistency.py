"""What the tensors of one checkpoint must have in common, whatever each of them is on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vtensors.counts import counted
from vtensors.errors import ClaimError, VtensorsError
from vtensors.forms import FLOAT_DTYPES
from vtensors.modules import Module
from vtensors.tensors import TensorInfo


def inconsistencies(
    modules: Mapping[str, Module],
    kv_scales: Mapping[str, Mapping[str, TensorInfo]],
    config_dtype: str | None,
) -> Iterator[VtensorsError]:
    """What a load refuses: two 16-bit dtypes, KV-cache scales that are no floats, gaps in activation scales.

    modules: those that are used. kv_scales: attention module -> {k, v, ... -> TensorInfo}.
    config_dtype: `BF16` or `F16` where config.json names the model's dtype.
    """
    kv = [info for scales in kv_scales.values() for what, info in scales.items() if "zero_point" not in what]
    parts = [info for module in modules.values() for info in module.claim.roles.values()]
    yield from _mixed_halves([*parts, *kv], config_dtype)
    for info in kv:
        if info.dtype not in FLOAT_DTYPES:
            yield ClaimError(
                "a KV-cache scale that is not a float",
                file=info.file,
                tensor=info.name,
                seen=info.describe(),
                accepted=", ".join(FLOAT_DTYPES),
                fix="export the checkpoint again, with KV-cache scales in a float dtype",
            )
    yield from _pre_scale_gaps(modules.values())


def _mixed_halves(infos: Iterable[TensorInfo], config_dtype: str | None) -> Iterator[VtensorsError]:
    """BF16 and F16 in one model: their bytes cannot be told apart, so one of them is a mistake."""
    halves: dict[str, list[TensorInfo]] = {"BF16": [], "F16": []}
    for info in infos:
        if info.dtype in halves:
            halves[info.dtype].append(info)
    if not (halves["BF16"] and halves["F16"]):
        return
    wanted = config_dtype or max(halves, key=lambda dtype: len(halves[dtype]))
    other = "F16" if wanted == "BF16" else "BF16"
    info = halves[other][0]
    yield ClaimError(
        f"{other} beside {wanted}: {len(halves[other])} of the model's tensors",
        file=info.file,
        tensor=info.name,
        seen=info.describe(),
        accepted=f"{wanted} as in config.json and the other tensors, or F32",
        fix="one of the two dtypes is wrong: save the checkpoint anew in one 16-bit dtype",
    )


def _pre_scale_gaps(modules: Iterable[Module]) -> Iterator[VtensorsError]:
    """Layers that lack an activation scale which the same projection has in other layers.

    A writer folds pre_quant_scale into the layer before, then it is nowhere; or it cannot, then it is
    everywhere. Without it the weights alone give wrong results.
    """
    kinds: dict[tuple[str, str, str], list[Module]] = {}
    for module in modules:
        if any(place.role == "pre_scale" for place in module.claim.form.tensors):
            last = module.name.rpartition(".")[2]
            kinds.setdefault((last, module.scheme, module.algorithm), []).append(module)
    for alike in kinds.values():
        scaled = [module for module in alike if "pre_scale" in module.claim.roles]
        for module in alike if scaled else ():
            if "pre_scale" in module.claim.roles:
                continue
            suffix = next(p.suffix for p in module.claim.form.tensors if p.role == "pre_scale")
            yield ClaimError(
                f"the activation scale is missing here, and present in {counted(len(scaled), 'module')} of this kind",
                file=module.claim.codes.file,
                tensor=f"{module.name}.{suffix}",
                seen=f"{scaled[0].name} has one",
                accepted="the scale in all modules of one kind, or in none",
                fix="fetch the whole checkpoint, or export it again",
            )
