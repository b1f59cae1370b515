"""Writing ModelOpt's convention: global scales multiply; one quant_algo, or quantized_layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.records import ConventionWriter, Layout, OutputTensor, WeightToWrite, WrittenCheckpoint
from vtensors_plugins.conventions.common_writing import (
    as_stored,
    exponent_bytes,
    grid,
    one_value,
    optional_bias,
    refuse,
    refuse_roles,
    scalar,
    widened,
)

_NAME = "modelopt"
# Loaders read the files of exactly this producer (vllm 0.33 model_loader/weight_utils.py), so it is named with
# the version whose layout is written, and this program beside it.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
# (scheme, activations) -> quant_algo (nvidia-modelopt 0.47 export/quant_utils.py).
_ALGORITHMS = {
    ("nvfp4", "fp4"): "NVFP4",
    ("nvfp4", "16bit"): "W4A16_NVFP4",
    ("nvfp4", "fp8-static"): "W4A8_NVFP4_FP8",
    ("fp8-tensor", "fp8-static"): "FP8",
    ("fp8-row", "fp8-dynamic"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8-block", "fp8-dynamic"): "fp8_pb_wo",
    ("mxfp8", "fp8-dynamic"): "MXFP8",
}
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")


def spell(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    """The tensors of one module. Raises RequestError for activations that no algorithm has, other blocks than
    128 x 128, and a static input scale beside dynamic activations."""
    algorithm_of(weight)
    codes = as_stored(weight, "codes", "weight")
    if weight.scheme == "nvfp4":
        tensors = [
            codes,
            as_stored(weight, "block_scale", "weight_scale"),
            *scalar(
                weight,
                "weight_scale_2",
                (),
                multiplier="global_scale",
                divisor="global_divisor",
                divides=False,
            ),
            *scalar(
                weight, "input_scale", (), multiplier="input_scale", divisor="input_divisor", divides=False
            ),
        ]
        if "pre_scale" in weight.roles:
            tensors.append(as_stored(weight, "pre_scale", "pre_quant_scale"))
        return (*tensors, *optional_bias(weight))
    if weight.scheme == "fp8-tensor":
        inputs = scalar(
            weight, "input_scale", (), multiplier="input_scale", divisor="input_divisor", divides=False
        )
        return (codes, widened(weight, "scale", "weight_scale", ()), *inputs, *optional_bias(weight))
    refuse_roles(weight, _NAME, {"input_scale": "a static input_scale", "pre_scale": "pre_quant_scale"})
    if weight.scheme == "mxfp8":
        return (codes, exponent_bytes(weight, "weight_scale"), *optional_bias(weight))
    shape: tuple[int, ...] = (weight.shape[0],)
    if weight.scheme == "fp8-block":
        if weight.block not in (None, (128, 128)):
            raise refuse(weight, f"blocks of {weight.block}", _NAME, "it is read with blocks of 128 x 128")
        rows, columns = grid(weight)
        shape = (rows, 1, columns, 1) if rows * columns > 1 else ()
    return (codes, widened(weight, "scale", "weight_scale", shape), *optional_bias(weight))


def algorithm_of(weight: WeightToWrite) -> str:
    """The quant_algo that declares a weight. Raises RequestError where there is none."""
    if weight.algorithm:
        return weight.algorithm
    if weight.scheme == "nvfp4" and "pre_scale" in weight.roles:
        return "NVFP4_AWQ"
    found = _ALGORITHMS.get((weight.scheme, weight.activations))
    if found is None:
        accepted = [activations for scheme, activations in _ALGORITHMS if scheme == weight.scheme]
        words = "16-bit" if weight.activations == "16bit" else weight.activations
        raise refuse(
            weight, f"{words} activations", _NAME, f"{weight.scheme} comes with {' or '.join(accepted)}"
        )
    return found


def kv_scale(attention: str, what: str, stored: Layout) -> tuple[str, Layout]:
    """`<attention>.k_proj.k_scale`, F32 []. Raises RequestError for per-head scales and for those of q."""
    one_value(stored, "a KV-cache scale")
    return f"{attention}.{what}_proj.{what}_scale", Layout(dtype="F32", shape=())


def configure(written: WrittenCheckpoint) -> Mapping[str, Mapping[str, Any] | None]:
    """config.json's quantization_config and hf_quant_config.json, which say the same."""
    if not written.weights:
        return {CONFIG: written.config, HF_QUANT: None}
    producer = {**_PRODUCER, "converted_by": f"vtensors {written.version}"}
    layers = _collapsed({weight.module: _entry(weight) for weight in written.weights})
    kinds = list({str(entry): entry for entry in layers.values()}.values())
    kv: Any = written.kv_cache
    kv_scheme = {"dynamic": False, "num_bits": 8, "type": "float"} if kv == "FP8" else kv
    if len(kinds) == 1:
        excluded = sorted(written.unquantized)
        details = {"kv_cache_quant_algo": kv, **kinds[0], "exclude_modules": excluded}
        groups = {"group_0": {**_group(kinds[0]), "targets": ["Linear"]}}
        block: dict[str, Any] = {
            "config_groups": groups,
            "ignore": excluded,
            "quant_algo": kinds[0]["quant_algo"],
        }
    else:
        details = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": kv, "quantized_layers": layers}
        groups = {
            f"group_{number}": {
                **_group(kind),
                "targets": sorted(name for name, entry in layers.items() if entry == kind),
            }
            for number, kind in enumerate(kinds)
        }
        block = {
            "config_groups": groups,
            "quantized_layers": layers,
            "ignore": [],
            "quant_algo": "MIXED_PRECISION",
        }
    if kv is not None:
        block["kv_cache_scheme"] = kv_scheme
    block |= {"producer": producer, "quant_method": "modelopt"}
    return {
        CONFIG: {**written.config, "quantization_config": block},
        HF_QUANT: {"producer": producer, "quantization": details},
    }


def _entry(weight: WeightToWrite) -> dict[str, Any]:
    algorithm = algorithm_of(weight)
    entry: dict[str, Any] = {"quant_algo": algorithm}
    if weight.scheme in ("nvfp4", "mxfp8"):
        scales = weight.roles["block_scale" if weight.scheme == "nvfp4" else "scale"]
        entry["group_size"] = weight.shape[1] // scales.shape[-1]
    if "pre_scale" in weight.roles or algorithm.upper() == "NVFP4_AWQ":
        entry |= {"has_zero_point": False, "pre_quant_scale": True}
    return entry


def _collapsed(layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One entry for all experts of a layer where they are alike, as the publisher writes it."""
    kinds: dict[str, set[str]] = {}
    for name, entry in layers.items():
        found = _EXPERT.match(name)
        if found:
            kinds.setdefault(found[1], set()).add(str(entry))
    collapsed: dict[str, dict[str, Any]] = {}
    for name, entry in layers.items():
        found = _EXPERT.match(name)
        alike = found is not None and len(kinds[found[1]]) == 1
        collapsed[found[1] if found and alike else name] = entry
    return collapsed


def _group(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry as a config group, as the publisher writes it (export/convert_hf_config.py)."""
    algorithm = str(entry["quant_algo"]).upper()
    sizes = {"group_size": entry["group_size"]} if "group_size" in entry else {}
    weights: dict[str, Any] = {
        "dynamic": False,
        "num_bits": 4 if "NVFP4" in algorithm else 8,
        "type": "float",
        **sizes,
    }
    group: dict[str, Any] = {"weights": weights}
    if algorithm != "W4A16_NVFP4":
        bits = 4 if algorithm == "NVFP4" else 8
        inputs = {} if algorithm in ("FP8", "W4A8_NVFP4_FP8", "FP8_PER_CHANNEL_PER_TOKEN") else sizes
        group["input_activations"] = {"dynamic": False, "num_bits": bits, "type": "float", **inputs}
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        weights["strategy"] = "channel"
    return group


WRITER = ConventionWriter(
    schemes=("nvfp4", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8"),
    spell=spell,
    configure=configure,
    kv_scale=kv_scale,
    activations={
        "fp8-tensor": "fp8-static",
        "fp8-row": "fp8-dynamic",
        "fp8-block": "fp8-dynamic",
        "mxfp8": "fp8-dynamic",
    },
    arithmetic={"fp8-tensor": "modelopt"},
)
