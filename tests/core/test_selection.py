"""Planning: who may serve which rows, who is cheapest, in which layout, and whole or in parts."""

from __future__ import annotations

import math

import attrs
import pytest

from kernel_specs import DECOMPOSE, SHAPE, WIDTHS, chosen, failing, kernel, reference, request
from vtensors.errors import VtensorsError
from vtensors.kernel_plans import STEP_COSTS
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import decomposer, plan_kernels, replan

STREAM = kernel("stream", targets=("sm_90a",), layout="packed", tokens=(1, 32), cost=5.0)
WGMMA = kernel("wgmma", targets=("sm_90a",), layout="packed", tokens=(33, 64), cost=6.0)
PACKED_WIDENING = kernel("packed_widening", layout="packed", cost=80.0)
STORED = kernel("stored", tokens=(1, 64), cost=9.0)
WIDENING = kernel("widening", cost=70.0)
HOPPER = [STREAM, WGMMA, PACKED_WIDENING, STORED, WIDENING, reference()]


def test_the_cheapest_wins_then_the_closest_target_then_the_first_name() -> None:
    kernels = [
        kernel("a_dear", cost=2.0),
        kernel("z_exact", targets=("sm_90a",), cost=1.0),
        kernel("b_any", targets=("portable",), cost=1.0),
        kernel("d_cuda", cost=1.0),
        kernel("c_cuda", cost=1.0),
    ]
    for order in (kernels, kernels[::-1]):
        (segment,) = plan_kernels(request(), order).segments
        names = [candidate.kernel.name for candidate in segment.candidates]
        assert names == ["z_exact", "c_cuda", "d_cuda", "b_any", "a_dear"]


def test_rows_are_cut_at_the_borders_of_kernels_and_each_range_has_its_own() -> None:
    assert chosen(plan_kernels(request(), HOPPER)) == {
        (1, 32): "stream",
        (33, 64): "wgmma",
        (65, None): "packed_widening",
    }
    assert chosen(plan_kernels(request(tokens=(20, 40)), HOPPER)) == {(20, 32): "stream", (33, 40): "wgmma"}


def test_neighbours_with_one_kernel_are_one_range() -> None:
    plan = plan_kernels(request(), [WIDENING, attrs.evolve(STORED, cost=90.0), reference()])
    assert chosen(plan) == {(1, None): "widening"}
    (segment,) = plan.segments
    assert [candidate.kernel.name for candidate in segment.candidates] == ["widening", "linear_reference"]
    assert segment.rejected == (("stored", "90 us modelled; widening 70 us modelled"),)


def test_a_joined_range_tells_what_each_kernel_lost_by_where_it_serves() -> None:
    kernels = [
        *HOPPER[:3],
        attrs.evolve(STORED, cost=1.0),
        WIDENING,
        kernel("far", tokens=(65, None), cost=99.0),
    ]
    first, last = plan_kernels(request(), kernels).segments
    assert (first.tokens, first.kernel.name) == ((1, 64), "stored")
    lost = dict(first.lost)
    assert lost["stream"] == "5 us modelled; stored 1 us modelled"
    assert lost["wgmma"] == "would keep the weight twice: packed beside stored"
    assert lost["packed_widening"] == "80 us modelled; stored 1 us modelled"
    assert lost["far"] == "serves M >= 65, not M = 1..32"
    assert (last.kernel.name, dict(last.lost)["far"]) == (
        "widening",
        "99 us modelled; widening 70 us modelled",
    )


def test_a_later_range_keeps_the_layout_of_the_first_and_says_why() -> None:
    plan = plan_kernels(request(), HOPPER)
    last = plan.segments[-1]
    reason = "would keep the weight twice: stored beside packed"
    assert ("widening", reason) in last.rejected
    assert ("linear_reference", reason) in last.rejected
    assert ("widening", reason) in plan.rejected


def test_another_layout_is_taken_where_nothing_else_is_left() -> None:
    kernels = [k for k in HOPPER if k.name != "packed_widening"]
    assert chosen(plan_kernels(request(), kernels))[65, None] == "widening"


def test_a_shared_weight_is_stored_anyway_so_stored_kernels_may_follow() -> None:
    plan = plan_kernels(request(traits=frozenset({"shared"})), HOPPER)
    assert chosen(plan)[65, None] == "widening"


def test_each_rejected_kernel_keeps_its_reason_and_other_ops_are_not_listed() -> None:
    kernels = [
        kernel("gather", op="embedding"),
        kernel("fp8", schemes=("fp8-row", "fp8-tensor")),
        kernel("blackwell", targets=("sm_100a", "sm_120f")),
        kernel("few", tokens=(1, 8), refuse=lambda request: "never"),
        kernel("small", refuse=lambda request: "K is not a multiple of 64"),
        kernel("broken", refuse=failing("no such device")),
        kernel("priceless", cost=failing("no table")),
        kernel("odd", cost=math.nan),
        kernel("endless", cost=lambda request: math.inf),
        kernel("words", cost=lambda request: "1.0"),
        kernel("flag", refuse=lambda request: True),
        kernel("silent", refuse=lambda request: ""),
        kernel("wordy", refuse=lambda request: "K is odd\n  and N too\n"),
        reference(),
    ]
    plan = plan_kernels(request(), kernels)
    assert chosen(plan) == {(1, None): "linear_reference"}
    assert dict(plan.rejected) == {
        "fp8": "computes fp8-row, fp8-tensor, not nvfp4",
        "blackwell": "made for sm_100a, sm_120f; sm_90 needs sm_90a",
        "few": "never",
        "small": "K is not a multiple of 64",
        "endless": "failed to tell its cost: inf is not microseconds from 0 on",
        "words": "failed to tell its cost: '1.0' is not microseconds from 0 on",
        "flag": "failed to say whether it can: refuse() gives True, not a reason or None",
        "silent": "failed to say whether it can: refuse() gives '', not a reason or None",
        "wordy": "K is odd; and N too",
        "broken": "failed to say whether it can: RuntimeError: no such device",
        "priceless": "failed to tell its cost: RuntimeError: no table",
        "odd": "failed to tell its cost: nan is not microseconds from 0 on",
    }


def test_refuse_and_cost_are_asked_for_the_rows_in_question() -> None:
    seen: list[tuple[int, int | None]] = []

    def cost(asked: KernelRequest) -> float:
        seen.append(asked.tokens)
        return float(asked.tokens[0])

    kernels = [kernel("rising", cost=cost), kernel("flat", cost=40.0, tokens=(50, None))]
    assert chosen(plan_kernels(request(), kernels)) == {(1, 49): "rising", (50, None): "flat"}
    assert seen == [(1, 49), (50, None)]


def test_why_a_dearer_kernel_lost_is_told_with_both_costs() -> None:
    first = plan_kernels(request(), HOPPER).segments[0]
    assert ("stored", "9 us modelled; stream 5 us modelled") in first.lost


def test_measured_costs_come_before_modelled_ones() -> None:
    def cost_of(spec: KernelSpec, asked: KernelRequest) -> float | str | None:
        times: dict[str, float | str] = {"stored": 3.0, "widening": "failed while it was timed: no"}
        return times.get(spec.name)

    first = plan_kernels(request(), HOPPER, cost_of=cost_of).segments[0]
    assert (first.kernel.name, first.candidates[0].measured, first.candidates[1].measured) == (
        "stored",
        True,
        False,
    )
    assert ("widening", "failed while it was timed: no") in first.rejected


def test_a_kernel_that_was_timed_is_not_asked_for_its_own_estimate() -> None:
    plan = plan_kernels(
        request(), [kernel("priceless", cost=failing("no table"))], cost_of=lambda spec, asked: 3.0
    )
    assert plan.segments[0].candidates[0].cost == 3.0


def test_the_cost_of_a_plan_is_that_of_the_rows_asked_for() -> None:
    plan = plan_kernels(request(), [kernel("rising", cost=lambda asked: 2.0 * asked.tokens[0])])
    assert (plan.cost_at(1), plan.cost_at(20)) == (2.0, 40.0)


def test_without_a_kernel_every_candidate_of_the_scheme_is_listed_with_its_reason() -> None:
    kernels = [kernel("blackwell", targets=("sm_100a",)), kernel("fp8", schemes=("fp8-row",))]
    with pytest.raises(VtensorsError, match=r"no kernel computes 'linear' on nvfp4 .* on sm_90") as caught:
        plan_kernels(request(), kernels)
    assert "blackwell: made for sm_100a" in str(caught.value)
    assert "1 that computes other schemes, not nvfp4" in str(caught.value)
    with pytest.raises(VtensorsError, match="no kernel is registered"):
        plan_kernels(request(), [])


def test_rows_that_nothing_serves_are_named() -> None:
    with pytest.raises(VtensorsError, match="M >= 33") as caught:
        plan_kernels(request(), [STREAM])
    assert "stream: serves M = 1..32, not M >= 33" in str(caught.value)


def test_planning_again_without_a_kernel_decides_the_layout_anew() -> None:
    plan = replan(plan_kernels(request(), HOPPER), {"stream": "failed its self-test"})
    assert chosen(plan) == {(1, 64): "stored", (65, None): "widening"}
    assert ("stream", "failed its self-test") in plan.rejected
    assert replan(plan, {"stored": "gone"}).rejected[0] == ("stream", "failed its self-test")


FUSED = kernel("fused", op="linears", layout="packed", cost=12.0)


@pytest.mark.parametrize(("plain", "whole"), [(5.0, False), (6.0, True), (7.0, True), (0.0, False)])
def test_a_fused_op_stays_whole_where_it_is_no_dearer_than_its_parts(plain: float, whole: bool) -> None:
    plan = plan_kernels(request("linears"), [FUSED, kernel("plain", cost=plain)], decompose=DECOMPOSE)
    assert plan.decomposed is not whole
    if whole:
        assert chosen(plan) == {(1, None): "fused"}
    else:
        assert [chosen(part) for part in plan.parts] == [{(1, None): "plain"}] * 2
        assert plan.steps == ("linear", "linear")
        (name, reason), *_ = plan.rejected
        assert name == "fused"
        assert reason.startswith("dearer than linear + linear: 12 us, these ")


def test_steps_of_one_kind_are_counted_where_there_are_many() -> None:
    def parts(_: KernelRequest) -> tuple[KernelRequest, ...]:
        return (*(request("linear"),) * 300, *(request("add"),) * 2)

    kernels = [kernel("fused", op="linears", cost=9e6), kernel("plain", cost=1.0)]
    asked = request("linears")
    plan = plan_kernels(asked, kernels, decompose=lambda one: parts(one) if one.op == "linears" else ())
    assert dict(plan.rejected)["fused"].startswith("dearer than 300 x linear + add + add: ")


def test_a_plain_linear_of_a_third_party_serves_every_fused_op() -> None:
    kernels = [kernel("theirs", schemes=("*",), targets=("portable",), cost=1.0)]
    for capability in ((9, 0), None):
        plan = plan_kernels(
            request("norm_linear_swiglu", capability=capability), kernels, decompose=DECOMPOSE
        )
        assert plan.steps == ("rms_norm", "linear_swiglu")
        (swiglu,) = plan.parts
        assert swiglu.steps == ("linears", "swiglu")
        (linears,) = swiglu.parts
        assert [chosen(part) for part in linears.parts] == [{(1, None): "theirs"}] * 2
        assert [part.request.shape for part in linears.parts] == [(rows, SHAPE[1]) for rows in WIDTHS]
        assert plan.cost_at(1) == pytest.approx(2 * 1.0 + STEP_COSTS["rms_norm"] + STEP_COSTS["swiglu"])


def test_a_fused_kernel_for_few_rows_only_leaves_the_op_to_its_parts() -> None:
    fused = attrs.evolve(FUSED, tokens=(1, 32), cost=1.0)
    plan = plan_kernels(request("linears"), [fused, kernel("plain", cost=5.0)], decompose=DECOMPOSE)
    assert plan.decomposed
    assert plan.rejected == (("fused", "serves M = 1..32, not M >= 33"),)


def test_a_fused_op_whose_last_range_would_run_on_the_reference_is_taken_apart() -> None:
    kernels = [
        attrs.evolve(FUSED, tokens=(1, 32), cost=9.0),
        reference("linears"),
        kernel("plain", cost=5.0, layout="packed"),
        reference(),
    ]
    assert plan_kernels(request("linears"), kernels, decompose=DECOMPOSE).decomposed


def test_on_the_reference_alone_a_fused_op_stays_whole() -> None:
    kernels = [reference("linears"), reference()]
    plan = plan_kernels(request("linears", capability=None), kernels, decompose=DECOMPOSE)
    assert chosen(plan) == {(1, None): "linears_reference"}


def test_a_fused_op_stays_whole_where_its_parts_have_no_kernel() -> None:
    assert chosen(plan_kernels(request("linears"), [FUSED], decompose=DECOMPOSE)) == {(1, None): "fused"}
    with pytest.raises(VtensorsError, match="no kernel is registered for 'linear'"):
        plan_kernels(request("linears"), [], decompose=DECOMPOSE)


def test_measured_costs_decide_between_whole_and_parts() -> None:
    kernels = [FUSED, kernel("plain", cost=1.0)]
    times = {"fused": 4.0, "plain": 3.0}
    plan = plan_kernels(
        request("linears"), kernels, cost_of=lambda spec, asked: times[spec.name], decompose=DECOMPOSE
    )
    assert chosen(plan) == {(1, None): "fused"}


def test_requests_of_the_parts_are_taken_as_given() -> None:
    parts = (request(traits=frozenset({"bias"})), attrs.evolve(request(), shape=(1, 64)))
    decompose = decomposer({"linears": ("linear",)}, parts)
    asked = attrs.evolve(request("linears"), tokens=(1, 8))
    assert [(p.shape, p.traits, p.tokens) for p in decompose(asked)] == [
        (SHAPE, frozenset({"bias"}), (1, 8)),
        ((1, 64), frozenset(), (1, 8)),
    ]
    assert decompose(request()) == ()


def test_a_part_does_not_inherit_the_global_scale_per_row_of_the_whole() -> None:
    whole = request("linears", traits=frozenset({"row_scale", "bias"}))
    assert [part.traits for part in DECOMPOSE(whole)] == [frozenset({"bias"})] * 2


def test_up_to_32_rows_a_faster_kernel_that_adds_in_another_order_is_left_out() -> None:
    few = kernel("few", tokens=(1, 32), cost=5.0, sums="one-order")
    other = kernel("other", tokens=(17, 64), cost=1.0)
    plan = plan_kernels(request("linear"), [few, other, reference()])
    assert chosen(plan)[1, 32] == "few"
    assert chosen(plan)[33, 64] == "other"
    same = kernel("same", tokens=(17, 32), cost=2.0, sums="one-order")
    assert chosen(plan_kernels(request("linear"), [few, same, other, reference()]))[17, 32] == "same"


def test_a_kernel_of_another_order_of_sums_says_why_it_lost() -> None:
    few = kernel("few", tokens=(1, 16), cost=5.0, sums="one-order")
    kernels = [
        few,
        kernel("more", tokens=(17, 32), cost=9.0, sums="one-order"),
        kernel("fast", tokens=(17, 32), cost=1.0),
    ]
    plan = plan_kernels(request("linear"), [*kernels, reference()])
    assert chosen(plan)[17, 32] == "more"
    (segment,) = [segment for segment in plan.segments if segment.tokens == (17, 32)]
    assert dict(segment.lost)["fast"] == "would change a row's bits between 16 and 17 rows"


def test_without_a_kernel_of_the_same_order_another_serves() -> None:
    few = kernel("few", tokens=(1, 16), cost=5.0, sums="one-order")
    assert chosen(plan_kernels(request("linear"), [few, reference()]))[17, None] == "linear_reference"
