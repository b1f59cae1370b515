"""A mixture asks for all of its experts at once; what is not alike, or has no kernel, is computed expert by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from tiny_decoders import family_of, tiny_config, tiny_model, tiny_weights
from vtensors.records import KernelRequest, KernelSpec, Selected
from vtensors_formats import FP4Activation, PlainWeight, Weight
from vtensors_formats.fp8_quantize import quantize_fp8_tensor
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.reference.experts import experts
from vtensors_kernels.reference.linear import linear
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.backends import reference

CONFIG = tiny_config("qwen3_5_moe")
IDS = torch.arange(9)[None] * 4 % 40
EXPERTS, PARTS = 6, ("gate_proj", "up_proj", "down_proj")


def _quantized() -> dict[str, Weight]:
    """NVFP4 experts."""
    return {
        name: quantize_nvfp4(weight.dequantize(torch.float32))
        if "expert" in name and "_proj" in name
        else weight
        for name, weight in tiny_weights(CONFIG).items()
    }


def _model(weights: Any, *kernels: KernelSpec, executed: Mapping[str, str] | None = None) -> Decoder:
    own = BuildOptions(
        dtype=torch.float32,
        device="cpu",
        kernels=[*reference.vtensors_kernels(), *kernels],
        executed=executed or {},
    )
    model: Decoder = family_of(CONFIG).build(CONFIG, weights, own)
    return model


def _records(model: Decoder, layer: int = 0) -> list[Selected]:
    place = f"layers.{layer}.mlp."
    return [r for r in model.selected if r.module.startswith(place) and "_proj" in r.module]


def _grouped(**changes: Any) -> KernelSpec:
    def bind(weights: Any, request: KernelRequest) -> Any:
        def call(*arguments: Any) -> Tensor:
            return experts(*arguments, weights, request.experts)

        return call

    spec = KernelSpec(
        name="experts_mine",
        op="experts",
        schemes=("nvfp4",),
        targets=("cpu",),
        numerics="bitwise",
        refuse=lambda request: None,
        bind=bind,
        cost=10.0,
    )
    return attrs.evolve(spec, **changes)


def test_a_mixture_is_one_group_with_its_shared_expert_last() -> None:
    requests: list[KernelRequest] = []
    weights = _quantized()
    model = _model(weights, _grouped(refuse=requests.append))
    assert torch.equal(model.logits(IDS), tiny_model(CONFIG, weights).logits(IDS))
    records = _records(model)
    names = [f"layers.0.mlp.experts.{i}.{part}" for i in range(EXPERTS) for part in PARTS]
    names += [f"layers.0.mlp.shared_expert.{part}" for part in PARTS]
    assert [record.module for record in records] == names
    assert {(r.kernel, r.op, r.asked, r.group) for r in records} == {
        ("experts_mine", "experts", "experts", tuple(names))
    }
    # One tuple for all: hundreds of experts would make it a square.
    assert len({id(record.group) for record in records}) == 1
    (asked,) = set(requests)
    assert (asked.experts, asked.chosen) == (6, 2)
    assert (asked.shape, asked.parts) == ((32, 32), (16, 16, 32))
    assert asked.traits == {"shared_expert"}


def test_a_shared_expert_of_another_scheme_is_computed_beside_the_others() -> None:
    weights = _quantized()
    for layer in range(2):
        for part in PARTS:
            name = f"layers.{layer}.mlp.shared_expert.{part}"
            weights[name] = quantize_fp8_tensor(weights[name].dequantize(torch.float32))
    model = _model(weights, _grouped())
    assert torch.equal(model.logits(IDS), tiny_model(CONFIG, weights).logits(IDS))
    kernels = {(record.kernel, len(record.group)) for record in _records(model)}
    assert kernels == {("experts_mine", 3 * EXPERTS), ("linear_reference", 1)}
    beside = next(r for r in _records(model) if "shared_expert" in r.module)
    assert "shared_expert.gate_proj is fp8-tensor" in beside.not_fused[0][1]


def test_experts_of_several_schemes_are_computed_one_by_one_with_the_reason() -> None:
    weights = _quantized()
    name = "layers.0.mlp.experts.3.down_proj"
    weights[name] = quantize_fp8_tensor(weights[name].dequantize(torch.float32))
    model = _model(weights, _grouped())
    wide = {n: PlainWeight(tensor=w.dequantize(torch.float32)) for n, w in weights.items()}
    torch.testing.assert_close(model.logits(IDS), tiny_model(CONFIG, wide).logits(IDS), rtol=0, atol=1e-5)
    records = _records(model)
    assert len(records) == 3 * (EXPERTS + 1)
    assert {(r.op, r.asked, r.group == (r.module,)) for r in records} == {("linear", "experts", True)}
    why = "layers.0.mlp.experts.0.gate_proj is nvfp4, layers.0.mlp.experts.3.down_proj is fp8-tensor"
    assert {record.not_fused for record in records} == {(("experts", why),)}
    assert {record.op for record in _records(model, 1)} == {"experts"}


def test_a_kernel_that_fails_leaves_the_experts_to_the_linears() -> None:
    def fails(_request: KernelRequest) -> None:
        raise RuntimeError("wrong")

    def plain(weight: Any, _request: KernelRequest) -> Any:
        return lambda x: linear(x, weight)

    weights = _quantized()
    mine = _grouped(name="linear_mine", op="linear", bind=plain)
    model = _model(weights, _grouped(probe=fails, fingerprint=lambda request: ""), mine)
    assert torch.equal(model.logits(IDS), tiny_model(CONFIG, weights).logits(IDS))
    records = _records(model)
    assert {record.kernel for record in records} == {"linear_mine"}
    assert all(
        ("experts_mine", "failed its self-test (): RuntimeError: wrong") in r.not_fused for r in records
    )


def test_input_scales_of_experts_may_differ() -> None:
    weights, executed = _quantized(), dict[str, str]()
    for index, name in enumerate(name for name in weights if weights[name].scheme == "nvfp4"):
        scale = torch.tensor(0.01 * (1 + index % 7))
        weights[name] = attrs.evolve(weights[name], activation=FP4Activation(global_scale=scale))
        executed[name] = "fp4"

    def plain(weight: Any, _request: KernelRequest) -> Any:
        return lambda x: linear(x, weight, weight.activation)

    whole = _model(weights, executed=executed)
    assert {record.kernel for record in _records(whole)} == {"experts_reference"}
    apart = _model(weights, _grouped(name="linear_mine", op="linear", bind=plain), executed=executed)
    assert {record.kernel for record in _records(apart)} == {"linear_mine"}
    assert torch.equal(whole.logits(IDS), apart.logits(IDS))
    assert not torch.equal(whole.logits(IDS), _model(weights).logits(IDS))
