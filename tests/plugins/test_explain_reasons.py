"""`vtensors explain`: a step of a fused op says why it is not fused, and rules do what the page about kernels says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_plugins import candidate, module
from kernel_specs import kernel
from tiny_checkpoints import Tiny
from vtensors.checkpoint import open_checkpoint
from vtensors.manager import Plugins
from vtensors.records import KernelRequest
from vtensors.registry import Owned
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain import explained, text_lines
from vtensors_plugins.commands.explain_reasons import reworded, together, told_reasons

DATA = Path(__file__).parents[1] / "data"
MIXED = DATA / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
NVFP4 = DATA / "llama-llmcompressor-nvfp4a16"
W4A4 = DATA / "llamazero-modelopt-nvfp4"
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
    lines = text_lines(found, 900)
    steps = [index for index, line in enumerate(lines) if "linear, a step of " in line]
    assert steps
    for index in steps:
        names, colon, reason = lines[index + 1].strip().partition(": ")
        assert (colon, reason) == (": ", "VT_KERNELS asks for nvfp4:linear_nvfp4_*")
        assert "nvfp4_wgmma" in names
        assert "w4a4" not in names
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


def test_neighbouring_ranges_with_one_reason_are_one() -> None:
    ranges = ((1, 32), (33, 64), (65, 128), (129, None))
    reasons = ("dear", "twice", "twice", "dear")
    lost = [(rows, (("any", reason),)) for rows, reason in zip(ranges, reasons, strict=True)]
    assert told_reasons(lost, {"any": kernel("any")}) == [
        ("any", "M = 1..32: dear; M = 33..128: twice; M >= 129: dear")
    ]


def _only(activations: str, otherwise: str = "") -> Callable[[KernelRequest], str | None]:
    """Refuses other activations, and those too where a reason is given; the shape counts before them."""

    def refuse(request: KernelRequest) -> str | None:
        if otherwise and request.shape is not None:
            return otherwise
        return None if request.activations == activations else f"computes with {activations} activations"

    return refuse


def test_kernels_for_other_activations_alone_are_left_out_of_the_text_and_not_of_the_json() -> None:
    specs = [
        kernel("other", op="linear_add", schemes=("nvfp4",), targets=("cuda",), refuse=_only("fp4")),
        kernel("elsewhere", op="linear_add", schemes=("nvfp4",), targets=("sm_80",), refuse=_only("fp4")),
        kernel(
            "shape", op="linear_add", schemes=("nvfp4",), targets=("cuda",), refuse=_only("16bit", "odd K")
        ),
        kernel("never", op="linear_add", schemes=("nvfp4",), targets=("cuda",), refuse=lambda request: "no"),
        kernel("rash", op="linear_add", schemes=("nvfp4",), targets=("cuda",), refuse=lambda request: 1 // 0),
    ]
    plugin = module("fast", {"vtensors_kernels": lambda: specs})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    found = explained(open_checkpoint(NVFP4, plugins=plugins), report_device(None, "sm_90a"))
    row = next(row for row in found.rows if row.request.op == "linear_add")
    lost = {name for segment in row.segments for name, _ in segment.lost}
    assert {"other", "elsewhere", "shape", "never", "rash"} < lost
    text = "\n".join(text_lines(found, 200))
    assert "shape: odd K" in text
    assert "never: no" in text
    assert "rash: failed to say whether it can" in text
    assert not re.search(r"\b(other|elsewhere)\b", text)
    assert not re.search("w4a4|w4a8|w8a8", text)


@pytest.mark.parametrize(("activations", "shown"), [("declared", "w4a4"), (None, "wgmma_segments")])
def test_what_lost_is_of_the_activations_that_run(activations: str | None, shown: str) -> None:
    checkpoint = open_checkpoint(W4A4, plugins=Plugins.discover(third_parties=[], environ={}))
    found = explained(checkpoint, report_device(None, "sm_90a"), activations=activations)
    text = "\n".join(text_lines(found, 200))
    named = re.findall(r"\w+_nvfp4_\w+", text)
    assert any(shown in name for name in named)
    assert {"w4a4" in name for name in named} == {activations == "declared"}


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
