"""What the grouped experts of the CUDA backend refuse, what they cost, and what they take."""

from __future__ import annotations

import attrs
import pytest

from vtensors.records import KernelRequest, KernelSpec
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.random_weights import random_weights
from vtensors_plugins.backends.cuda_experts import experts_kernels

KERNELS = {kernel.name: kernel for kernel in experts_kernels()}
ASKED = KernelRequest(
    op="experts",
    scheme="nvfp4",
    activations="16bit",
    device="cuda:0",
    capability=(9, 0),
    dtype="bfloat16",
    shape=(1024, 2048),
    parts=(512, 512, 2048),
    assumed=True,
    experts=256,
    chosen=8,
)


def _kernel(request: KernelRequest) -> KernelSpec:
    return next(kernel for kernel in KERNELS.values() if request.scheme in kernel.schemes)


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8"])
def test_every_packed_scheme_is_served_at_any_number_of_rows(scheme: str) -> None:
    request = attrs.evolve(ASKED, scheme=scheme)
    kernel = _kernel(request)
    assert kernel.refuse(request) is None
    assert kernel.tokens == (1, None)


@pytest.mark.parametrize(
    ("scheme", "changes", "reason"),
    [
        ("nvfp4", {"traits": frozenset({"bias"})}, "without bias"),
        ("nvfp4", {"traits": frozenset({"pre_scale"})}, "without pre-scale"),
        ("nvfp4", {"traits": frozenset({"group64"})}, "groups of 16 or 32, not of 64"),
        ("nvfp4", {"shape": (1000, 2048)}, "multiples of 16, not 2048 and 500"),
        ("nvfp4", {"shape": (1024, 2040)}, "multiples of 16, not 2040 and 512"),
        ("nvfp4", {"experts": 1025}, "up to 1024 experts on sm_90, not 1025"),
        ("nvfp4", {"experts": 800, "capability": (12, 1)}, "up to 791 experts on sm_121, not 800"),
        ("nvfp4", {"activations": "fp4"}, "16-bit activations, not fp4"),
        ("nvfp4", {"dtype": "float32"}, "not float32"),
        ("mxfp8", {"shape": (1120, 2048), "parts": (560, 560, 2048)}, "whole groups of 32"),
        ("fp8-block", {"shape": (192, 2048)}, "whole blocks of 128 rows in every expert, not 96 and 2048"),
        ("fp8-block", {"traits": frozenset({"block128x64"})}, "not of 128 x 64"),
    ],
)
def test_what_the_layout_has_no_place_for_is_refused(
    scheme: str, changes: dict[str, object], reason: str
) -> None:
    request = attrs.evolve(ASKED, scheme=scheme, **changes)  # type: ignore[arg-type]
    assert reason in str(_kernel(request).refuse(request))


def test_the_cost_grows_with_the_experts_that_are_read() -> None:
    kernel = KERNELS["experts_nvfp4_grouped"]
    assert callable(kernel.cost)
    costs = [kernel.cost(attrs.evolve(ASKED, tokens=(m, None))) for m in (1, 8, 32, 4096)]
    assert costs == sorted(costs)
    assert costs[0] < 20 < costs[2] < 200


def test_prepared_bytes_are_those_of_every_expert() -> None:
    each = (64 * 16 + 128 * 4) * 1152 + 4 * (1024 + 2048)
    assert prepared_bytes("nvfp4-packed-experts", ASKED, 0) == 256 * each
    shared = attrs.evolve(ASKED, traits=frozenset({"shared_expert"}))
    assert prepared_bytes("nvfp4-packed-experts", shared, 0) == 257 * each
    assert prepared_bytes("stored", ASKED, 7) == 7
    assert prepared_bytes("another", ASKED, 7) is None


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor", "fp8-block", "mxfp8"])
def test_random_weights_of_a_mixture_are_three_for_each_expert(scheme: str) -> None:
    small = attrs.evolve(
        ASKED,
        scheme=scheme,
        device="cpu",
        shape=(256, 384),
        parts=(128, 128, 384),
        experts=2,
        traits=frozenset({"shared_expert"}),
    )
    shapes = [tuple(weight.shape) for weight in random_weights(small)]
    assert shapes == [(128, 384), (128, 384), (384, 128)] * 3
