"""What reports say where a kernel, a compiler or a driver does not fit: named, with what is used instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_plugins import candidate, module
from vtensors.checkpoint import open_checkpoint
from vtensors.cli import main
from vtensors.manager import Plugins
from vtensors.records import KernelSpec
from vtensors_kernels.compiling import nvrtc
from vtensors_kernels.compiling.devices import CudaDevice
from vtensors_kernels.compiling.nvrtc import Toolkit
from vtensors_plugins.commands import device_option, kernels
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.explain import explained, text_lines
from vtensors_plugins.commands.kernel_facts import kernel_facts

CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"
SPARK = CudaDevice(index=0, name="NVIDIA GB10", capability=(12, 1))
REASON = "made for sm_80, sm_120a; sm_121 needs sm_121a or sm_120f"


def _prebuilt(*targets: str) -> Plugins:
    """The built-in plugins and one whose kernel was built for those targets alone."""
    spec = KernelSpec(
        name="native_nvfp4",
        op="linear",
        schemes=("nvfp4",),
        targets=targets,
        numerics="16-bit outputs",
        refuse=lambda request: None,
        bind=lambda prepared, request: print,
        cost=1.0,
    )
    plugin = module("prebuilt", {"vtensors_kernels": lambda: [spec]})
    return Plugins.discover(third_parties=[candidate("prebuilt", plugin)], environ={})


@pytest.mark.fault("B74")
def test_a_build_without_the_cards_target_is_named_with_what_it_has_and_what_is_used_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that layers are computed by plain linears, as that kernel is one.
    monkeypatch.setenv(
        "VT_KERNELS", "nvfp4:!norm_*,nvfp4:!linears_*,nvfp4:!linear_add_*,nvfp4:!linear_swiglu_*"
    )
    plugins, spark = _prebuilt("sm_80", "sm_120a"), report_device(None, "sm_121a")
    (facts,) = [f for f in kernel_facts(plugins, spark) if f.kernel.name == "native_nvfp4"]
    assert facts.reason == REASON
    found = explained(open_checkpoint(CHECKPOINT, plugins=plugins), spark)
    rows = [row for row in found.rows if row.request.scheme == "nvfp4"]
    assert rows
    for row in rows:
        for segment in row.segments:
            assert ("native_nvfp4", REASON) in segment.lost
            assert segment.kernel != "native_nvfp4"
    text = " ".join(" ".join(text_lines(found, 100)).split())
    assert f"native_nvfp4: {REASON}" in text


@pytest.mark.fault("B74")
def test_a_build_for_the_family_serves_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    # Plain linears, as that kernel is one: a fused kernel would be cheaper than its launches.
    monkeypatch.setenv(
        "VT_KERNELS", "nvfp4:!norm_*,nvfp4:!linears_*,nvfp4:!linear_add_*,nvfp4:!linear_swiglu_*"
    )
    spark = report_device(None, "sm_121a")
    found = explained(open_checkpoint(CHECKPOINT, plugins=_prebuilt("sm_80", "sm_120f")), spark)
    used = {s.kernel for row in found.rows if row.request.scheme == "nvfp4" for s in row.segments}
    assert used == {"native_nvfp4"}


@pytest.mark.fault("B78")
def test_the_reports_need_no_compiler_and_say_that_there_is_none(tmp_path: Path) -> None:
    unset = ("PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "LD_LIBRARY_PATH")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"PATH": str(tmp_path), "VT_CACHE_DIR": str(tmp_path / "cache")}
    # CuPy cannot be imported, whatever this environment has.
    script = (
        "import sys; sys.modules['cupy'] = None; from vtensors.cli import main; sys.exit(main(sys.argv[1:]))"
    )

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", script, *words, "--json"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "nvcc" not in done.stdout + done.stderr
        return json.loads(done.stdout)

    report = run("kernels", "--device", "cpu")
    assert report["compiler"]["name"] is None
    assert "cupy is not installed" in report["compiler"]["problem"]
    assert run("explain", str(CHECKPOINT), "--device", "cpu")["totals"]["fallbacks"] == 0
    assert run("explain", str(CHECKPOINT), "--assume", "sm_121a")["totals"]["fallbacks"] == 0


@pytest.mark.fault("B78")
def test_on_a_gpu_without_a_compiler_the_kernels_are_unavailable_and_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_option, "find_devices", lambda: (SPARK,))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert main(["kernels", "--json"]) == 0
    shown = {kernel["name"]: kernel for kernel in json.loads(capsys.readouterr().out)["kernels"]}
    assert "cupy is not installed" in shown["linear_nvfp4_widening"]["reason"]
    assert shown["linear_reference"]["serves"]


@pytest.mark.fault("B84")
def test_a_compiler_too_old_for_the_card_is_named_with_its_newest_target_and_its_kernels_are_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Toolkit(version=(12, 8), targets=(80, 86, 89, 90, 100, 120))
    monkeypatch.setattr(device_option, "find_devices", lambda: (SPARK,))
    monkeypatch.setattr(nvrtc, "find_toolkit", lambda: old)
    monkeypatch.setattr(kernels, "find_toolkit", lambda: old)
    assert main(["kernels", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    said = "NVRTC 12.8 does not know sm_121a (newest: sm_120)"
    assert report["compiler"]["problem"] == said
    assert report["compiler"]["targets"][-1] == "sm_120"
    shown = {kernel["name"]: kernel for kernel in report["kernels"]}
    assert said in shown["linear_nvfp4_widening"]["reason"]
    assert "nvidia-cuda-nvrtc" in shown["linear_nvfp4_widening"]["reason"]
    assert shown["linear_reference"]["serves"]
    assert main(["kernels"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "NVRTC 12.8, newest target sm_120" in text
    assert "cannot serve sm_121a: " in text
