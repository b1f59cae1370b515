"""`vtensors explain`: a step of a fused op says why it is not fused, and rules do what the page about kernels says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtensors.checkpoint import open_checkpoint
from vtensors.manager import Plugins
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain import explained, text_lines

DATA = Path(__file__).parents[1] / "data"
MIXED = DATA / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
NVFP4 = DATA / "llama-llmcompressor-nvfp4a16"
PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_a_step_of_an_op_that_no_kernel_computes_on_the_scheme_says_so() -> None:
    checkpoint = open_checkpoint(MIXED, plugins=Plugins.discover(third_parties=[], environ={}))
    lines = text_lines(explained(checkpoint, report_device(None, "sm_90a")), 200)
    steps = [index for index, line in enumerate(lines) if "linear, a step of linears" in line]
    assert steps
    assert lines[steps[-1] + 1].strip() == "linears: no kernel computes it on bf16 weights"
    for index in (i for i, line in enumerate(lines) if ", a step of " in line):
        assert lines[index + 1].startswith(" " * 16), lines[index : index + 2]


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
