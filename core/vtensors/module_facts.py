"""What headers and configurations say of each module, in a form that can be compared, grouped and hashed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from vtensors.grouping import kv_owner
from vtensors.matching import spellings
from vtensors.modules import Module, is_quantized
from vtensors.tensors import TensorInfo

if TYPE_CHECKING:
    from vtensors.checkpoint import Checkpoint

UNCLAIMED = "unclaimed"
KV_SCALES = "kv-cache scales"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ANY_ROLE = {"global_divisor": "global_scale", "input_divisor": "input_scale"}
_WORDS = {
    "bf16": "BF16",
    "f16": "F16",
    "f32": "F32",
    "fp8-tensor": "FP8 per tensor",
    "fp8-row": "FP8 per row",
    "fp8-block": "FP8 per block",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}


@attrs.frozen(kw_only=True, slots=True)
class ModuleFacts:
    """One module as its headers and the configuration describe it.

    scheme: a scheme's name, `unclaimed`, or `kv-cache scales` for an attention module's scales.
    declared, algorithm: activation precision and the publisher's word, the latter `` where the module is plain.
    stacking: `` for a module with tensors of its own, else `stacked` or `stacked, transposed`.
    tensors: role (a divisor under its scale's role) -> dtype and shape as stored, for example `F32 [1]`.
    nbytes: stored bytes, its share of a stacked tensor.
    """

    name: str
    scheme: str
    convention: str
    shape: tuple[int, ...]
    declared: str
    algorithm: str
    stacking: str
    tensors: Mapping[str, str]
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """The same facts as JSON values."""
        return {**attrs.asdict(self, recurse=False), "shape": list(self.shape), "tensors": dict(self.tensors)}

    @property
    def pattern(self) -> str:
        """The name with every number between dots as `*`: alike in all layers and experts."""
        return pattern_of(self.name)


def module_facts(checkpoint: Checkpoint) -> dict[str, ModuleFacts]:
    """module name -> facts of every module, those that no convention reads (`unclaimed`) included."""
    facts = {name: _facts_of(module) for name, module in checkpoint.modules.items()}
    for name, unclaimed in checkpoint.claims.unclaimed.items():
        infos = unclaimed.group.tensors
        key = name if name not in facts else f"{name} ({UNCLAIMED} part)"
        facts[key] = _bare(key, UNCLAIMED, {suffix: info.describe() for suffix, info in infos.items()}, infos)
    return facts


def kv_scale_facts(tensors: Iterable[TensorInfo]) -> dict[str, ModuleFacts]:
    """attention module -> facts of its KV-cache scales, by role `k`, `v`, `q` or `kv` under any stored name."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in tensors:
        if info.name.endswith(("_scale", "_zero_point")) and (owner := kv_owner(info.name)) is not None:
            found.setdefault(owner[0], {})[owner[1]] = info
    return {
        name: _bare(name, KV_SCALES, {what: info.describe() for what, info in sorted(infos.items())}, infos)
        for name, infos in found.items()
    }


def pattern_of(name: str) -> str:
    """`model.layers.*.mlp.down_proj` for `model.layers.17.mlp.down_proj`."""
    return _NUMBER.sub("*", name)


def scheme_words(scheme: str) -> str:
    """A scheme's name for people, for example `FP8 per row`; another's as it is."""
    return _WORDS.get(scheme, scheme)


def canonical_name(name: str) -> str:
    """One name for all prefix dialects of a module (`model.layers.0` and `model.language_model.layers.0`)."""
    return min(spellings(name))


def _facts_of(module: Module) -> ModuleFacts:
    claim = module.claim
    stacking = ""
    if claim.part is not None:
        stacking = "stacked, transposed" if claim.part.transposed else "stacked"
    return ModuleFacts(
        name=module.name,
        scheme=module.scheme,
        convention=module.convention,
        shape=module.shape,
        declared=module.declared,
        algorithm=module.algorithm if is_quantized(module.scheme) else "",
        stacking=stacking,
        tensors={_ANY_ROLE.get(role, role): info.describe() for role, info in claim.roles.items()},
        nbytes=module.nbytes,
    )


def _bare(name: str, scheme: str, tensors: dict[str, str], infos: Mapping[str, TensorInfo]) -> ModuleFacts:
    return ModuleFacts(
        name=name,
        scheme=scheme,
        convention="",
        shape=(),
        declared="",
        algorithm="",
        stacking="",
        tensors=tensors,
        nbytes=sum(info.nbytes for info in infos.values()),
    )
