"""The kernels of the CUDA backend on devices that are not here: who serves, who does not and why, and what is left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from vtensors.kernel_binding import bind_plan
from vtensors.kernel_targets import tell_unknown
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import KernelPlan, decomposer, plan_kernels
from vtensors_kernels.compiling.architectures import TARGETS, target_of
from vtensors_kernels.compiling.launch import LaunchError
from vtensors_kernels.nvfp4.stream_form import choose_form, serves
from vtensors_kernels.ops import OPS
from vtensors_plugins.backends import cuda, cuda_nvfp4_binding, reference

KERNELS = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]
DECOMPOSE = decomposer({op.name: op.decomposition for op in OPS})
NVFP4_LINEARS = [k for k in KERNELS if k.op == "linear" and k.schemes == ("nvfp4",)]
# Asked about by the faults: DGX Spark, B300, Thor, and a card that this version does not know.
ASKED = [(12, 1), (10, 3), (11, 0), (13, 0)]
EVERY = [*TARGETS, (13, 0)]
# N x K of the fused matrices of Qwen3.5-27B and -35B-A3B.
SHAPES = [
    *((34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (248320, 5120)),
    *((12288, 2048), (2048, 4096), (1024, 2048), (2048, 512)),
]


def asked(
    shape: tuple[int, int] = (5120, 17408),
    capability: tuple[int, int] | None = (9, 0),
    *,
    op: str = "linear",
    scheme: str = "nvfp4",
    **changes: Any,
) -> KernelRequest:
    """A request for a device that need not be here."""
    halves = op.endswith(("swiglu", "linears"))
    plain = KernelRequest(
        op=op,
        scheme=scheme,
        activations="16bit",
        device="cuda:0",
        capability=capability,
        dtype="bfloat16",
        shape=shape,
        parts=(shape[0] // 2, shape[0] // 2) if halves else (shape[0],),
        assumed=True,
    )
    return attrs.evolve(plain, **changes)


def planned(request: KernelRequest) -> KernelPlan:
    """The plan from every built-in kernel."""
    return plan_kernels(request, KERNELS, decompose=DECOMPOSE)


def kernels_of(plan: KernelPlan) -> dict[tuple[int, int | None], str]:
    """Rows -> kernel."""
    return {segment.tokens: segment.kernel.name for segment in plan.segments}


@pytest.mark.fault("B31")
@pytest.mark.parametrize("capability", EVERY)
@pytest.mark.parametrize(
    "op", ["linear", "norm_linears", "norm_linear_swiglu", "linear_add", "linear_argmax"]
)
def test_rows_1_to_32_are_served_by_kernels_whose_rows_are_the_same_bits(
    op: str, capability: tuple[int, int]
) -> None:
    for shape in SHAPES:
        for traits in (frozenset[str](), frozenset({"bias", "row_scale"})):
            ranges = kernels_of(planned(asked(shape, capability, op=op, traits=traits)))
            used = {name.partition("_nvfp4_")[2] for rows, name in ranges.items() if rows[0] <= 32}
            # Each of these by itself, and the last two also side by side: they add in one order.
            assert used == {"stored"} or used <= {"stream", "wgmma_segments"}, (shape, ranges)


@pytest.mark.fault("B69")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1), (13, 0)])
@pytest.mark.parametrize("k", [64, 176, 4304])
@pytest.mark.parametrize("n", [7, 8, 32, 48, 96, 4304])
def test_a_weight_of_odd_sizes_has_a_kernel_of_its_scheme_at_any_number_of_rows(
    n: int, k: int, capability: tuple[int, int]
) -> None:
    ranges = kernels_of(planned(asked((n, k), capability)))
    assert "linear_reference" not in ranges.values()
    assert min(ranges)[0] == 1
    assert max(ranges, key=lambda rows: rows[0])[1] is None


@pytest.mark.fault("B69")
@pytest.mark.parametrize("name", ["stream", "wgmma", "packed_widening", "stored", "widening"])
def test_a_width_that_is_no_multiple_of_16_is_refused_with_the_rule(name: str) -> None:
    (kernel,) = [k for k in NVFP4_LINEARS if k.name == f"linear_nvfp4_{name}"]
    assert kernel.refuse(asked((64, 40))) == "needs K to be a multiple of 16, not 40"
    assert kernel.refuse(asked((64, 48))) is None


@pytest.mark.parametrize("name", [kernel.name for kernel in NVFP4_LINEARS])
def test_groups_that_a_kernel_is_not_made_for_are_refused_before_it_is_bound(name: str) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    modes = ("16bit", "fp4", "fp8-static", "fp8-dynamic")
    served = next(mode for mode in modes if kernel.refuse(asked(activations=mode)) is None)
    told = kernel.refuse(asked(traits=frozenset({"group64"}), activations=served))
    assert told == "knows groups of 16 or 32, not of 64"
    brought = frozenset({"bias", "group32", "pre_scale", "row_scale", "shared"})
    assert kernel.refuse(asked(traits=brought, activations=served)) is None


def test_a_shared_weight_of_groups_of_32_is_not_left_to_the_reference() -> None:
    plan = planned(asked((1024, 2048), traits=frozenset({"group32", "shared"})))
    assert kernels_of(plan) == {(1, 64): "linear_nvfp4_stored", (65, None): "linear_nvfp4_widening"}


@pytest.mark.fault("B72")
@pytest.mark.parametrize("capability", ASKED)
def test_no_card_is_left_out_and_a_newer_one_takes_portable_code_with_one_line(
    capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    tell_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, "vtensors"):
        for shape in SHAPES:
            used = kernels_of(planned(asked(shape, capability)))
            assert "linear_reference" not in used.values(), shape
    assert len(caplog.records) == (0 if capability in TARGETS else 1)
    assert target_of(capability) == TARGETS.get(capability, "compute_80")


@pytest.mark.fault("B72")
def test_every_kernel_of_the_backend_is_tested_on_the_card_before_it_is_used() -> None:
    assert all(kernel.probe is not None for kernel in cuda.vtensors_kernels())


@pytest.mark.fault("B73")
@pytest.mark.parametrize("capability", [(8, 9), (9, 1), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])
def test_a_kernel_made_for_one_card_is_chosen_on_no_other(capability: tuple[int, int]) -> None:
    assert kernels_of(planned(asked()))[33, 64] == "linear_nvfp4_wgmma"
    plan = planned(asked(capability=capability))
    assert "linear_nvfp4_wgmma" not in kernels_of(plan).values()
    assert dict(plan.rejected)["linear_nvfp4_wgmma"].startswith("made for sm_90a; ")


@pytest.mark.fault("B85")
@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_120a", "sm_121a", "compute_80"])
def test_forms_for_a_card_of_99_kib_of_shared_memory_fit_it(target: str) -> None:
    hopper = {choose_form(n, k, m, 132, "sm_90a").shared_bytes for n, k in SHAPES for m in (1, 8, 32)}
    assert max(hopper) > 101376
    for n, k in SHAPES:
        assert serves(k, target) >= 1
        for m in range(1, serves(k, target) + 1):
            assert choose_form(n, k, m, 48, target).shared_bytes <= 101376, (n, k, m)


@pytest.mark.fault("B85")
def test_a_row_that_does_not_fit_is_known_before_the_first_token_and_another_kernel_serves() -> None:
    k = next(k for k in range(1 << 14, 1 << 18, 1 << 12) if not serves(k, "sm_121a"))
    assert serves(k, "sm_90a")
    assert "linear_nvfp4_stream" in kernels_of(planned(asked((5120, k)))).values()
    plan = planned(asked((5120, k), (12, 1)))
    assert (
        dict(plan.rejected)["linear_nvfp4_stream"] == f"a row of {k} columns does not fit into shared memory"
    )
    assert not {"linear_reference", "linear_nvfp4_stream"} & set(kernels_of(plan).values())


@pytest.mark.fault("B86")
@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8-row", "fp8-block"])
def test_fp8_weights_run_weight_only_on_a_card_without_fp8(scheme: str) -> None:
    plan = planned(asked(capability=(8, 0), scheme=scheme))
    for name in kernels_of(plan).values():
        assert name == "linear_reference" or name.startswith("linear_fp8_"), name
    both = planned(asked(capability=(8, 0), scheme=scheme, activations="fp8-static"))
    assert all(name.startswith("linear_fp8_w8a8_emulated") for name in kernels_of(both).values())
    assert dict(both.rejected)["linear_fp8_w8a8"] in (
        "needs FP8 tensor cores, compute capability 8.9 or newer, not 8.0",
        "computes fp8-tensor, fp8-row, not fp8-block",
    )


@pytest.mark.fault("B88")
def test_each_kernel_whose_launch_fails_gives_way_to_the_next_down_to_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: set[str] = set()

    def test_of(name: str) -> Callable[[KernelRequest], None]:
        def probe(request: KernelRequest) -> None:
            if name in broken:
                raise LaunchError(f"{name}: the driver says CUDA_ERROR_LAUNCH_FAILED", seen="CUresult 719")

        return probe

    def binder(name: str) -> Callable[[Any, KernelRequest], Callable[..., Any]]:
        return lambda prepared, request: lambda x: name

    monkeypatch.setattr(cuda_nvfp4_binding, "PROBES", {k: test_of(k) for k in cuda_nvfp4_binding.PROBES})
    monkeypatch.setattr(cuda_nvfp4_binding, "BINDERS", {k: binder(k) for k in cuda_nvfp4_binding.BINDERS})
    unprepared: list[KernelSpec] = [
        attrs.evolve(
            kernel, prepare=None if kernel.layout == "stored" else lambda weights, request: weights[0]
        )
        for kernel in KERNELS
    ]
    one_row = torch.zeros(1, 17408)
    seen: list[str] = []
    while len(seen) < 10:
        bound = bind_plan(plan_kernels(asked(), unprepared), ["weight"])
        names = [segment.kernel.name for segment in bound.segments]
        assert {name for name, reason in bound.rejected if "CUDA_ERROR_LAUNCH_FAILED" in reason} == {
            f"linear_nvfp4_{kernel}" for kernel in broken
        }
        if names[0] == "linear_reference":
            break
        seen.append(bound.call(one_row))
        broken.add(seen[-1])
    assert seen[0] == "stream"
    assert set(seen) == {"stream", "packed_widening", "stored", "widening"}


@pytest.mark.fault("B93")
def test_one_row_and_many_have_their_own_kernel_and_both_are_told() -> None:
    plan = planned(asked())
    assert kernels_of(plan)[1, 16] == "linear_nvfp4_stream"
    assert kernels_of(plan)[65, None] == "linear_nvfp4_packed_widening"
    last = plan.segments[-1]
    assert dict(last.lost)["linear_nvfp4_stream"] == "serves M = 1..32, not M >= 65"
