"""The goals of the linear benchmark: ratios, means, worst shapes and shares of the floor."""

from __future__ import annotations

import linear_goals as goals
import pytest

from benchmarks.records import row


def _both(ratios: dict[str, float], m: int) -> list[dict[str, object]]:
    rows = []
    for shape, ratio in ratios.items():
        rows += [row(shape, m, goals.OURS, 20.0), row(shape, m, goals.MARLIN, 20.0 * ratio)]
    return rows


def _goal(rows: list[dict[str, object]], what: str) -> goals.Goal:
    return next(goal for goal in goals.goals(rows) if goal.what == what and not goal.stretch)


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    rows = [row("down", 4, goals.OURS, 20.0), row("down", 4, goals.MARLIN, 30.0)]
    assert goals.ratio(rows, "down", 4) == pytest.approx(1.5)
    assert goals.ratio(rows, "down", 8) is None
    assert goals.ratio(rows, "gate_up", 4) is None


def test_a_measured_marlin_goes_before_a_scaled_one() -> None:
    rows = [
        row("down", 1, goals.MARLIN_SCALED, 99.0),
        row("down", 1, goals.MARLIN, 30.0),
        row("down", 1, goals.OURS, 10.0),
    ]
    assert goals.ratio(rows, "down", 1) == pytest.approx(3.0)
    assert goals.ratio(rows[:1] + rows[2:], "down", 1) == pytest.approx(9.9)


def test_the_mean_is_geometric_and_needs_all_six_shapes() -> None:
    ratios = dict.fromkeys(goals.SHAPES_27B, 1.0) | {"down": 64.0}
    mean = _goal(_both(ratios, 8), "M = 8: geometric mean against Marlin")
    assert mean.got == pytest.approx(2.0)
    assert mean.verdict == "met"
    del ratios["o_out"]
    assert _goal(_both(ratios, 8), "M = 8: geometric mean against Marlin").verdict == "not measured"


def test_the_worst_shape_is_named_and_judged_alone() -> None:
    ratios = dict.fromkeys(goals.SHAPES_27B, 1.6) | {"down": 1.19}
    rows = _both(ratios, 4)
    worst = _goal(rows, "M = 4: worst shape against Marlin")
    assert (worst.where, worst.wanted, worst.verdict) == ("down", 1.2, "missed")
    assert _goal(rows, "M = 4: geometric mean against Marlin").verdict == "met"


def test_shapes_of_the_other_model_do_not_count() -> None:
    rows = _both({**dict.fromkeys(goals.SHAPES_27B, 1.5), "35b_2048x512": 0.1}, 1)
    assert _goal(rows, "M = 1: worst shape against Marlin").got == pytest.approx(1.5)
    assert _goal(rows, "M = 1: geometric mean against Marlin").got == pytest.approx(1.5)


@pytest.mark.parametrize(("us", "verdict"), [(10.0 / 0.86, "met"), (10.0 / 0.84, "missed")])
def test_the_share_of_the_floor_is_judged_at_one_row(us: float, verdict: str) -> None:
    rows = [row("gate_up", 1, goals.OURS, us), row("gate_up", 2, goals.OURS, 1.0)]
    assert _goal(rows, "M = 1: gate_up, share of the floor").verdict == verdict


def test_the_stretch_goals_are_for_what_is_above_45_megabytes() -> None:
    stretch = {goal.what for goal in goals.goals([]) if goal.stretch}
    shapes = ("gate_up", "down", "in_qkvz", "lm_head")
    shares = {f"M = {m}: {shape}, share of the floor" for m in (1, 2, 4) for shape in shapes}
    assert stretch == shares | {"M = 64: geometric mean against Marlin"}


def test_without_rows_nothing_is_met() -> None:
    assert {goal.verdict for goal in goals.goals([])} == {"not measured"}


def test_the_head_weighs_715_megabytes() -> None:
    assert goals.nvfp4_bytes(*goals.SHAPES["lm_head"]) == 715_161_600


def test_fp8_is_held_against_the_floor_and_against_what_quantizes_its_activations_too() -> None:
    assert goals.fp8_goals([row("down", 1, goals.OURS, 5.0)]) == []
    rows = [
        row("gate_up", 1, goals.OURS_FP8, 12.5, bytes=178_000_000),
        row("o_out", 1, goals.OURS_FP8, 40.0, bytes=31_000_000),
        row("gate_up", 1, goals.OURS_W8A8, 13.0),
        row("gate_up", 1, goals.OURS_W8A8_EMULATED, 12.0),
        row("gate_up", 32, goals.OURS_W8A8, 1.0),
        row("gate_up", 32, goals.OURS_FP8, 12.5, bytes=178_000_000),
        row("o_out", 1, goals.MARLIN_FP8, 50.0),
    ]
    found = {goal.what: goal for goal in goals.fp8_goals(rows)}
    share = found["FP8, M = 1: geometric mean share of the floor, weights of 45 MB and more"]
    assert share.got == pytest.approx(0.8)
    assert found["FP8, M = 2: geometric mean share of the floor, weights of 45 MB and more"].got is None
    against = found["FP8, M <= 16: worst shape against W8A8 with its quantizer"]
    assert against.got == pytest.approx(0.96)
    assert (against.where, against.verdict) == ("gate_up, M = 1", "missed")
    assert found["FP8, M <= 8: worst shape against Marlin FP8"].got == pytest.approx(1.25)
