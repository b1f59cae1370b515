"""`vtensors explain`: the kernel of every weight on devices that need not be here, and why not another one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_plugins import candidate, module
from vtensors.checkpoint import open_checkpoint
from vtensors.cli import main
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.commands import device_option
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain import Explanation, explained, text_lines

DATA = Path(__file__).parents[1] / "data"
MIXED = DATA / "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
FP8_BLOCK = DATA / "llamaedge-llmcompressor-fp8block"
NVFP4 = DATA / "llama-llmcompressor-nvfp4a16"
TIED = DATA / "qwen3-modelopt-nvfp4-kvfp8"
MOE = DATA / "qwen35moe-modelopt-moe-mixed-w4a16"
CHECKPOINTS = sorted(path for path in DATA.iterdir() if (path / "config.json").exists())
TARGETS = ("sm_90a", "sm_121a", "sm_89", "cpu")

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `vtensors explain` in a terminal of 100 columns, without a GPU: (exit status, stdout)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(device_option, "find_devices", lambda: "no NVIDIA driver")
    for name in ("VT_PLUGINS", "VT_PREFER", "VT_STRICT", "VT_KERNELS", "VT_FP8_W8A8", "VT_MODELOPT_W4A4"):
        monkeypatch.delenv(name, raising=False)

    def call(source: Path, *words: str) -> tuple[int, str]:
        status = main(["explain", str(source), *words])
        return status, capsys.readouterr().out

    return call


def _report(run: Run, source: Path, *words: str) -> dict[str, Any]:
    return json.loads(run(source, "--json", *words)[1])


def _group(report: dict[str, Any], module: str) -> dict[str, Any]:
    (found,) = [g for g in report["groups"] if any(module in modules for modules in g["modules"])]
    return found


def _covers_every_row(kernels: list[dict[str, Any]]) -> bool:
    firsts = [kernel["tokens"][0] for kernel in kernels]
    lasts = [kernel["tokens"][1] for kernel in kernels]
    return firsts == [1, *(last + 1 for last in lasts[:-1])] and lasts[-1] is None


@pytest.fixture(scope="module")
def phantom(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 27B at full size, as a sparse file."""
    folder = tmp_path_factory.mktemp("phantom") / "27b"
    command = [sys.executable, str(shared / "tools" / "phantom.py"), "nvidia/Qwen3.6-27B-NVFP4", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("target", "state"),
    [("sm_90a", "run"), ("sm_121a", "compiled, not run"), ("sm_89", "compiled, not run")],
)
def test_the_27b_is_explained_for_a_gpu_that_is_not_here(
    phantom: Path, run: Run, target: str, state: str
) -> None:
    status, out = run(phantom, "--assume", target, "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["target"], report["assumed"], report["probed"], report["dtype"]) == (
        target,
        True,
        False,
        "bfloat16",
    )
    down = _group(report, "model.language_model.layers.5.mlp.down_proj")
    assert (down["groups"], down["scheme"], down["shape"]) == (64, "nvfp4", [5120, 17408])
    assert down["name"] == "model.language_model.layers.{0-63}.mlp.down_proj"
    gate = _group(report, "model.language_model.layers.5.mlp.gate_proj")
    assert gate["name"] == "model.language_model.layers.{0-63}.mlp.gate_proj|up_proj"
    assert sum(map(len, gate["modules"])) == 128
    q = _group(report, "model.language_model.layers.3.self_attn.q_proj")
    assert (q["scheme"], q["declared"], q["executed"]) == ("fp8-tensor", ["fp8-static"], "16bit")
    head = _group(report, "lm_head")
    assert (head["scheme"], head["shape"]) == ("nvfp4", [248320, 5120])
    for group in report["groups"]:
        assert _covers_every_row(group["kernels"]), group["name"]
        assert group["prepared_bytes"] is not None
        if group["scheme"] in ("nvfp4", "fp8-tensor"):
            assert all(kernel["state"] == state for kernel in group["kernels"]), group["name"]
            assert not group["fallback"]
            assert all(kernel["lost"] for kernel in group["kernels"])
    assert report["totals"]["fallbacks"] == 0
    assert report["totals"]["stored_bytes"] == sum(group["stored_bytes"] for group in report["groups"])


def test_the_text_for_the_27b_says_what_is_assumed_and_what_was_never_run(phantom: Path, run: Run) -> None:
    status, out = run(phantom, "--assume", "sm_121a")
    assert status == 0
    last = out.splitlines()[-1]
    head = "sm_121a: assumed, not probed; kernels for sm_121a: compiled, not run"
    assert head in " ".join(out.split())
    assert "(compiled, not run)" in out
    assert "model.language_model.layers.{0-63}.mlp.down_proj  x64" in out
    assert last.startswith("no fallback; ")
    assert "20.1 GB stored" in last
    assert "(compiled, not run)" not in run(phantom, "--assume", "sm_90a")[1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", CHECKPOINTS, ids=lambda path: path.name)
def test_every_weight_of_every_checkpoint_has_a_kernel_for_every_number_of_rows(
    run: Run, source: Path, target: str
) -> None:
    status, out = run(source, "--assume", target, "--json")
    report = json.loads(out)
    assert status == (1 if report["totals"]["fallbacks"] else 0)
    for group in report["groups"]:
        assert _covers_every_row(group["kernels"])
        if target == "cpu":
            assert not group["fallback"]
            assert {kernel["kernel"] for kernel in group["kernels"]} <= {
                f"{op}_reference" for op in ("linear", "embedding", group["op"])
            }


def test_what_no_gpu_kernel_serves_is_a_fallback_that_is_counted(run: Run) -> None:
    wide = ("--dtype", "float32")
    status, out = run(FP8_BLOCK, "--assume", "sm_90a", *wide, "--json")
    report = json.loads(out)
    quantized = [group for group in report["groups"] if group["scheme"] == "fp8-block"]
    assert status == 1
    assert quantized
    assert all(group["fallback"] for group in quantized)
    assert report["totals"]["fallbacks"] == sum(len(g["modules"]) for g in quantized) == 14
    assert run(FP8_BLOCK, "--assume", "sm_90a", *wide)[1].splitlines()[-1].startswith("14 fallbacks; ")
    assert run(FP8_BLOCK, "--assume", "cpu")[0] == 0
    assert run(FP8_BLOCK, "--assume", "sm_90a")[0] == 0


def test_precisions_are_declared_and_executed_and_the_publishers_word_is_kept(run: Run) -> None:
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv"
    group = _group(_report(run, MIXED, "--assume", "cpu"), name)
    assert (group["declared"], group["executed"], group["algorithms"]) == (["fp8-static"], "16bit", ["FP8"])
    declared = _group(_report(run, MIXED, "--assume", "cpu", "--activations", "declared"), name)
    assert declared["executed"] == "fp8-static"


@pytest.mark.fault("B67")
@pytest.mark.parametrize("card", ["sm_80", "sm_90a", "sm_121a"])
def test_declared_fp8_activations_have_kernels_on_every_card(card: str, run: Run) -> None:
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv"
    found = _report(run, MIXED, "--assume", card, "--activations", "declared")
    group = _group(found, name)
    assert (group["executed"], found["totals"]["fallbacks"]) == ("fp8-static", 0)
    assert all("_fp8_w8a8" in kernel["kernel"] for kernel in group["kernels"])
    other = _group(_report(run, MIXED, "--assume", card), name)
    assert other["executed"] == "16bit"
    assert not any("w8a8" in kernel["kernel"] for kernel in other["kernels"])


def test_the_dtype_is_that_of_a_load_unless_it_is_given(run: Run) -> None:
    assert _report(run, NVFP4, "--assume", "cpu")["dtype"] == "float32"
    assert _report(run, NVFP4, "--assume", "sm_90a")["dtype"] == "bfloat16"
    assert _report(run, NVFP4, "--assume", "sm_90a", "--dtype", "float16")["dtype"] == "float16"
    status, out = run(NVFP4, "--assume", "sm_90a", "--dtype", "float32")
    assert status == 1
    assert "not float32" in out


def test_experts_are_one_row(run: Run) -> None:
    report = _report(run, MOE, "--assume", "sm_90a")
    groups = [g for g in report["groups"] if ".experts." in g["name"]]
    assert all(
        "layers.{0-1}.mlp.experts.{0-7}.gate_proj|up_proj|down_proj" in group["name"] for group in groups
    )
    modules = [name for group in groups for names in group["modules"] for name in names]
    assert sum(".experts." in name for name in modules) == 2 * 8 * 3


def test_activations_that_cannot_run_as_asked_are_warned_of(run: Run) -> None:
    asked = ("--assume", "sm_121a", "--activations", "fp4")
    report = _report(run, MOE, *asked)
    assert _group(report, "lm_head")["executed"] == "16bit"
    (warning,) = report["warnings"]
    assert "there is no input scale: run with 16-bit activations" in warning
    assert f"warning: {warning}" in " ".join(run(MOE, *asked)[1].split())
    assert _report(run, MOE, "--assume", "sm_121a")["warnings"] == []


def test_embeddings_that_are_the_head_too_are_counted_once(run: Run) -> None:
    report = _report(run, TIED, "--assume", "cpu")
    rows = [group for group in report["groups"] if group["modules"] == [["model.embed_tokens"]]]
    assert [row["op"] for row in rows] == ["embedding", "linear"]
    each = [group["stored_bytes"] for group in report["groups"]]
    assert report["totals"]["stored_bytes"] == sum(each) - rows[0]["stored_bytes"]


def test_timings_are_refused_without_a_gpu_with_the_reason(run: Run) -> None:
    status, out = run(NVFP4, "--timings", "--json")
    assert status == 2
    assert "no NVIDIA driver" in json.loads(out)["error"]["seen"]
    status, out = run(NVFP4, "--timings", "--json", "--assume", "sm_90a")
    assert status == 2
    assert "assumed, not probed" in json.loads(out)["error"]["seen"]


def test_kernels_that_the_user_forbids_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_KERNELS", "nvfp4:!*_nvfp4_*,mxfp8:linear_reference")
    status, out = run(NVFP4, "--assume", "sm_90a", "--json")
    report = json.loads(out)
    assert status == 1
    assert report["kernels_switch"] == "nvfp4:!*_nvfp4_*,mxfp8:linear_reference"
    assert any("mxfp8" in note for note in report["notes"])
    down = _group(report, "model.layers.0.mlp.down_proj")
    reasons = {lost["kernel"]: lost["reason"] for lost in down["kernels"][0]["lost"]}
    assert "VT_KERNELS forbids it" in reasons["linear_nvfp4_widening"]


def test_a_rule_for_a_scheme_that_the_model_lacks_is_told_and_one_in_vain_counts_as_for_a_load(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_STRICT", "fallbacks")
    monkeypatch.setenv("VT_KERNELS", "fp8-row:linear_reference")
    status, out = run(NVFP4, "--assume", "sm_90a")
    assert status == 0
    assert "VT_KERNELS: 'fp8-row:linear_reference' matches no scheme of this model" in out.splitlines()
    assert out.splitlines()[-1].startswith("no fallback; ")
    monkeypatch.setenv("VT_KERNELS", "*:linear_nvfp4_stream")
    status, out = run(NVFP4, "--assume", "sm_90a")
    assert status == 1
    assert "fallback: VT_KERNELS: '*:linear_nvfp4_stream' has no kernel for bf16 weights" in out
    assert out.splitlines()[-1].startswith("1 rule in vain; ")
    assert len(_report(run, NVFP4, "--assume", "sm_90a")["in_vain"]) == 1


def test_a_rule_that_names_no_kernel_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VT_KERNELS", "nvfp4:no_such_kernel")
    status, out = run(NVFP4, "--assume", "sm_90a", "--json")
    assert status == 2
    assert "VT_KERNELS" in json.loads(out)["error"]["message"]


def test_a_checkpoint_that_cannot_be_opened_is_refused(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "--json")[0] == 2


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(run: Run, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, run(MIXED, "--assume", "sm_121a")[1].splitlines())) <= columns


@pytest.mark.parametrize("columns", range(60, 101, 4))
def test_no_number_is_parted_from_its_unit(run: Run, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in run(NVFP4, "--assume", "sm_90a")[1].splitlines():
        assert not re.search(r"\bM$|=$|\d x$", line), line
        assert not re.match(r"\s+(us|[kMG]?B|x)\b", line), line


def test_a_router_in_one_launch_is_told_for_the_devices_that_have_it(run: Run) -> None:
    words = "M = 1..64 with the norm before it and the choice of experts behind, in one launch: norm_router"
    for target in TARGETS:
        group = _group(_report(run, MOE, "--assume", target), "model.layers.0.mlp.gate")
        told = " ".join(run(MOE, "--assume", target)[1].split())
        assert (f"merged {words}" in told) == ("norm_router" in told) == (target == "sm_90a")
        if target != "sm_90a":
            assert group["merged"] is None
    merged = _group(_report(run, MOE, "--assume", "sm_90a"), "model.layers.0.mlp.gate")["merged"]
    assert (merged["kernel"], merged["tokens"]) == ("norm_router", [1, 64])


def test_an_mlp_that_hands_on_is_told_at_gate_and_up_for_the_devices_that_have_it(run: Run) -> None:
    words = "merged M = 33..64 with down_proj, whose input gate and up lay out: wgmma_mlp"
    for target in TARGETS:
        told = " ".join(run(NVFP4, "--assume", target)[1].split())
        assert (words in told) == ("wgmma_mlp" in told) == (target == "sm_90a")
    report = _report(run, NVFP4, "--assume", "sm_90a")
    merged = _group(report, "model.layers.0.mlp.gate_proj")["merged"]
    assert (merged["kernel"], merged["tokens"]) == ("wgmma_mlp", [33, 64])
    assert _group(report, "model.layers.0.mlp.down_proj")["merged"] is None


@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_every_modelled_cost_says_that_it_is_an_h200s(run: Run, target: str) -> None:
    text = " ".join(run(MIXED, "--assume", target)[1].split())
    assert text.count("modelled") == text.count("modelled for an H200") > 0
    for group in _report(run, MIXED, "--assume", target)["groups"]:
        for part in group["kernels"]:
            modelled = part["microseconds"] is not None and not part["measured"]
            assert part["modelled_for"] == ("an H200" if modelled else None)
            reasons = " ".join(lost["reason"] for lost in part["lost"])
            assert reasons.count("modelled") == reasons.count("modelled for an H200")


def _spec(**facts: Any) -> KernelSpec:
    plain: dict[str, Any] = {
        "name": "linear_mine",
        "op": "linear",
        "schemes": ("nvfp4",),
        "targets": ("cuda",),
        "numerics": "16-bit outputs",
        "refuse": lambda request: None,
        "bind": lambda prepared, request: print,
        "cost": 1.0,
    }
    return KernelSpec(**{**plain, **facts})


def _explained(source: Path, target: str, *specs: KernelSpec, leave_out: str = "") -> Explanation:
    plugin = module("fast", {"vtensors_kernels": lambda: list(specs)})
    environ = {"VT_PLUGINS": f"-{leave_out}"} if leave_out else {}
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ=environ)
    return explained(open_checkpoint(source, plugins=plugins), report_device(None, target))


def test_a_third_partys_plain_linear_serves_layers_that_ask_for_fused_ops() -> None:
    found = _explained(NVFP4, "sm_121a", _spec(), leave_out="cuda")
    rows = [row for row in found.rows if row.request.scheme == "nvfp4"]
    assert {segment.kernel for row in rows for segment in row.segments} == {"linear_mine"}
    assert {row.asked for row in rows} > {"linear_add"}
    assert all(row.request.op == "linear" for row in rows)
    text = "\n".join(text_lines(found, 200))
    assert "linear, a step of linear_add" in text


def test_a_kernel_for_some_rows_shares_the_weight_with_the_one_for_the_others() -> None:
    found = _explained(MOE, "sm_90a", _spec(tokens=(1, 8)))
    row = next(row for row in found.rows if (row.request.scheme, row.request.op) == ("nvfp4", "linear"))
    assert (row.segments[0].tokens, row.segments[0].kernel) == ((1, 8), "linear_mine")
    assert row.segments[-1].tokens[1] is None
    assert "M = 1..8" in "\n".join(text_lines(found, 200))


def test_a_layout_that_does_not_tell_its_size_is_not_guessed() -> None:
    own = _spec(layout="mine", prepare=lambda weights, request: weights)
    found = _explained(NVFP4, "sm_90a", own)
    assert found.to_json()["totals"]["prepared_bytes"] is None
    text = "\n".join(text_lines(found, 200))
    assert "unknown: the layout does not tell" in text
    assert "and more that is not told" in text.splitlines()[-1]


def test_nothing_is_bound_or_probed_for_an_assumed_device() -> None:
    def touched(*_: Any) -> Any:
        raise AssertionError("an assumed device must not be touched")

    seen: list[KernelRequest] = []

    def refuse(request: KernelRequest) -> str | None:
        seen.append(request)
        return None

    own = _spec(refuse=refuse, bind=touched, probe=touched, fingerprint=touched)
    found = _explained(NVFP4, "sm_103a", own)
    assert any(row.segments[0].kernel == "linear_mine" for row in found.rows)
    assert {request.assumed for request in seen} == {True}
    assert {request.capability for request in seen} == {(10, 3)}


@pytest.mark.gpu
@pytest.mark.parametrize("source", [NVFP4, MIXED], ids=lambda path: path.name)
def test_on_a_gpu_the_kernels_are_those_of_a_load_and_each_is_timed(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import vtensors

    status = main(["explain", str(source), "--device", "0", "--timings", "--json"])
    report = json.loads(capsys.readouterr().out)
    print(json.dumps(report, indent=1))
    assert (report["assumed"], report["probed"]) == (False, True)
    loaded = vtensors.load_model(source, device="cuda")
    kernels = {record.module: record.kernel for record in loaded.selected if record.op != "embedding"}
    for group in report["groups"]:
        times = group["measured_microseconds"]
        assert set(times) == {"1", "8", "32", "64"}
        assert all(isinstance(time, float) and time > 0 for time in times.values()), (group["name"], times)
        for modules in group["modules"]:
            if group["op"] != "embedding":
                assert {kernels[name] for name in modules} == {group["kernels"][0]["kernel"]}
    assert status == (1 if report["totals"]["fallbacks"] else 0)
