"""Writing plain checkpoints: nothing is declared, because nothing is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.errors import RequestError
from vtensors.records import ConventionWriter, OutputTensor, WeightToWrite, WrittenCheckpoint


def spell(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    """Never asked with success: a quantized weight is not plain. Raises RequestError."""
    raise RequestError(
        "a quantized weight is not plain",
        tensor=weight.module,
        seen=weight.scheme,
        fix="--to plain:bf16 makes float values of it",
    )


def configure(written: WrittenCheckpoint) -> Mapping[str, Mapping[str, Any] | None]:
    """config.json without quantization blocks; no hf_quant_config.json."""
    return {CONFIG: written.config, HF_QUANT: None}


WRITER = ConventionWriter(schemes=(), spell=spell, configure=configure)
