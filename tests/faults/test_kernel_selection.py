"""Kernels chosen for the wrong card, by a stale verdict, or without a word: none of these happens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from kernel_specs import chosen, kernel, reference, request
from vtensors.errors import RequestError, VtensorsError
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.kernel_entries import DeviceIdentity
from vtensors.kernel_targets import tell_unknown
from vtensors.measured_costs import MeasuredCosts
from vtensors.records import KernelRequest, KernelSpec, Selected
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts
from vtensors_engine.fallbacks import report_fallbacks
from vtensors_kernels.compiling.nvrtc import CompileError

CARD = DeviceIdentity(name="NVIDIA GB10", uuid="GPU-1", driver="580.159.04")
# A backend that was built for some cards, with the general kernel and the reference behind it.
BUILT = [
    kernel("linear_nvfp4_b200", targets=("sm_100a",), cost=1.0),
    kernel("linear_nvfp4_rtx", targets=("sm_120f",), cost=1.0),
    kernel("linear_nvfp4_hopper", targets=("sm_90a",), cost=1.0),
    kernel("linear_nvfp4_general", targets=("cuda",), cost=50.0),
    reference(),
]


def selected(bound: BoundKernel, name: str = "a", scheme: str = "nvfp4") -> Selected:
    """What is recorded of a bound linear."""
    kernels = tuple((*segment.tokens, segment.kernel.name) for segment in bound.segments)
    return Selected(
        module=name,
        op="linear",
        scheme=scheme,
        declared="16bit",
        executed="16bit",
        kernel=kernels[0][2],
        rejected=bound.rejected,
        kernels=kernels,
    )


def lines_of(
    caplog: pytest.LogCaptureFixture, records: list[Selected], kernels: list[KernelSpec]
) -> list[str]:
    """What is told of the records."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "vtensors"):
        report_fallbacks(records, kernels, "cuda", refuse=False)
    return caplog.messages


@pytest.mark.fault("B72")
@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((12, 0), "linear_nvfp4_rtx"),
        ((12, 1), "linear_nvfp4_rtx"),
        ((10, 0), "linear_nvfp4_b200"),
        ((10, 3), "linear_nvfp4_general"),
        ((11, 0), "linear_nvfp4_general"),
        ((13, 0), "linear_nvfp4_general"),
    ],
)
def test_families_serve_their_later_members_and_other_cards_take_the_general_kernel(
    capability: tuple[int, int], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tell_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, "vtensors"):
        for _ in range(2):
            assert chosen(plan_kernels(request(capability=capability), BUILT)) == {(1, None): name}
    assert len(caplog.records) == (1 if capability == (13, 0) else 0)


@pytest.mark.fault("B72")
def test_two_different_cards_in_one_process_each_get_their_own_kernel_and_verdicts(tmp_path: Path) -> None:
    tested: list[tuple[str, tuple[int, int] | None]] = []

    def probe(asked: KernelRequest) -> None:
        tested.append((asked.device, asked.capability))
        if asked.capability == (12, 1):
            raise RuntimeError("wrong result")

    kernels = [*BUILT, kernel("linear_nvfp4_new", targets=("sm_90a", "sm_120f"), cost=0.5, probe=probe)]
    cards = {
        "cuda:0": ((9, 0), DeviceIdentity(name="H200", uuid="GPU-0", driver="580")),
        "cuda:1": ((12, 1), DeviceIdentity(name="GB10", uuid="GPU-1", driver="580")),
    }
    names = {}
    for device, (capability, identity) in cards.items():
        plan = plan_kernels(request(capability=capability, device=device), kernels)
        bound = bind_plan(plan, ["weight"], Verdicts(folder=tmp_path, device=identity))
        names[device] = bound.segments[0].kernel.name
    assert names == {"cuda:0": "linear_nvfp4_new", "cuda:1": "linear_nvfp4_rtx"}
    assert tested == [("cuda:0", (9, 0)), ("cuda:1", (12, 1))]


@pytest.mark.fault("B73")
def test_an_exact_target_serves_no_other_card_of_its_major_version() -> None:
    only = [kernel("linear_nvfp4_b200", targets=("sm_100a",))]
    assert chosen(plan_kernels(request(capability=(10, 0)), only)) == {(1, None): "linear_nvfp4_b200"}
    with pytest.raises(VtensorsError) as caught:
        plan_kernels(request(capability=(10, 3)), only)
    assert "made for sm_100a; sm_103 needs sm_103a or sm_100f" in str(caught.value)


@pytest.mark.fault("B74")
def test_a_build_without_code_for_the_card_says_what_it_has_and_what_is_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = [kernel("linear_nvfp4_native", targets=("sm_80", "sm_120a")), reference()]
    bound = bind_plan(plan_kernels(request(capability=(12, 1)), kernels), ["weight"])
    (line,) = lines_of(caplog, [selected(bound)], kernels)
    assert "1 nvfp4 weight" in line
    assert "runs on linear_reference" in line
    assert "linear_nvfp4_native: made for sm_80, sm_120a; sm_121 needs sm_121a or sm_120f" in line
    with pytest.raises(RequestError, match="VT_STRICT=fallbacks") as caught:
        report_fallbacks([selected(bound)], kernels, "cuda", refuse=True)
    assert "sm_121 needs sm_121a or sm_120f" in str(caught.value)


@pytest.mark.fault("B80")
@pytest.mark.parametrize("change", ["nothing", "toolkit", "driver", "distribution", "damaged"])
def test_a_verdict_is_of_one_toolkit_driver_and_library_and_a_damaged_one_is_made_anew(
    tmp_path: Path, change: str
) -> None:
    tested: list[KernelRequest] = []
    toolkit = {"version": "NVRTC 13.0"}
    fast = kernel("linear_fast", probe=tested.append, fingerprint=lambda asked: toolkit["version"])
    versions = {"linear_fast": "fast-dist 1.2"}
    Verdicts(folder=tmp_path, device=CARD, versions=versions).failure(fast, request())
    later = Verdicts(folder=tmp_path, device=CARD, versions=versions)
    match change:
        case "toolkit":
            toolkit["version"] = "NVRTC 12.8"
        case "driver":
            later = attrs.evolve(later, device=attrs.evolve(CARD, driver="570.1"))
        case "distribution":
            later = attrs.evolve(later, versions={"linear_fast": "fast-dist 1.3"})
        case "damaged":
            (path,) = (tmp_path / "verdicts").iterdir()
            path.write_bytes(path.read_bytes()[:40])
    assert later.failure(fast, request()) is None
    assert len(tested) == (1 if change == "nothing" else 2)


@pytest.mark.fault("B81")
def test_another_spelling_of_the_same_folder_finds_the_same_verdicts(tmp_path: Path) -> None:
    tested: list[KernelRequest] = []
    fast = kernel("linear_fast", probe=tested.append)
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for folder in (tmp_path / "cache", tmp_path / "link", tmp_path / "cache" / ".." / "link"):
        assert Verdicts(folder=folder, device=CARD).failure(fast, request()) is None
    assert len(tested) == 1


@pytest.mark.fault("B82")
def test_a_kernel_that_does_not_compile_is_told_with_the_first_error_and_what_takes_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def probe(asked: KernelRequest) -> None:
        raise CompileError(
            'fast.cu(3): error: cannot open source file "missing.cuh"',
            file="common/fast.cu",
            seen="NVRTC 13.0, sm_121a, options --gpu-architecture=sm_121a -std=c++17",
        )

    kernels = [kernel("linear_nvfp4_new", probe=probe, cost=0.5), *BUILT]
    bound = bind_plan(plan_kernels(request(capability=(12, 1)), kernels), ["weight"])
    (line,) = lines_of(caplog, [selected(bound, "a"), selected(bound, "b")], kernels)
    for words in (
        "linear_nvfp4_new failed its self-test",
        'error: cannot open source file "missing.cuh"',
        "NVRTC 13.0, sm_121a, options --gpu-architecture=sm_121a",
        "2 weights run on linear_nvfp4_rtx",
    ):
        assert words in line
    assert "\n" not in line
    with pytest.raises(RequestError, match=r"missing\.cuh"):
        report_fallbacks([selected(bound)], kernels, "cuda", refuse=True)


@pytest.mark.fault("B83")
def test_a_kernel_that_is_miscompiled_is_not_used_and_its_toolkit_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored_answer = [0.25, 0.5]

    def miscompiled(codes: list[int]) -> list[float]:
        return [0.5, 0.25]

    def probe(asked: KernelRequest) -> None:
        if miscompiled([0x21]) != stored_answer:
            raise VtensorsError("the self-test failed", seen="relative error 6.3e-01", accepted="0.004")

    new = kernel(
        "linear_nvfp4_new", probe=probe, cost=0.5, fingerprint=lambda asked: "NVRTC 13.2 sm_120f 81c2"
    )
    bound = bind_plan(plan_kernels(request(capability=(12, 0)), [new, *BUILT]), ["weight"])
    assert bound.call("x")[0] == "linear_nvfp4_rtx"
    (line,) = lines_of(caplog, [selected(bound)], [new, *BUILT])
    assert "failed its self-test (NVRTC 13.2 sm_120f 81c2)" in line
    assert "relative error 6.3e-01" in line


@pytest.mark.fault("B93")
def test_one_layer_has_a_kernel_for_few_rows_and_another_for_many_and_both_are_shown() -> None:
    def by_rows(first: float, per_row: float) -> Callable[[KernelRequest], float]:
        return lambda asked: first + per_row * asked.tokens[0]

    weight_only = kernel("linear_nvfp4_decode", cost=by_rows(5.0, 1.0), tokens=(1, 64))
    tensor_cores = kernel("linear_nvfp4_prefill", cost=by_rows(30.0, 0.1))
    plan = plan_kernels(request(), [weight_only, tensor_cores, reference()])
    bound = bind_plan(plan, ["weight"])
    assert selected(bound).kernels == ((1, 64, "linear_nvfp4_decode"), (65, None, "linear_nvfp4_prefill"))
    assert bound.call(torch.zeros(1, 64))[0] == "linear_nvfp4_decode"
    assert bound.call(torch.zeros(2048, 64))[0] == "linear_nvfp4_prefill"


@pytest.mark.fault("B95")
def test_many_shapes_on_one_slow_path_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_kernels(request(capability=(9, 0)), [reference()])
    records = [selected(bind_plan(plan, ["weight"]), f"layers.{i}", scheme="fp8-block") for i in range(40)]
    (line,) = lines_of(caplog, records, [reference()])
    assert "40 fp8-block weights" in line


@pytest.mark.fault("B95")
def test_a_card_in_no_table_is_tuned_once_and_the_times_are_kept(tmp_path: Path) -> None:
    timed: list[str] = []

    def measure(spec: KernelSpec, asked: KernelRequest) -> float:
        timed.append(spec.name)
        return {"linear_nvfp4_small_tile": 8.0, "linear_nvfp4_large_tile": 3.0}[spec.name]

    kernels = [kernel("linear_nvfp4_small_tile", cost=1.0), kernel("linear_nvfp4_large_tile", cost=2.0)]
    for _ in range(2):
        costs = MeasuredCosts(verdicts=Verdicts(folder=tmp_path, device=CARD), measure=measure)
        plan = plan_kernels(request(capability=(12, 1)), kernels, cost_of=costs.cost_of)
        assert chosen(plan) == {(1, None): "linear_nvfp4_large_tile"}
    assert sorted(timed) == ["linear_nvfp4_large_tile", "linear_nvfp4_small_tile"]
