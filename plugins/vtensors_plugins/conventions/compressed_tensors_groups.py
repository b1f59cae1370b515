"""compressed-tensors' quantization_config: groups of arguments with targets, and what is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.errors import RequestError
from vtensors.records import WeightToWrite, WrittenCheckpoint

# The library version whose arguments are written (compressed-tensors quantization/quant_args.py).
_VERSION = "0.19.0"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Heads are not of class Linear in every engine (ParallelLMHead in vllm 0.33), so they are named.
_HEADS = ("lm_head",)
_EMBEDDINGS = ("embed_tokens", "embeddings", "wte", "tok_embeddings", "pos_embed")


@attrs.frozen(kw_only=True)
class _Kind:
    """What modules of one group have in common."""

    scheme: str
    activations: str
    block: tuple[int, int] | None
    group_size: int | None
    scale_dtype: str | None


def configure(written: WrittenCheckpoint) -> Mapping[str, Mapping[str, Any] | None]:
    """config.json with groups; no hf_quant_config.json. Raises RequestError for a KV cache that is not FP8 or
    INT8."""
    if not written.weights:
        return {CONFIG: written.config, HF_QUANT: None}
    kinds: dict[_Kind, list[str]] = {}
    for weight in written.weights:
        kinds.setdefault(_kind(weight), []).append(weight.module)
    ignored = [
        name
        for name, shape in written.unquantized.items()
        if len(shape) == 2 and name.rpartition(".")[2] not in _EMBEDDINGS
    ]
    formats = {_format(kind) for kind in kinds}
    groups = {
        f"group_{number}": _group(kind, _targets(names, kinds, kind))
        for number, (kind, names) in enumerate(kinds.items())
    }
    block = {
        "config_groups": groups,
        "format": next(iter(formats)) if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": ignored,
        "kv_cache_scheme": _kv(written.kv_cache),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _VERSION,
    }
    return {CONFIG: {**written.config, "quantization_config": block}, HF_QUANT: None}


def _kind(weight: WeightToWrite) -> _Kind:
    activations = weight.activations
    has_input = bool({"input_scale", "input_divisor"} & set(weight.roles))
    if weight.scheme == "nvfp4" and activations == "fp4" and not has_input:
        # Declared W4A4 without its scale cannot be run so; engines would read memory that was never filled.
        activations = "16bit"
    if activations == "fp8-static" and not has_input:
        activations = "fp8-dynamic"
    block = (weight.block or (128, 128)) if weight.scheme == "fp8-block" else None
    dtype = weight.roles["scale"].dtype if "scale" in weight.roles and weight.scheme != "mxfp8" else None
    return _Kind(
        scheme=weight.scheme,
        activations=activations,
        block=block,
        group_size=(weight.group_size or (block or (0, 128))[1]) if block else None,
        scale_dtype="torch.float32" if dtype in ("F32", "U8", "F8_E8M0") else None,
    )


def _format(kind: _Kind) -> str:
    if kind.scheme == "nvfp4":
        return "nvfp4-pack-quantized"
    if kind.scheme == "mxfp8":
        return "mxfp8-quantized"
    return "naive-quantized" if kind.activations == "16bit" else "float-quantized"


def _targets(names: list[str], kinds: Mapping[_Kind, list[str]], kind: _Kind) -> list[str]:
    """`Linear` for a checkpoint of one kind, with heads by name; else one pattern per sort of module."""
    heads = [f"re:.*{name}$" for name in _HEADS if any(n.rpartition(".")[2] == name for n in names)]
    if len(kinds) == 1:
        return ["Linear", *heads]
    others = {_sort(name) for other, theirs in kinds.items() if other is not kind for name in theirs}
    sorts: dict[str, list[str]] = {}
    for name in names:
        sorts.setdefault(_sort(name), []).append(name)
    targets = []
    for sort, members in sorts.items():
        if sort in others:
            targets.extend(members)
        else:
            targets.append(_pattern(sort))
    return targets


def _sort(name: str) -> str:
    return _NUMBER.sub("#", name)


def _pattern(sort: str) -> str:
    """A start-anchored pattern of all modules of one sort, whatever their prefix: `re:.*layers\\.\\d+\\.mlp...`."""
    _, marker, rest = sort.partition("layers.#.")
    tail = f"{marker}{rest}" if marker else sort
    return "re:.*" + re.escape(tail).replace(r"\#", r"\d+").replace("#", r"\d+") + "$"


def _group(kind: _Kind, targets: Iterable[str]) -> dict[str, Any]:
    return {
        "format": _format(kind),
        "input_activations": _input(kind),
        "output_activations": None,
        "targets": list(targets),
        "weights": _weights(kind),
    }


@attrs.frozen(kw_only=True)
class _Arguments:
    """compressed-tensors' QuantizationArgs, under the names and in the order of its JSON."""

    actorder: None = None
    block_structure: list[int] | None = None
    dynamic: bool | str = False
    group_size: int | None = None
    num_bits: int = 8
    observer: str | None = None
    observer_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    scale_dtype: str | None = None
    strategy: str = "tensor"
    symmetric: bool = True
    type: str = "float"
    zp_dtype: None = None


def _weights(kind: _Kind) -> dict[str, Any]:
    observer = "memoryless_minmax"
    if kind.scheme == "nvfp4":
        arguments = _Arguments(
            num_bits=4,
            group_size=16,
            strategy="tensor_group",
            scale_dtype="torch.float8_e4m3fn",
            observer=observer,
        )
    elif kind.scheme == "mxfp8":
        arguments = _Arguments(group_size=32, strategy="group", scale_dtype="torch.uint8", observer=observer)
    else:
        strategy = {"fp8-tensor": "tensor", "fp8-row": "channel"}.get(kind.scheme, "block")
        one_row = kind.block is not None and kind.block[0] == 1
        arguments = _Arguments(
            strategy="group" if one_row else strategy,
            group_size=kind.block[1] if kind.block and one_row else None,
            block_structure=list(kind.block) if kind.block and not one_row else None,
            scale_dtype=kind.scale_dtype,
            observer=observer,
        )
    return attrs.asdict(arguments)


def _input(kind: _Kind) -> dict[str, Any] | None:
    if kind.activations == "16bit":
        return None
    if kind.activations == "fp4":
        arguments = _Arguments(
            num_bits=4,
            group_size=16,
            strategy="tensor_group",
            dynamic="local",
            scale_dtype="torch.float8_e4m3fn",
            observer="static_minmax",
        )
    elif kind.activations == "fp8-static":
        arguments = _Arguments(observer="static_minmax", scale_dtype=kind.scale_dtype)
    elif kind.scheme == "mxfp8":
        arguments = _Arguments(dynamic=True, strategy="group", group_size=32, scale_dtype="torch.uint8")
    elif kind.block is not None:
        arguments = _Arguments(dynamic=True, strategy="group", group_size=kind.group_size)
    else:
        arguments = _Arguments(dynamic=True, strategy="token")
    return attrs.asdict(arguments)


def _kv(algorithm: str | None) -> dict[str, Any] | None:
    if algorithm is None or algorithm.lower() == "none":
        return None
    kinds = {"FP8": "float", "INT8": "int"}
    if algorithm.upper() not in kinds:
        raise RequestError(
            "compressed-tensors cannot express this KV cache",
            tensor="kv_cache_quant_algo",
            seen=algorithm,
            accepted=", ".join(kinds),
            fix="choose another target for this checkpoint",
        )
    return attrs.asdict(_Arguments(type=kinds[algorithm.upper()]))
