"""The built-in conventions and schemes pass the classes that are made for third parties."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import builtin_examples as examples
from builtin_examples import DOWN, UP, Module
from vtensors.records import Convention, Scheme
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight, PlainWeight
from vtensors_formats.schemes import BUILTIN_SCHEMES
from vtensors_plugins.conventions import compressed_tensors, hf_fp8, modelopt, plain
from vtensors_plugins.testing import ConventionConformance, Example, SchemeConformance, WeightExample


class BuiltinConvention(ConventionConformance):
    """A convention with modules UP and DOWN as given."""

    quantization: ClassVar[dict[str, Any] | None] = None

    def module(self) -> Module:
        raise TypeError("give a module")

    def example(self, folder: Path) -> Example:
        modules = {UP: self.module(), DOWN: self.module()}
        return Example(directory=folder, expected=examples.write(folder, modules, self.quantization))


class TestModelOptNvfp4(BuiltinConvention):
    convention: ClassVar[Convention] = modelopt.CONVENTION
    quantization = examples.modelopt("NVFP4", group_size=16)

    def module(self) -> Module:
        return examples.modelopt_nvfp4()


class TestModelOptFp8(BuiltinConvention):
    convention: ClassVar[Convention] = modelopt.CONVENTION
    quantization = examples.modelopt("FP8")

    def module(self) -> Module:
        return examples.fp8_tensor()


class TestModelOptMxfp8(BuiltinConvention):
    convention: ClassVar[Convention] = modelopt.CONVENTION
    quantization = examples.modelopt("MXFP8", group_size=32)

    def module(self) -> Module:
        return examples.mxfp8()


class TestCompressedTensorsNvfp4(BuiltinConvention):
    convention: ClassVar[Convention] = compressed_tensors.CONVENTION
    quantization = examples.compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    )

    def module(self) -> Module:
        return examples.compressed_nvfp4()


class TestCompressedTensorsChannel(BuiltinConvention):
    convention: ClassVar[Convention] = compressed_tensors.CONVENTION
    quantization = examples.compressed(
        "naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    )

    def module(self) -> Module:
        return examples.fp8_row()


class TestTransformersBlock(BuiltinConvention):
    convention: ClassVar[Convention] = hf_fp8.CONVENTION
    quantization: ClassVar[dict[str, Any] | None] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }

    def module(self) -> Module:
        return examples.fp8_block()


class TestPlain(BuiltinConvention):
    convention: ClassVar[Convention] = plain.CONVENTION

    def module(self) -> Module:
        return examples.plain(torch.bfloat16)

    def example(self, folder: Path) -> Example:
        modules = {UP: self.module(), DOWN: examples.plain(torch.float16)}
        expected = examples.write(folder, modules, None)
        return Example(directory=folder, expected=expected | {"lm_head": torch.ones(4, examples.K)})


def record(name: str) -> Scheme:
    return next(scheme for scheme in BUILTIN_SCHEMES if scheme.name == name)


NAN = float("nan")


class TestNvfp4(SchemeConformance):
    scheme = record("nvfp4")

    def weights(self) -> list[WeightExample]:
        packed, scale, values = examples.nvfp4_parts()
        spread = scale.float()
        multiplier, divisor = torch.tensor(0.00037), torch.tensor(5334.0)
        return [
            WeightExample(
                weight=NVFP4Weight(codes=packed, block_scale=scale, global_scale=multiplier),
                expected=values * (spread * multiplier).repeat_interleave(16, 1),
            ),
            WeightExample(
                weight=NVFP4Weight(codes=packed, block_scale=scale, global_divisor=divisor),
                expected=values * (spread / divisor).repeat_interleave(16, 1),
            ),
        ]

    def damaged(self) -> list[NVFP4Weight]:
        packed, scale, _ = examples.nvfp4_parts()
        totals = [torch.tensor(value) for value in (NAN, 0.0, -1.0, float("inf"))]
        return [NVFP4Weight(codes=packed, block_scale=scale, global_scale=total) for total in totals]


class FP8Conformance(SchemeConformance):
    """The three FP8 schemes share a class."""

    block: ClassVar[tuple[int, int] | None] = None

    def scale(self) -> torch.Tensor:
        raise TypeError("give a scale")

    def weights(self) -> list[WeightExample]:
        codes, scale = examples.e4m3_codes(), self.scale()
        spread = scale
        if self.block is not None:
            spread = scale.repeat_interleave(self.block[0], 0)[: examples.N]
            spread = spread.repeat_interleave(self.block[1], 1)[:, : examples.K]
        weight = FP8Weight(codes=codes, scale=scale, block=self.block)
        return [WeightExample(weight=weight, expected=codes.float() * spread.float())]

    def damaged(self) -> list[FP8Weight]:
        scales = [torch.full_like(self.scale(), value) for value in (NAN, -1.0, float("inf"), 0.0)]
        return [FP8Weight(codes=examples.e4m3_codes(), scale=scale, block=self.block) for scale in scales]


class TestFp8Tensor(FP8Conformance):
    scheme = record("fp8-tensor")

    def scale(self) -> torch.Tensor:
        return torch.tensor(0.0123)


class TestFp8Row(FP8Conformance):
    scheme = record("fp8-row")

    def scale(self) -> torch.Tensor:
        return torch.linspace(0.01, 1, examples.N).reshape(-1, 1)


class TestFp8Block(FP8Conformance):
    scheme = record("fp8-block")
    block = (32, 48)

    def scale(self) -> torch.Tensor:
        return torch.tensor([[0.5, 0.25], [0.125, 3.0]])


class TestMxfp8(SchemeConformance):
    scheme = record("mxfp8")

    def weights(self) -> list[WeightExample]:
        module = examples.mxfp8()
        weight = MXFP8Weight(codes=module.tensors["weight"], scale=module.tensors["weight_scale"])
        return [WeightExample(weight=weight, expected=module.expected)]

    def damaged(self) -> list[MXFP8Weight]:
        module = examples.mxfp8()
        scale = module.tensors["weight_scale"].clone()
        scale[3, 1] = 0xFF
        return [MXFP8Weight(codes=module.tensors["weight"], scale=scale)]


class PlainConformance(SchemeConformance):
    """The schemes that are not quantized share a class."""

    dtype: ClassVar[torch.dtype]

    def weights(self) -> list[WeightExample]:
        module = examples.plain(self.dtype)
        return [WeightExample(weight=PlainWeight(tensor=module.tensors["weight"]), expected=module.expected)]


class TestBf16(PlainConformance):
    scheme = record("bf16")
    dtype = torch.bfloat16


class TestF16(PlainConformance):
    scheme = record("f16")
    dtype = torch.float16


class TestF32(PlainConformance):
    scheme = record("f32")
    dtype = torch.float32


def test_every_builtin_scheme_has_a_class_here() -> None:
    here = {found.scheme.name for found in globals().values() if _is_scheme_test(found)}
    assert here == {scheme.name for scheme in BUILTIN_SCHEMES}


def _is_scheme_test(found: object) -> bool:
    return (
        isinstance(found, type) and issubclass(found, SchemeConformance) and found.__name__.startswith("Test")
    )


def test_the_kit_is_reached_by_its_public_name() -> None:
    import vtensors

    assert vtensors.testing.ConventionConformance is ConventionConformance


@pytest.mark.parametrize("name", ["Example", "WeightExample", "ConventionConformance", "SchemeConformance"])
def test_the_kits_names_are_listed(name: str) -> None:
    import vtensors_plugins.testing as kit

    assert name in kit.__all__
