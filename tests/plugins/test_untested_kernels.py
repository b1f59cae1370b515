"""Kernels without a self-test: said so wherever they are listed, and refused on a GPU where the user asks for that."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from fake_plugins import candidate, module
from kernel_specs import kernel, reference, request
from vtensors.checkpoint import open_checkpoint
from vtensors.kernel_binding import bind_plan
from vtensors.manager import Plugins, default_plugins
from vtensors.records import KernelSpec
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts
from vtensors_plugins.architectures.outline import outline
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain_lines import row_lines
from vtensors_plugins.commands.explain_rows import explain_rows
from vtensors_plugins.commands.kernel_facts import kernel_facts
from vtensors_plugins.commands.kernel_lists import serving_lines

NVFP4 = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"
MINE = kernel("linear_mine", targets=("cuda",), cost=0.1)


def _with(*specs: KernelSpec) -> Plugins:
    plugin = module("fast", {"vtensors_kernels": lambda: list(specs)})
    return Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})


def test_no_built_in_kernel_is_untested() -> None:
    kernels = default_plugins().registry.kernels.values()
    assert [owned.record.name for owned in kernels if owned.record.untested] == []


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_kernel_without_a_self_test_is_listed_as_such(width: int) -> None:
    plugins = _with(MINE, attrs.evolve(MINE, name="linear_ours", probe=print, fingerprint=str))
    device = report_device(None, "sm_90a")
    found = [facts for facts in kernel_facts(plugins, device) if facts.distribution == "fast-dist"]
    assert [facts.to_json()["self_tested"] for facts in found] == [False, True]
    text = "\n".join(serving_lines(found, width))
    assert text.count("not self-tested") == 1
    assert text.index("linear_mine") < text.index("not self-tested") < text.index("linear_ours")


def test_explain_says_where_a_kernel_is_taken_untested() -> None:
    plugins = _with(MINE)
    checkpoint = open_checkpoint(NVFP4, plugins=plugins)
    device = report_device(None, "sm_90a")
    groups = outline(checkpoint, device=device.name, capability=device.capability, assumed=True)
    rows = explain_rows(checkpoint, groups, device)
    row = next(row for row in rows if any(s.kernel == "linear_mine" for s in row.segments))
    kernels = {name: owned.record for name, owned in plugins.registry.kernels.items()}
    assert "linear_mine (not self-tested), layout stored" in "\n".join(row_lines(row, kernels, 100))
    assert [entry["self_tested"] for entry in row.to_json()["kernels"]] == [False]
    others = [row for row in rows if all(s.kernel != "linear_mine" for s in row.segments)]
    assert all(not segment.untested for row in others for segment in row.segments)


def test_strict_refuses_an_untested_kernel_and_takes_the_next() -> None:
    plan = plan_kernels(request(), [MINE, reference()])
    assert bind_plan(plan, ["weight"], Verdicts()).segments[0].kernel is MINE
    found = bind_plan(plan, ["weight"], Verdicts(refuse_untested=True))
    assert found.segments[0].kernel.name == "linear_reference"
    (reason,) = [reason for name, reason in found.rejected if name == "linear_mine"]
    assert reason == "has no self-test, and VT_STRICT=untested refuses such kernels on a GPU"
