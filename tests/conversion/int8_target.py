"""The example package's INT8 convention with a writer and an encoder: a third party's target of `convert`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from vtensors.manager import Plugins
from vtensors.records import (
    ConventionWriter,
    EncodeOptions,
    Layout,
    OutputTensor,
    WeightToWrite,
    WrittenCheckpoint,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples" / "vtensors-int8-rows" / "src"))


@attrs.frozen
class Int8Encoder:
    """INT8 codes of +-127 and a float32 scale per row."""

    needs_amax: bool = False
    row_step: int = 1
    block: tuple[int, int] | None = None

    def layouts(self, shape: tuple[int, ...], options: EncodeOptions) -> Mapping[str, Layout]:
        return {"codes": Layout(dtype="I8", shape=shape), "scale": Layout(dtype="F32", shape=(shape[0], 1))}

    def encode(
        self, rows: torch.Tensor, amax: torch.Tensor | None, options: EncodeOptions
    ) -> Mapping[str, torch.Tensor]:
        values = rows.to(torch.float32)
        scale = values.abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale == 0, 1.0, scale)
        return {"codes": (values / scale).round().to(torch.int8), "scale": scale}


ENCODER = Int8Encoder()


def spell(weight: WeightToWrite) -> tuple[OutputTensor, ...]:
    return tuple(
        OutputTensor(suffix=suffix, dtype=layout.dtype, shape=layout.shape, role=role)
        for role, suffix in (("codes", "weight"), ("scale", "weight_scale"), ("bias", "bias"))
        if (layout := weight.roles.get(role)) is not None
    )


def configure(written: WrittenCheckpoint) -> Mapping[str, Mapping[str, Any] | None]:
    block = {"quant_method": "int8-rows", "ignore": sorted(written.unquantized)}
    return {
        "config.json": {**written.config, "quantization_config": block},
        "hf_quant_config.json": None,
    }


def plugins_with_target() -> Plugins:
    """The built-in plugins and the example's, its convention writable and its scheme encodable."""
    import vtensors_int8_rows as example

    from fake_plugins import candidate, module

    writer = ConventionWriter(schemes=("int8-row",), spell=spell, configure=configure)
    convention = attrs.evolve(example.CONVENTION, write=writer)
    scheme = attrs.evolve(example.SCHEME, encoder="conversion.int8_target:ENCODER")
    hooks = {"vtensors_conventions": lambda: [convention], "vtensors_schemes": lambda: [scheme]}
    return Plugins.discover(third_parties=(candidate("int8-rows", module("int8-rows", hooks)),), environ={})
