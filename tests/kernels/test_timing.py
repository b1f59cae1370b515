"""Random weights for a request, and the times of kernels on them."""

from __future__ import annotations

import attrs
import pytest
import torch

from vtensors.errors import RequestError
from vtensors.manager import default_plugins
from vtensors.records import KernelRequest
from vtensors_formats.schemes import BUILTIN_SCHEMES
from vtensors_kernels.random_weights import random_weights
from vtensors_kernels.timing import measure

SCHEMES = [scheme.name for scheme in BUILTIN_SCHEMES]
REQUEST = KernelRequest(
    op="linear", scheme="nvfp4", activations="16bit", device="cpu", shape=(48, 128), parts=(16, 32)
)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_part_has_its_rows_the_scheme_and_finite_values(scheme: str) -> None:
    weights = random_weights(attrs.evolve(REQUEST, scheme=scheme))
    assert [weight.shape for weight in weights] == [(16, 128), (32, 128)]
    for weight in weights:
        assert weight.scheme == scheme
        values = weight.dequantize(torch.float32)
        assert torch.isfinite(values).all()
        assert values.abs().max() > 0


def test_traits_are_on_the_weight() -> None:
    traits = frozenset(("bias", "pre_scale", "group32", "row_scale"))
    (weight,) = random_weights(attrs.evolve(REQUEST, parts=(48,), traits=traits))
    assert weight.bias is not None
    assert weight.bias.shape == (48,)
    assert weight.pre_scale is not None
    assert weight.group == 32  # type: ignore[attr-defined]
    assert weight.global_scale.shape == (48, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        ("nvfp4", "fp4"),
        ("fp8-tensor", "fp8-static"),
        ("fp8-row", "fp8-dynamic"),
        ("fp8-block", "fp8-dynamic"),
        ("mxfp8", "fp8-dynamic"),
    ],
)
def test_quantised_activations_have_their_quantiser(scheme: str, activations: str) -> None:
    (weight, _) = random_weights(attrs.evolve(REQUEST, scheme=scheme, activations=activations))
    assert weight.activation is not None
    assert weight.activation.kind == activations


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(RequestError, match="int8-rows"):
        random_weights(attrs.evolve(REQUEST, scheme="int8-rows"))
    with pytest.raises(RequestError, match="shape"):
        random_weights(attrs.evolve(REQUEST, shape=None))
    with pytest.raises(RequestError, match="fp4 activations on bf16"):
        random_weights(attrs.evolve(REQUEST, scheme="bf16", activations="fp4"))


def test_a_cpu_is_not_timed() -> None:
    kernel = default_plugins().registry.kernels["linear_reference"].record
    with pytest.raises(RequestError, match="CUDA device"):
        measure(kernel, REQUEST)


@pytest.mark.gpu
def test_kernels_of_each_op_are_timed_and_more_bytes_take_longer() -> None:
    capability = torch.cuda.get_device_capability(0)
    times = {}
    for name, owned in default_plugins().registry.kernels.items():
        kernel = owned.record
        scheme = "nvfp4" if "nvfp4" in kernel.schemes or "*" in kernel.schemes else kernel.schemes[0]
        two, mixture = kernel.op.endswith(("swiglu", "linears")), kernel.op == "experts"
        for n in (2048, 65536):
            request = KernelRequest(
                op=kernel.op,
                scheme=scheme,
                activations="16bit",
                device="cuda:0",
                capability=capability,
                dtype="bfloat16",
                shape=(n, 2048),
                parts=(n // 2, n // 2, 2048) if mixture else (n // 2, n // 2) if two else (n,),
                tokens=kernel.tokens,
                experts=4 if mixture else 0,
                chosen=2 if mixture else 0,
            )
            if kernel.refuse(request) is None:
                times[name, n] = measure(kernel, request)
    for (name, n), time in times.items():
        print(f"{name} N={n}: {time:.1f} us")
    assert all(time > 0 for time in times.values())
    for name in {name for name, _ in times if "embedding" not in name and "reference" not in name}:
        assert times[name, 65536] > 2 * times[name, 2048], name
