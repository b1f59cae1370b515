"""The kernel part of the kit: built-in kernels pass it, and each fault of a kernel fails the check made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.manager import default_plugins
from vtensors.records import KernelRequest, KernelSpec
from vtensors_formats import PlainWeight, Weight
from vtensors_formats.fp8_quantize import quantize_fp8_row, quantize_fp8_tensor
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_plugins.op_calls import OPS, op_call
from vtensors_plugins.testing import KernelConformance, KernelExample

CHECKS = [name for name in vars(KernelConformance) if name.startswith("test_")]
LINEAR = default_plugins().registry.kernels["linear_reference"].record
Put = Callable[[KernelSpec], KernelSpec]


def values(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def failing(kernel: KernelSpec, *examples: KernelExample, dtype: str = "float32") -> set[str]:
    """The checks that fail."""

    class Subject(KernelConformance):
        def examples(self) -> list[KernelExample]:
            return list(examples) or [KernelExample(weights=(quantize_fp8_row(values(23, 40)),))]

    subject = Subject()
    type(subject).kernel, type(subject).dtype = kernel, dtype
    failed = set()
    for name in CHECKS:
        try:
            getattr(subject, name)()
        except (AssertionError, VtensorsError):
            failed.add(name)
    return failed


@pytest.fixture
def enable(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Registers a kernel."""

    def put(kernel: KernelSpec) -> KernelSpec:
        plugins = default_plugins()
        kernels = dict(plugins.registry.kernels)
        kernels[kernel.name] = attrs.evolve(kernels["linear_reference"], record=kernel)
        monkeypatch.setattr(plugins, "registry", attrs.evolve(plugins.registry, kernels=kernels))
        return kernel

    return put


def computing(change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> KernelSpec:
    """`linear_reference`, whose calls go through `change(x, call)`."""

    def bind(weight: Any, request: KernelRequest) -> Callable[[Tensor], Tensor]:
        call = LINEAR.bind(weight, request)
        return lambda x: change(x, call)

    return attrs.evolve(LINEAR, name="linear_changed", bind=bind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [quantize_fp8_row, quantize_fp8_tensor, quantize_nvfp4, None])
def test_the_reference_of_each_op_passes(quantize: Callable[[Tensor], Weight] | None, dtype: str) -> None:
    def weight(n: int, k: int, seed: int) -> Weight:
        found = values(n, k, seed)
        return PlainWeight(tensor=found) if quantize is None else quantize(found)

    kernels = default_plugins().registry.kernels
    one = KernelExample(weights=(weight(33, 48, 0),))
    mixture = [weight(n, k, seed) for seed in range(4) for n, k in ((16, 32), (16, 32), (32, 16))]
    assert failing(LINEAR, one, dtype=dtype) == set()
    assert failing(kernels["embedding_reference"].record, one, dtype=dtype) == set()
    example = KernelExample(weights=tuple(mixture), experts=4, chosen=2)
    assert failing(kernels["experts_reference"].record, example, dtype=dtype) == set()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x, call: call(x) * 1.02, {"test_results_are_the_ops", "test_rows_do_not_touch_each_other"}),
        (lambda x, call: call(x).double(), {"test_results_are_the_ops", "test_rows_do_not_touch_each_other"}),
        (lambda x, call: call(x)[:, 1:], {"test_results_are_the_ops", "test_rows_do_not_touch_each_other"}),
        (lambda x, call: call(x) + 0 * x.sum(), {"test_rows_do_not_touch_each_other"}),
        (lambda x, call: call(x.add_(0.5).sub_(0.5)), {"test_arguments_and_weights_stay_as_they_were"}),
        (lambda x, call: call(x) + 1e-6 * torch.rand(()), {"test_arguments_and_weights_stay_as_they_were"}),
    ],
)
def test_a_wrong_result_is_found(change: Any, found: set[str], enable: Put) -> None:
    assert found <= failing(enable(computing(change)))


def test_a_kernel_that_writes_into_the_weight_is_found(enable: Put) -> None:
    def bind(weight: Any, request: KernelRequest) -> Callable[[Tensor], Tensor]:
        weight.scale.mul_(2)
        return LINEAR.bind(weight, request)  # type: ignore[no-any-return]

    weight = quantize_fp8_row(values(23, 40))
    kernel = enable(attrs.evolve(LINEAR, name="linear_changed", bind=bind))
    assert "test_arguments_and_weights_stay_as_they_were" in failing(kernel, KernelExample(weights=(weight,)))


def test_reasons_costs_tests_and_layouts_are_held_too(enable: Put) -> None:
    def probe(_request: KernelRequest) -> None:
        raise RequestError("the self-test failed")

    def changed(**changes: Any) -> set[str]:
        return failing(enable(attrs.evolve(LINEAR, name="linear_changed", **changes)))

    assert changed() == set()
    assert changed(refuse=lambda request: "no") >= {
        "test_it_serves_the_examples_and_says_why_not_in_one_line"
    }
    assert changed(refuse=lambda request: "" if request.shape is None else None) == {
        "test_it_serves_the_examples_and_says_why_not_in_one_line"
    }
    assert changed(cost=lambda request: float("nan")) == {"test_its_cost_is_a_number_of_microseconds"}
    assert changed(probe=probe, fingerprint=lambda request: "1") == {"test_its_self_test_passes"}
    own = changed(
        layout="own",
        prepare=lambda weights, request: weights,
        bind=lambda weights, request: LINEAR.bind(weights[0], request),
    )
    assert own == {"test_its_layout_has_a_size"}
    assert failing(attrs.evolve(LINEAR, name="of_nobody")) == {"test_its_record_is_valid_and_registered"}


@pytest.mark.parametrize("op", OPS)
def test_what_an_op_must_give_is_what_its_reference_gives(op: str) -> None:
    """Built from the op's reference in another way: by its dotted path."""
    from importlib import import_module

    from vtensors_kernels.ops import op as op_of

    module, _, function = op_of(op).reference.partition(":")
    reference = getattr(import_module(module), function)
    two = op in ("linears", "linear_swiglu", "norm_linears", "norm_linear_swiglu")
    sizes = (
        ((16, 32), (16, 32), (32, 16)) * 3
        if op == "experts"
        else ((16, 32), (16, 32))
        if two
        else ((16, 32),)
    )
    weights = [quantize_nvfp4(values(n, k, seed)) for seed, (n, k) in enumerate(sizes)]
    request = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cpu",
        shape=(32 if two or op == "experts" else 16, 32),
        parts=tuple(n for n, _ in sizes[:3]),
        experts=3 if op == "experts" else 0,
        chosen=2 if op == "experts" else 0,
    )
    call = op_call(request, weights, 4)
    x, *rest = call.arguments
    if op == "experts":
        found = reference(x, *rest, weights, 3)
    elif op == "embedding":
        found = reference(x, weights[0], *rest)
    elif op == "linear_add":
        found = reference(x, *rest, weights[0])
    elif two and op.endswith("swiglu"):
        found = reference(x, *rest, *weights)
    else:
        found = reference(x, *rest, weights if two else weights[0])
    assert call.difference(found, 1e-5) is None


def test_an_op_without_weights_cannot_be_called() -> None:
    request = KernelRequest(op="rope", scheme="bf16", activations="16bit", device="cpu", shape=(4, 4))
    with pytest.raises(RequestError, match="rope"):
        op_call(request, [], 2)
