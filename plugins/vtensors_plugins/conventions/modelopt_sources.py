"""What each file of a ModelOpt checkpoint says, under one set of names: nested or flat, old keys or new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from vtensors.configs import ConfigFiles, QuantizationBlock, string_list
from vtensors.errors import DeclarationError

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_fp8")


@attrs.frozen(kw_only=True)
class Source:
    """What one file says. block: the object; excludes and kv under the names that file uses."""

    block: QuantizationBlock
    algorithm: str | None
    layers: Mapping[str, Mapping[str, Any]] | None
    excludes: tuple[str, ...]
    kv: str | None
    producer: str


def read_sources(configs: ConfigFiles) -> list[Source]:
    """Every block of ModelOpt's, those of config.json before hf_quant_config.json.

    Errors: quant_algo, quantized_layers or a list of modules of another type than its writer gives it.
    """
    blocks = [block for block in map(_flat, configs.blocks()) if _is_modelopt(block)]
    legacy = configs.hf_quantization()
    return [_parse(block) for block in [*blocks, *([legacy] if legacy else [])]]


def quantizes_no_weight(sources: list[Source], configs: ConfigFiles) -> bool:
    """Whether ModelOpt names no algorithm and means it: only the KV cache is quantized, or `quant_algo` is null.

    The writer leaves the key out of config.json where it is null (nvidia-modelopt 0.47 export/convert_hf_config.py).
    A block of another method is not overruled.
    """
    if any(not _is_modelopt(block) for block in map(_flat, configs.blocks())):
        return False
    return any(source.kv or "quant_algo" in source.block.values for source in sources)


def _flat(block: QuantizationBlock) -> QuantizationBlock:
    """The block with the object `quantization` in place of its keys: hf_quant_config.json put into config.json."""
    nested = block.values.get("quantization")
    if not isinstance(nested, Mapping):
        return block
    outer = {key: value for key, value in block.values.items() if key != "quantization"}
    return attrs.evolve(block, where=f"{block.where}.quantization", values={**outer, **nested})


def _is_modelopt(block: QuantizationBlock) -> bool:
    method, producer = block.quant_method, block.values.get("producer")
    if method in METHODS:
        return True
    by_producer = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    has_algorithm = isinstance(block.values.get("quant_algo"), str) or "quantized_layers" in block.values
    if by_producer and method is None and "quant_algo" in block.values:
        return True
    return has_algorithm and (method in (None, "fp8") or by_producer)


def _parse(block: QuantizationBlock) -> Source:
    values = block.values
    algorithm = values.get("quant_algo")
    if algorithm is not None and not isinstance(algorithm, str):
        raise DeclarationError(
            "quant_algo is not a string",
            file=block.where,
            seen=repr(algorithm),
            accepted="a name such as 'NVFP4'",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    layers = values.get("quantized_layers")
    if layers is not None and not (
        isinstance(layers, Mapping) and all(isinstance(entry, Mapping) for entry in layers.values())
    ):
        raise DeclarationError(
            "quantized_layers is not an object of objects",
            file=block.where,
            seen=repr(layers)[:80],
            accepted="{module: {quant_algo: ...}}",
            fix="correct the configuration file, or use the one that belongs to the weights",
        )
    excludes = string_list(values, "ignore", block.where) or string_list(
        values, "exclude_modules", block.where
    )
    producer = values.get("producer")
    version = f"modelopt {producer.get('version', '')}" if isinstance(producer, Mapping) else "modelopt"
    return Source(
        block=block,
        algorithm=algorithm,
        layers=layers,
        excludes=tuple(excludes),
        kv=_kv(values),
        producer=version.strip(),
    )


def _kv(values: Mapping[str, Any]) -> str | None:
    scheme = values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        kind = {"float": "FP", "int": "INT"}.get(str(scheme.get("type")), str(scheme.get("type")))
        return f"{kind}{scheme.get('num_bits')}"
    return str(scheme) if scheme else None
