"""`vtensors explain`: a step of a fused op says why it is not fused, and rules do what the page about kernels says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_specs import kernel
from tiny_checkpoints import Tiny
from vtensors.checkpoint import open_checkpoint
from vtensors.manager import Plugins
from vtensors.registry import Owned
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain import explained, text_lines
from vtensors_plugins.commands.explain_reasons import reworded, together, told_reasons

DATA = Path(__file__).parents[1] / "data"
MIXED = DATA / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
NVFP4 = DATA / "llama-llmcompressor-nvfp4a16"
PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_a_step_of_an_op_that_no_kernel_computes_on_the_scheme_says_so(tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "plain")
    checkpoint = open_checkpoint(folder, plugins=Plugins.discover(third_parties=[], environ={}))
    lines = text_lines(explained(checkpoint, report_device(None, "sm_90a")), 200)
    steps = [index for index, line in enumerate(lines) if "linears, a step of norm_linear_swiglu" in line]
    assert steps
    assert lines[steps[-1] + 1].strip() == "norm_linear_swiglu: no kernel computes it on bf16 weights"
    for index in (i for i, line in enumerate(lines) if ", a step of " in line):
        assert lines[index + 1].startswith(" " * 16), lines[index : index + 2]


def test_what_a_rule_decided_is_told_first_and_each_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_KERNELS", "nvfp4:linear_nvfp4_*")
    checkpoint = open_checkpoint(NVFP4, plugins=Plugins.discover(third_parties=[]))
    found = explained(checkpoint, report_device(None, "sm_90a"))
    lines = text_lines(found, 500)
    steps = [index for index, line in enumerate(lines) if "linear, a step of " in line]
    assert steps
    for index in steps:
        names, colon, reason = lines[index + 1].strip().partition(": ")
        assert (colon, reason) == (": ", "VT_KERNELS asks for nvfp4:linear_nvfp4_*")
        assert "nvfp4_wgmma" in names
    assert "..*" not in "\n".join(lines)
    assert not [line for line in lines if ": serves M" in line]
    lost = [reason for row in found.rows for s in row.segments for _, reason in s.lost]
    assert any(reason.startswith("serves M") for reason in lost)


def test_costs_are_those_of_whoever_modelled_or_measured_them() -> None:
    kernels = dict(Plugins.discover(third_parties=[], environ={}).registry.kernels)
    mine = kernel("mine", schemes=("nvfp4",))
    kernels["mine"] = Owned(record=mine, plugin="fast", distribution="fast-dist")
    stream = "linear_nvfp4_stream"
    assert reworded("mine", f"9 us modelled; {stream} 5 us modelled", kernels) == (
        f"9 us modelled, {stream} 5 us modelled for an H200"
    )
    assert reworded(stream, "9 us measured; mine 5 us measured", kernels) == "9 us, mine 5 us, both measured"
    apart = "dearer than linear + add: 9 us, these 5 us at M = 1 (modelled)"
    assert reworded(stream, apart, kernels) == apart.replace("modelled", "modelled for an H200")
    assert reworded("linear_reference", "1e+09 us modelled; mine 5 us modelled", kernels).startswith(
        "the reference"
    )


def test_reasons_of_the_users_rules_come_before_others_and_share_a_line() -> None:
    told = together(
        [("a", "made for sm_90a"), ("b", "VT_KERNELS forbids it (*:!b)"), ("c", "made for sm_90a")]
    )
    assert told == [("b", "VT_KERNELS forbids it (*:!b)"), ("a, c", "made for sm_90a")]


def test_a_range_of_which_a_kernel_serves_no_row_is_left_out() -> None:
    few, many = kernel("few", tokens=(1, 32)), kernel("many", tokens=(33, None))
    lost = [((1, 32), (("few", "dear"), ("many", "not here"))), ((33, None), (("few", "serves M = 1..32"),))]
    assert told_reasons(lost, {"few": few, "many": many}) == [("few", "M = 1..32: dear")]


@pytest.mark.parametrize("source", [NVFP4, MIXED], ids=lambda path: path.name)
def test_the_rule_of_the_page_under_which_nothing_is_packed_packs_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rule,) = re.findall(r"^\| `([^`]+)` \| nothing is packed", PAGE, flags=re.MULTILINE)
    monkeypatch.setenv("VT_KERNELS", rule)
    checkpoint = open_checkpoint(source, plugins=Plugins.discover(third_parties=[]))
    rows = explained(checkpoint, report_device(None, "sm_90a")).rows
    layouts = {s.layout for row in rows if row.request.scheme == "nvfp4" for s in row.segments}
    assert layouts == {"stored"}
