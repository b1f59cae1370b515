"""Layers ask for fused ops: a plugin with a plain `linear` serves them all, one with a fused kernel serves its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tiny_decoders import family_of, tiny_config, tiny_model, tiny_weights
from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest, KernelSpec
from vtensors_formats import FP4Activation, PlainWeight, Weight
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.linear_add import linear_add
from vtensors_kernels.reference.linear_argmax import linear_argmax
from vtensors_kernels.reference.linear_swiglu import norm_linear_swiglu
from vtensors_kernels.reference.linears import linears, norm_linears
from vtensors_plugins.architectures.build import BuildOptions, Parts
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.backends import reference

IDS = torch.arange(9)[None] * 4 % 40
Bind = Callable[[Any, KernelRequest], Callable[..., Any]]


def _kernel(op: str, bind: Bind, **changes: Any) -> KernelSpec:
    spec = KernelSpec(
        name=f"{op}_mine",
        op=op,
        schemes=("nvfp4",),
        targets=("cpu",),
        numerics="bitwise",
        refuse=lambda request: None,
        bind=bind,
        cost=10.0,
    )
    return attrs.evolve(spec, **changes)


@attrs.define
class Counted:
    """Kernels that count their calls by op."""

    calls: list[str] = attrs.field(factory=list)

    def kernel(self, op: str, compute: Callable[..., Tensor], **changes: Any) -> KernelSpec:
        """compute: (prepared, *arguments of the op's call) -> result."""

        def bind(prepared: Any, request: KernelRequest) -> Callable[..., Tensor]:
            def call(*arguments: Any) -> Tensor:
                self.calls.append(op)
                return compute(prepared, *arguments)

            return call

        return _kernel(op, bind, **changes)


def _linear(weight: Any, x: Tensor) -> Tensor:
    return linear(x, weight)


FUSED: dict[str, Callable[..., Tensor]] = {
    "norm_linears": lambda weights, x, gain, eps: norm_linears(x, gain, eps, weights),
    "norm_linear_swiglu": lambda weights, x, gain, eps: norm_linear_swiglu(x, gain, eps, *weights),
    "linears": lambda weights, x: linears(x, weights),
    "linear_add": lambda weight, x, residual: linear_add(x, residual, weight),
}


def _quantized(config: dict[str, Any]) -> dict[str, Weight]:
    """NVFP4 wherever K allows it; the global scales of neighbours are far apart."""
    weights = tiny_weights(config)
    for index, (name, weight) in enumerate(weights.items()):
        if len(weight.shape) == 2 and weight.shape[1] % 16 == 0:
            quantized = quantize_nvfp4(weight.dequantize(torch.float32))
            assert quantized.global_scale is not None
            scale = quantized.global_scale * (1.0, 0.25, 3.0)[index % 3]
            weights[name] = attrs.evolve(quantized, global_scale=scale)
    return weights


def _model(config: dict[str, Any], weights: Any, kernels: Sequence[KernelSpec], **options: Any) -> Decoder:
    own = BuildOptions(
        dtype=torch.float32, device="cpu", kernels=[*reference.vtensors_kernels(), *kernels], **options
    )
    model: Decoder = family_of(config).build(config, weights, own)
    return model


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3", "llama"])
def test_a_plugin_with_a_plain_linear_serves_a_model_whose_layers_ask_for_fused_ops(family: str) -> None:
    config, counted = tiny_config(family), Counted()
    weights = _quantized(config)
    model = _model(config, weights, [counted.kernel("linear", _linear)])
    assert torch.equal(model.logits(IDS), tiny_model(config, weights).logits(IDS))
    linears_of_model = [record for record in model.selected if record.op != "embedding"]
    assert {record.kernel for record in linears_of_model} == {"linear_mine"}
    assert {"norm_linears", "linear_add"} <= {record.asked for record in linears_of_model}
    assert set(counted.calls) == {"linear"}
    q = next(record for record in model.selected if record.module.endswith("q_proj"))
    assert (q.op, q.asked, q.group) == ("linear", "norm_linears", (q.module,))
    assert [op for op, _ in q.not_fused] == ["norm_linears", "linears"]


def test_a_self_test_runs_once_for_layers_that_ask_alike() -> None:
    tested: list[KernelRequest] = []
    config = tiny_config("qwen3")
    probed = _kernel(
        "linear",
        lambda weight, request: lambda x: linear(x, weight),
        probe=tested.append,
        fingerprint=lambda request: "1",
    )
    model = _model(config, _quantized(config), [probed])
    users = [record for record in model.selected if record.kernel == "linear_mine"]
    assert len(users) > len(tested) == len(set(tested)) > 1


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("op", FUSED)
def test_a_cheaper_fused_kernel_is_used_where_its_op_is_asked_for(family: str, op: str) -> None:
    config, counted = tiny_config(family), Counted()
    weights = _quantized(config)
    fused = counted.kernel(op, FUSED[op])
    model = _model(config, weights, [fused, counted.kernel("linear", _linear)])
    # Halves of a wider result are other strides, so that torch may sum and exponentiate in another order.
    torch.testing.assert_close(model.logits(IDS), tiny_model(config, weights).logits(IDS), rtol=0, atol=1e-5)
    assert op in counted.calls
    fused_records = [record for record in model.selected if record.op == op]
    assert {record.kernel for record in fused_records} == {f"{op}_mine"}
    if op == "norm_linears":
        place = f"layers.{1 if family == 'qwen3_5' else 0}.self_attn"
        group = tuple(f"{place}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        own = [record for record in fused_records if record.module.startswith(place)]
        assert [record.module for record in own] == list(group)
        assert all(record.group == group for record in own)
        stored = sum(weights[name].nbytes for name in group)
        assert [record.prepared_bytes for record in own] == [stored, 0, 0]


def test_a_dearer_fused_kernel_loses_to_plain_ones_with_its_cost() -> None:
    config, counted = tiny_config("llama"), Counted()
    dear = counted.kernel("linear_add", FUSED["linear_add"], cost=100.0)
    model = _model(config, _quantized(config), [dear, counted.kernel("linear", _linear)])
    record = next(record for record in model.selected if record.module.endswith("o_proj"))
    assert (record.op, record.kernel) == ("linear", "linear_mine")
    ((name, reason),) = record.not_fused
    assert name == "linear_add_mine"
    assert "dearer than linear + add" in reason


def test_a_fused_kernel_that_fails_to_bind_falls_to_the_parts_with_its_reason() -> None:
    def bind(prepared: Any, request: KernelRequest) -> Callable[..., Any]:
        raise RuntimeError("out of registers")

    config = tiny_config("llama")
    weights = _quantized(config)
    model = _model(config, weights, [_kernel("norm_linears", bind)])
    assert torch.equal(model.logits(IDS), tiny_model(config, weights).logits(IDS))
    record = next(record for record in model.selected if record.module.endswith("q_proj"))
    assert record.kernel == "linear_reference"
    assert ("norm_linears_mine", "failed to bind: RuntimeError: out of registers") in record.not_fused


def test_a_request_tells_shape_parts_and_traits() -> None:
    seen: list[KernelRequest] = []

    def bind(prepared: Any, request: KernelRequest) -> Callable[..., Any]:
        seen.append(request)
        raise RuntimeError("only looking")

    config = tiny_config("qwen3", tie_word_embeddings=True)
    weights = _quantized(config)
    del weights["lm_head"]
    kernels = [_kernel(op, bind) for op in ("norm_linears", "norm_linear_swiglu", "linear_add", "linear")]
    _model(config, weights, kernels)
    found = {(r.op, r.shape, r.parts, r.traits) for r in seen}
    assert ("norm_linears", (128, 32), (64, 32, 32), frozenset({"row_scale"})) in found
    assert ("norm_linear_swiglu", (96, 32), (48, 48), frozenset({"row_scale"})) in found
    assert ("linear_add", (32, 48), (32,), frozenset()) in found
    assert ("linear", (40, 32), (40,), frozenset({"shared"})) in found
    assert {(r.scheme, r.activations, r.device, r.dtype) for r in seen} == {
        ("nvfp4", "16bit", "cpu", "float32")
    }


def test_parts_with_other_input_scales_are_computed_apart_when_activations_are_quantized() -> None:
    config, counted = tiny_config("llama"), Counted()
    weights = _quantized(config)
    names = [f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    for index, name in enumerate(names):
        activation = FP4Activation(global_scale=torch.tensor(0.002 * 2.0**index))
        weights[name] = attrs.evolve(weights[name], activation=activation)
    fused = counted.kernel("norm_linears", FUSED["norm_linears"])
    weight_only = _model(config, weights, [fused])
    declared = _model(config, weights, [fused], executed=dict.fromkeys(names, "fp4"))
    told = {record.module: record for record in declared.selected}
    assert {record.module: record.op for record in weight_only.selected}[names[0]] == "norm_linears"
    assert [told[name].op for name in names] == ["linear"] * 3
    assert ("linears", f"the input scales of {names[0]} and {names[1]} differ") in told[names[1]].not_fused
    expected = tiny_model(config, weights, executed=dict.fromkeys(names, "fp4")).logits(IDS)
    assert torch.equal(declared.logits(IDS), expected)


def _parts(kernels: Sequence[KernelSpec], **weights: Weight) -> Parts:
    options = BuildOptions(
        dtype=torch.float32, device="cpu", kernels=[*reference.vtensors_kernels(), *kernels]
    )
    return Parts(weights, options)


def test_greedy_heads_and_swiglu_without_a_norm_can_be_asked_for_too() -> None:
    head = quantize_nvfp4(torch.randn(40, 32, generator=torch.Generator().manual_seed(1)))
    x, counted = torch.randn(3, 32), Counted()
    best = counted.kernel("linear_argmax", lambda weight, x: linear_argmax(x, weight))
    for kernels in ([], [best]):
        assert torch.equal(_parts(kernels, head=head).linear_argmax("head")(x), linear(x, head).argmax(-1))
    assert counted.calls == ["linear_argmax"]
    gate, up = head.rows(0, 16), head.rows(16, 32)
    expected = torch.nn.functional.silu(linear(x, gate)) * linear(x, up)
    assert torch.equal(_parts([], gate=gate, up=up).linear_swiglu("gate", "up")(x), expected)


def test_gate_and_up_of_different_widths_are_not_fused() -> None:
    counted = Counted()
    fused = counted.kernel("norm_linear_swiglu", FUSED["norm_linear_swiglu"])
    parts = _parts(
        [fused], gate=PlainWeight(tensor=torch.ones(4, 8)), up=PlainWeight(tensor=torch.ones(6, 8))
    )
    parts.norm_linear_swiglu("gate", "up")
    assert ("norm_linear_swiglu", "gate and up have 4 and 6 rows") in parts.selected[0].not_fused


def test_without_any_kernel_the_error_lists_fused_and_plain_candidates() -> None:
    options = BuildOptions(
        dtype=torch.float32,
        device="cpu",
        kernels=[
            _kernel("linear_add", lambda prepared, request: _linear, targets=("sm_90a",)),
            _kernel("linear", lambda prepared, request: _linear, targets=("cuda",)),
        ],
    )
    parts = Parts({"w": quantize_nvfp4(torch.ones(8, 16))}, options)
    with pytest.raises(VtensorsError, match="linear_add_mine: made for sm_90a") as caught:
        parts.linear_add("w")
    assert "linear_mine: made for cuda" in str(caught.value)


@pytest.mark.parametrize("per_row", [False, True])
def test_fused_is_weighed_against_the_parts_as_they_are(per_row: bool) -> None:
    counted = Counted()

    def refuse(request: KernelRequest) -> str | None:
        return "one global scale only" if "row_scale" in request.traits else None

    weights: dict[str, Weight] = {}
    for seed, name in enumerate(("a", "b")):
        weight = quantize_nvfp4(torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)))
        scale = torch.linspace(0.001, 0.002, 8)[:, None]
        weights[name] = attrs.evolve(weight, global_scale=scale) if per_row else weight
    kernels = [
        counted.kernel("linear", _linear, refuse=refuse, cost=10.0),
        counted.kernel("linears", FUSED["linears"], cost=25.0),
    ]
    parts = _parts(kernels, **weights)
    x = torch.randn(3, 32)
    first, second = parts.linears(["a", "b"])(x)
    assert torch.equal(first, linear(x, weights["a"]))
    assert torch.equal(second, linear(x, weights["b"]))
    # Two plain ones are cheaper, but serve only weights with one global scale each.
    assert counted.calls == (["linears"] if per_row else ["linear", "linear"])
