"""`VT_AUTOTUNE`: each candidate is timed once per card, and the ranking uses the times."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest

from kernel_specs import DECOMPOSE, chosen, failing, kernel, reference, request
from vtensors.errors import RequestError
from vtensors.kernel_candidates import cost_in_words
from vtensors.kernel_entries import DeviceIdentity
from vtensors.measured_costs import MeasuredCosts
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts

CARD = DeviceIdentity(name="NVIDIA H200", uuid="GPU-1", driver="580.159.04")
KERNELS = [
    kernel("modelled_fast", cost=1.0),
    kernel("really_fast", cost=50.0),
    kernel("broken", cost=0.5, probe=failing("wrong result")),
    reference(),
]
TIMES = {"modelled_fast": 9.0, "really_fast": 4.0, "broken": 0.1}


@attrs.define
class Clock:
    """Times kernels from a table and notes which it was asked for."""

    times: dict[str, float]
    asked: list[tuple[str, tuple[int, int | None]]] = attrs.field(factory=list)

    def measure(self, spec: KernelSpec, asked: KernelRequest) -> float:
        self.asked.append((spec.name, asked.tokens))
        return self.times[spec.name]


def costs(
    clock: Clock, folder: Path | None = None, *, device: DeviceIdentity = CARD, capturing: bool = False
) -> MeasuredCosts:
    verdicts = Verdicts(folder=folder, device=device, capturing=lambda: capturing)
    return MeasuredCosts(verdicts=verdicts, measure=clock.measure)


def test_the_measured_ranking_replaces_the_modelled_one() -> None:
    clock = Clock(TIMES)
    assert chosen(plan_kernels(request(), KERNELS[:2])) == {(1, None): "modelled_fast"}
    plan = plan_kernels(request(), KERNELS, cost_of=costs(clock).cost_of)
    assert chosen(plan) == {(1, None): "really_fast"}
    assert ("modelled_fast", "9 us measured; really_fast 4 us measured") in plan.segments[0].lost


def test_what_fails_its_self_test_is_never_timed_and_the_reference_neither() -> None:
    clock = Clock(TIMES)
    plan = plan_kernels(request(), KERNELS, cost_of=costs(clock).cost_of)
    assert [name for name, _ in clock.asked] == ["modelled_fast", "really_fast"]
    assert dict(plan.rejected)["broken"].startswith("failed its self-test")


def test_times_are_kept_for_the_next_process_and_for_this_card_only(tmp_path: Path) -> None:
    clock = Clock(TIMES)
    for _ in range(2):
        assert costs(clock, tmp_path).cost_of(KERNELS[1], request()) == 4.0
    assert len(clock.asked) == 1
    assert len(list((tmp_path / "timings").iterdir())) == 1
    other = attrs.evolve(CARD, uuid="GPU-2")
    assert costs(clock, tmp_path, device=other).cost_of(KERNELS[1], request()) == 4.0
    assert len(clock.asked) == 2


def test_each_range_of_rows_is_timed_for_itself() -> None:
    clock = Clock({"few": 2.0, "any": 3.0})
    kernels = [kernel("few", tokens=(1, 32)), kernel("any")]
    plan_kernels(request(), kernels, cost_of=costs(clock).cost_of)
    assert clock.asked == [("few", (1, 32)), ("any", (1, 32)), ("any", (33, None))]


@pytest.mark.parametrize("text", ["", "{}", "not a number", "another number"])
def test_a_damaged_time_is_measured_anew(tmp_path: Path, text: str) -> None:
    clock = Clock(TIMES)
    costs(clock, tmp_path).cost_of(KERNELS[1], request())
    (path,) = (tmp_path / "timings").iterdir()
    path.write_text(path.read_text().replace("4.0", "0.4") if text == "another number" else text)
    assert costs(clock, tmp_path).cost_of(KERNELS[1], request()) == 4.0
    assert len(clock.asked) == 2


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_not_kept_and_counts_against_the_kernel(tmp_path: Path, value: float) -> None:
    found = costs(Clock({"really_fast": value}), tmp_path).cost_of(KERNELS[1], request())
    # The word by which a failure is counted as a fallback.
    assert found == f"failed while it was timed: {value} microseconds"
    assert not (tmp_path / "timings").exists()


def test_a_kernel_that_fails_while_it_is_timed_loses_with_that_reason() -> None:
    verdicts = Verdicts()
    timed = MeasuredCosts(verdicts=verdicts, measure=failing("launch failed"))
    plan = plan_kernels(request(), KERNELS, cost_of=timed.cost_of)
    assert chosen(plan) == {(1, None): "linear_reference"}
    reason = "failed while it was timed: RuntimeError: launch failed"
    assert dict(plan.rejected)["really_fast"] == reason


def test_a_scheme_that_no_weight_can_be_made_of_goes_by_the_kernels_own_model() -> None:
    timed = MeasuredCosts(
        verdicts=Verdicts(), measure=failing("no such weight"), schemes=frozenset({"nvfp4"})
    )
    kernels = [kernel("int8_near", schemes=("int8-row",), cost=2.0), reference()]
    plan = plan_kernels(request(scheme="int8-row"), kernels, cost_of=timed.cost_of)
    assert chosen(plan) == {(1, None): "int8_near"}
    assert not plan.segments[0].candidates[0].measured


def test_nothing_is_timed_while_a_graph_is_captured() -> None:
    clock = Clock(TIMES)
    with pytest.raises(RequestError, match="cannot be timed while a CUDA graph is captured"):
        plan_kernels(request(), KERNELS, cost_of=costs(clock, capturing=True).cost_of)
    assert clock.asked == []


def test_a_fused_op_is_held_against_the_measured_times_of_its_parts() -> None:
    kernels = [kernel("fused", op="linears", cost=1.0), kernel("plain", cost=30.0)]
    for plain, decomposed in ((2.0, True), (4.0, False)):
        clock = Clock({"fused": 7.0, "plain": plain})
        plan = plan_kernels(request("linears"), kernels, cost_of=costs(clock).cost_of, decompose=DECOMPOSE)
        assert plan.decomposed is decomposed


@pytest.mark.parametrize(
    ("cost", "words"),
    [(0.0, "0 us"), (2.516, "2.52 us"), (999.4, "999 us"), (1694.4, "1,694 us"), (1e9, "1e+09 us")],
)
def test_costs_below_a_second_are_told_without_exponents(cost: float, words: str) -> None:
    assert cost_in_words(cost) == words
