"""What `explain` makes of self-tests on a device that is here, with kernels and verdicts made up on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

from fake_plugins import candidate, module
from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.kernel_plans import KernelPlan
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec
from vtensors.verdicts import Verdicts
from vtensors_plugins.architectures.groups import Merged
from vtensors_plugins.architectures.outline import outline
from vtensors_plugins.commands import explain_probes
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain_lines import row_lines
from vtensors_plugins.commands.explain_probes import probed, row_times
from vtensors_plugins.commands.explain_rows import ExplainRow, Totals, explain_rows

NVFP4 = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"
BROKEN = "failed its self-test (built by hand): RuntimeError: off by one"


def _spec(name: str, op: str, *, works: bool, **facts: Any) -> KernelSpec:
    def probe(request: KernelRequest) -> None:
        if not works:
            raise RuntimeError("off by one")

    plain: dict[str, Any] = {
        "name": name,
        "op": op,
        "schemes": ("nvfp4",),
        "targets": ("cpu",),
        "numerics": "16-bit outputs",
        "refuse": lambda request: None,
        "bind": lambda prepared, request: print,
        "cost": 1.0,
        "probe": probe,
        "fingerprint": lambda request: "built by hand",
    }
    return KernelSpec(**{**plain, **facts})


def _rows(monkeypatch: pytest.MonkeyPatch, *specs: KernelSpec) -> tuple[Checkpoint, tuple[ExplainRow, ...]]:
    plugin = module("fast", {"vtensors_kernels": lambda: list(specs)})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    checkpoint = open_checkpoint(NVFP4, plugins=plugins)
    monkeypatch.setattr(explain_probes, "verdicts_for", lambda checkpoint, device: Verdicts())
    groups = probed(checkpoint, outline(checkpoint))
    return checkpoint, explain_rows(checkpoint, groups, report_device(None, "cpu"))


def _nvfp4(rows: tuple[ExplainRow, ...]) -> list[ExplainRow]:
    return [row for row in rows if row.request.scheme == "nvfp4"]


def test_a_kernel_that_fails_its_self_test_gives_way_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = _rows(
        monkeypatch,
        _spec("linear_broken", "linear", works=False),
        _spec("linear_sound", "linear", works=True, cost=2.0),
    )
    for row in _nvfp4(rows):
        assert [segment.kernel for segment in row.segments] == ["linear_sound"]
        assert ("linear_broken", BROKEN) in row.failures
        assert row.is_fallback
    assert Totals.of(rows).fallbacks == sum(row.weights for row in _nvfp4(rows)) == 14


def test_a_fused_kernel_that_fails_leaves_its_parts_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, rows = _rows(
        monkeypatch,
        _spec("swiglu_broken", "linear_swiglu", works=False),
        _spec("linear_sound", "linear", works=True),
    )
    row = next(row for row in rows if "gate_proj" in row.name)
    assert row.name == "model.layers.{0-1}.mlp.gate_proj|up_proj"
    assert row.request.op == "linear"
    assert [segment.kernel for segment in row.segments] == ["linear_sound"]
    assert ("swiglu_broken", BROKEN) in row.failures
    names = [name for group in row.modules for name in group]
    assert len(names) == 4
    assert row.stored == sum(checkpoint.modules[name].nbytes for name in names)


@pytest.mark.parametrize("why", [None, "failed its self-test: other bits"])
def test_a_kernel_that_merges_launches_is_tested_and_gives_way(
    why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = _rows(monkeypatch)
    tested: list[Any] = []

    def failure(run: Any) -> str | None:
        tested.append(run)
        return why

    merged = Merged(
        kernel="all_in_one", tokens=(1, 8), around="a norm", failure=failure, again=lambda plans: merged
    )
    groups = [attrs.evolve(group, merged=merged) for group in outline(checkpoint)]
    device = report_device(None, "cpu")
    rows = explain_rows(checkpoint, probed(checkpoint, groups), device)
    assert tested
    for row in rows:
        text = "\n".join(row_lines(row, {}, 200))
        assert row.merged == (merged if why is None else None)
        assert row.is_fallback == (why is not None)
        assert text.count(f"all_in_one: {why}") == (why is not None), row.name
        assert ("M = 1..8 with a norm: all_in_one" in text) == (why is None)


def test_a_merged_launch_is_planned_again_for_the_kernels_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, _ = _rows(
        monkeypatch,
        _spec("linear_broken", "linear", works=False),
        _spec("linear_sound", "linear", works=True, cost=2.0),
    )
    asked: list[Sequence[KernelPlan]] = []

    def again(plans: Sequence[KernelPlan]) -> Merged | None:
        asked.append(plans)
        sound = all(segment.kernel.name != "linear_sound" for plan in plans for segment in plan.segments)
        return merged if sound else None

    merged = Merged(
        kernel="all_in_one",
        tokens=(1, 8),
        around="a norm",
        failure=lambda run: None,
        behind=1,
        again=again,
    )
    planned = outline(checkpoint)
    found = probed(checkpoint, [attrs.evolve(group, merged=merged) for group in planned])
    assert len(found) == len(planned)
    assert [len(plans) for plans in asked] == [2] * (len(planned) - 1) + [1]
    for group, behind in pairwise(found):
        quantized = "nvfp4" in (group.request.scheme, behind.request.scheme)
        assert (group.merged is None) == quantized


def test_what_passes_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = _rows(monkeypatch, _spec("swiglu_sound", "linear_swiglu", works=True))
    row = next(row for row in rows if "gate_proj" in row.name)
    assert (row.request.op, row.weights, row.failures) == ("linear_swiglu", 4, ())
    assert not any(row.is_fallback for row in rows)


def test_a_kernel_that_cannot_be_timed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, rows = _rows(monkeypatch, _spec("linear_sound", "linear", works=True, tokens=(1, 8)))
    times = row_times(_nvfp4(rows)[0], checkpoint)
    assert set(times) == {1, 8, 32, 64}
    assert all("kernels are timed on a CUDA device" in str(time) for time in times.values())
