"""The linear benchmark without a device: the same steps on a CPU, with clock and read floor made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import graph_timing
import linear
import linear_goals as goals
import linear_subjects
import measured_on
import pytest
import torch
from read_ceiling import Floor
from torch import Tensor

SHAPE = "gate_up"


class FakeReader:
    """Every read takes 5 µs."""

    def floor(self, nbytes: int, *, graph_us: float, replays: int) -> Floor:
        return Floor(nbytes=nbytes, us=5.0, how="loads", loads_us=5.0, bulk_us=None)


def _times(calls: Sequence[Callable[[], object]], *, graph_us: float, replays: int) -> graph_timing.Times:
    return graph_timing.Times(median=10.0, low=9.9, high=10.1, launches=len(calls), last=calls[-1]())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> linear.Run:
    torch.manual_seed(0)
    monkeypatch.setitem(goals.SHAPES, SHAPE, (64, 128))
    monkeypatch.setattr(linear, "time_calls", _times)
    monkeypatch.setattr(linear, "copies_of", lambda nbytes: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    facts = {"gpu": "none", "driver": "", "toolkit": "", "versions": {}, "commit": "", "switches": {}}
    return linear.Run(
        record=linear.new_record(facts, "no folder below /some/where"),
        path=tmp_path / "new" / "record.json",
        graph_us=1.0,
        replays=9,
        marlin="no folder",
        reader=FakeReader(),  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )


def _rows(run: linear.Run) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["m"], row["impl"]): row for row in run.record["rows"]}


def test_each_implementation_and_m_has_a_row_and_the_file_holds_them(run: linear.Run) -> None:
    linear.measure_shape(run, SHAPE, [1, 3], [goals.OURS, goals.OURS_APART, goals.CUBLAS])
    rows = _rows(run)
    assert run.record["failures"] == []
    assert set(rows) == {
        *((m, impl) for m in (1, 3) for impl in (goals.OURS, goals.OURS_APART, goals.CUBLAS)),
        (1, goals.MARLIN_SCALED),
    }
    assert rows[1, goals.OURS]["kernel"] == "linear_reference"
    assert rows[1, goals.OURS]["share_of_floor"] == pytest.approx(0.5)
    assert rows[1, goals.OURS]["bytes"] == 64 * 128 * 9 // 16
    assert rows[1, goals.OURS]["poisoned"] is True
    assert rows[1, goals.OURS]["copies"] == 2
    assert run.path is not None
    assert json.loads(run.path.read_text()) == run.record
    assert [path.name for path in run.path.parent.iterdir()] == ["record.json"]


def test_without_marlin_its_published_time_is_scaled_by_cublas(run: linear.Run) -> None:
    linear.measure_shape(run, SHAPE, [1], [goals.OURS, goals.CUBLAS])
    row = _rows(run)[1, goals.MARLIN_SCALED]
    assert row["us"] == pytest.approx(45.7 * 10.0 / 85.2, abs=1e-3)
    assert _rows(run)[1, goals.OURS]["ratio_to_marlin"] == pytest.approx(0.536, abs=1e-3)


def test_without_cublas_there_is_nothing_to_scale_by(run: linear.Run) -> None:
    linear.measure_shape(run, SHAPE, [1], [goals.OURS])
    assert set(_rows(run)) == {(1, goals.OURS)}
    assert _rows(run)[1, goals.OURS]["ratio_to_marlin"] is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.01,
        lambda y: torch.cat([y[:, :-1], torch.full_like(y[:, :1], float("nan"))], dim=1),
        lambda y: torch.empty_like(y),
        lambda y: y[:, :-1],
    ],
    ids=["off by a percent", "one NaN", "not written", "a column short"],
)
def test_a_wrong_result_has_no_row(
    run: linear.Run, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]
) -> None:
    make = linear_subjects.make_subject

    def spoiled(impl: str, *rest: Any) -> linear_subjects.Subject:
        subject = make(impl, *rest)
        if impl != goals.OURS:
            return subject
        calls = [lambda x, call=call: spoil(call(x)) for call in subject.calls]
        return attrs.evolve(subject, calls=calls)

    monkeypatch.setattr(linear, "make_subject", spoiled)
    linear.measure_shape(run, SHAPE, [2], [goals.OURS, goals.CUBLAS])
    assert set(_rows(run)) == {(2, goals.CUBLAS), (2, goals.MARLIN_SCALED)}
    (failure,) = run.record["failures"]
    assert (failure["shape"], failure["m"], failure["impl"]) == (SHAPE, 2, goals.OURS)


def test_what_cannot_be_bound_is_noted_and_the_others_go_on(run: linear.Run) -> None:
    linear.measure_shape(run, SHAPE, [1], [goals.MARLIN, goals.CUBLAS])
    assert (1, goals.CUBLAS) in _rows(run)
    (failure,) = run.record["failures"]
    assert failure["reason"].startswith("RuntimeError: no folder (linear_subjects.py:")


def test_the_fp8_product_is_that_of_the_quantized_operands() -> None:
    torch.manual_seed(0)
    fixture = linear_subjects.make_fixture(64, 128, 4, torch.device("cpu"))
    subject = linear_subjects.make_subject(goals.SCALED_MM, fixture, "none", 2)
    apart = graph_timing.relative_error(subject.product, fixture.product)
    assert 5e-3 < apart < 0.1
    assert subject.nbytes == 64 * 128


def test_the_dequantized_weight_is_exact_in_bfloat16() -> None:
    fixture = linear_subjects.make_fixture(64, 128, 4, torch.device("cpu"))
    wide = fixture.weight.dequantize(torch.float32)
    assert torch.equal(wide, fixture.weight.dequantize(torch.bfloat16).float())


def test_a_record_names_no_folder_of_the_machine() -> None:
    facts = {"gpu": "", "driver": "", "toolkit": "", "versions": {}, "commit": "", "switches": {}}
    assert linear.new_record(facts, "no /a/b.c/d here")["marlin_missing"] == "no d here"
    environ = {"VT_CACHE_DIR": "/a/b/cache", "HOME": "/a", "VT_KERNELS": "nvfp4:!x*"}
    assert measured_on.switches_set(environ) == {"VT_CACHE_DIR": "cache", "VT_KERNELS": "nvfp4:!x*"}


@pytest.mark.parametrize(("nbytes", "copies"), [(400_000_000, 2), (100_270_080, 4), (589_824, 679)])
def test_copies_pass_the_cache_and_are_two_at_least(nbytes: int, copies: int) -> None:
    assert graph_timing.copies_of(nbytes) == copies


def test_poisoned_memory_fills_what_is_not_initialised() -> None:
    with graph_timing.poisoned_memory():
        assert torch.isnan(torch.empty(8)).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="unknown shape other; known: gate_up"):
        linear._names("down,other", tuple(goals.SHAPES), (), "shape")
    assert linear._names(None, ("a",), ("a",), "shape") == ["a"]
