"""Tensors grouped by module, KV-cache scales set apart, stacked experts given their projection's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from vtensors.records import TensorGroup
from vtensors.tensors import TensorInfo

STACKED_PROJECTIONS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
# What may follow the projection's name in `experts.gate_up_proj<...>`, and the suffix it stands for.
_STACKED_SUFFIX = {
    "": "weight",
    "_weight": "weight",
    "_packed": "weight_packed",
    "_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    "_global_scale": "weight_global_scale",
    "_bias": "bias",
}
_KV = re.compile(
    r"^(?P<owner>.*?)(?:\.(?:[qkv]_proj|qkv_proj|attn))?\.(?P<what>[qkv]_scale|kv_scale|[qkv]_zero_point|output_scale)$"
)
# The centre of an affine cache: nvidia-modelopt 0.47 export/quant_utils.py, [1, heads, 1, head_dim].
_KV_BIAS = re.compile(r"^(?P<owner>.*)\.[kv]_proj\.(?P<what>[kv]_bias)$")
# The last parts that `kv_owner` knows: a name with another one is not asked about.
_KV_SUFFIXES = frozenset(
    ["q_scale", "k_scale", "v_scale", "kv_scale", "output_scale", "k_bias", "v_bias"]
    + [f"{letter}_zero_point" for letter in "qkv"]
)
_ATTENTION_PROJECTION = re.compile(r"\.([qkv]_proj)\.output_scale$")


@attrs.frozen(kw_only=True)
class Grouped:
    """groups: by module. kv_scales: attention module -> {k, v, q or kv -> TensorInfo}.

    duplicates: pairs of tensors that give the same KV scale, or the same part of a module.
    """

    groups: tuple[TensorGroup, ...]
    kv_scales: Mapping[str, Mapping[str, TensorInfo]]
    duplicates: tuple[tuple[str, str], ...] = ()


def group_tensors(tensors: Iterable[TensorInfo]) -> Grouped:
    """Groups of tensors by the module that owns them; a bare parameter stays with its owner's group."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    kv_scales: dict[str, dict[str, TensorInfo]] = {}
    duplicates: list[tuple[str, str]] = []
    for info in tensors:
        module, _, suffix = info.name.rpartition(".")
        if suffix in _KV_SUFFIXES:
            owner = kv_owner(info.name)
            if owner is not None:
                module, what = owner
                twin = kv_scales.setdefault(module, {}).setdefault(what, info)
                if twin is not info:
                    duplicates.append((twin.name, info.name))
                continue
        if module.endswith(".experts"):
            module, suffix = _stacked_name(module, suffix)
        twin = groups.setdefault(module, {}).setdefault(suffix, info)
        if twin is not info:
            duplicates.append((twin.name, info.name))
    return Grouped(
        groups=tuple(TensorGroup(module=module, tensors=found) for module, found in groups.items()),
        kv_scales=kv_scales,
        duplicates=tuple(duplicates),
    )


def kv_owner(name: str) -> tuple[str, str] | None:
    """(attention module, `k` | `v` | `q` | `kv` | `k_zero_point` | `k_bias` ...) of a KV-cache scale, or None.

    Accepted names: `self_attn.k_scale`, `self_attn.k_proj.k_scale`, `self_attn.qkv_proj.k_scale`,
    `self_attn.attn.k_scale`, `self_attn.k_proj.output_scale`, `self_attn.kv_scale`, `self_attn.k_proj.k_bias`.
    """
    found = _KV.match(name) or _KV_BIAS.match(name)
    if not found:
        return None
    what = found["what"]
    if what == "output_scale":
        projection = _ATTENTION_PROJECTION.search(name)
        return (found["owner"], projection[1][0]) if projection else None
    return found["owner"], what.removesuffix("_scale")


def _stacked_name(module: str, suffix: str) -> tuple[str, str]:
    for projection in STACKED_PROJECTIONS:
        if suffix.startswith(projection):
            rest = suffix[len(projection) :]
            return f"{module}.{projection}", _STACKED_SUFFIX.get(rest, rest.removeprefix("_"))
    return module, suffix
