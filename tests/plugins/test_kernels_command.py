"""`vtensors kernels`: what is registered, and what can serve a device that is here or only assumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from fake_plugins import candidate, module
from vtensors.cli import main
from vtensors.errors import RequestError
from vtensors.manager import Plugins, default_plugins
from vtensors.records import KernelRequest, KernelSpec
from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.compiling.devices import CudaDevice
from vtensors_plugins.commands import device_option, kernels
from vtensors_plugins.commands.device_option import report_device
from vtensors_plugins.commands.kernel_facts import kernel_facts
from vtensors_plugins.commands.kernel_lists import folded

Run = Callable[..., tuple[int, str]]
H200 = CudaDevice(index=0, name="NVIDIA H200", capability=(9, 0))
SPARK = CudaDevice(index=1, name="NVIDIA GB10", capability=(12, 1))
NO_DRIVER = "no NVIDIA driver (libcuda.so.1: not found)"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `vtensors kernels` with a cache folder of its own and no GPU: (exit status, stdout)."""
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device_option, "find_devices", lambda: NO_DRIVER)

    def call(*words: str) -> tuple[int, str]:
        status = main(["kernels", *words])
        return status, capsys.readouterr().out

    return call


def _report(run: Run, *words: str) -> dict[str, Any]:
    status, out = run("--json", *words)
    assert status == 0
    return json.loads(out)


def _kernels(run: Run, *words: str) -> dict[str, dict[str, Any]]:
    return {kernel["name"]: kernel for kernel in _report(run, *words)["kernels"]}


def test_every_registered_kernel_is_listed_with_its_facts(run: Run) -> None:
    shown = _kernels(run, "--assume", "sm_90a")
    registered = default_plugins().registry.kernels
    assert set(shown) == set(registered)
    for name, kernel in shown.items():
        owned = registered[name]
        assert kernel["op"] == owned.record.op
        assert kernel["tokens"] == list(owned.record.tokens)
        assert kernel["layout"] == owned.record.layout
        assert (kernel["plugin"], kernel["distribution"]) == (owned.plugin, owned.distribution)
        assert (kernel["reason"] is None) == kernel["serves"]


def test_on_a_cpu_only_the_reference_serves_and_the_others_say_why(run: Run) -> None:
    shown = _kernels(run)
    assert shown["linear_reference"]["serves"]
    assert shown["linear_nvfp4_widening"]["reason"] == "made for cuda, not cpu"
    out = run()[1]
    assert NO_DRIVER in " ".join(out.split())
    assert "cannot serve cpu:" in out


@pytest.mark.parametrize("target", COMPILED)
def test_an_assumed_gpu_needs_neither_driver_nor_compiler(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    report = _report(run, "--assume", target)
    assert (report["target"], report["assumed"]) == (target, True)
    assert "cupy is not installed" in report["compiler"]["problem"]
    shown = {kernel["name"]: kernel for kernel in report["kernels"]}
    assert shown["linear_nvfp4_widening"]["serves"]
    state = "run" if target == "sm_90a" else "compiled, not run"
    assert shown["linear_nvfp4_widening"]["state"] == report["state"] == state
    assert shown["linear_reference"]["state"] is None


def test_a_device_newer_than_the_version_gets_portable_code_and_is_said_so(run: Run) -> None:
    report = _report(run, "--assume", "sm_130")
    assert (report["target"], report["capability"]) == ("compute_80", [13, 0])
    assert report["state"] == "compiled, not run"
    assert "newer than this version" in run("--assume", "sm_130")[1]


@pytest.mark.parametrize("word", ["sm_75", "sm_", "hopper", "compute_80", "sm_\uff19\uff10a"])
def test_what_is_no_target_is_refused_with_the_accepted_ones(run: Run, word: str) -> None:
    status, out = run("--json", "--assume", word)
    assert status == 2
    assert "sm_121a" in json.loads(out)["error"]["accepted"]


def test_device_chooses_one_of_the_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_option, "find_devices", lambda: (H200, SPARK))
    assert report_device(None, None).headline() == (
        "sm_90a: NVIDIA H200; kernels for sm_90a: run on this architecture"
    )
    for word in ("1", "cuda:1"):
        found = report_device(word, None)
        assert (found.name, found.target, found.assumed) == ("cuda:1", "sm_121a", False)
    assert report_device("cuda", None).name == "cuda:0"
    assert report_device("cpu", None).target == "cpu"
    with pytest.raises(RequestError, match="2 devices"):
        report_device("2", None)
    with pytest.raises(RequestError, match="no such device"):
        report_device("cuda:x", None)
    with pytest.raises(RequestError, match="combined"):
        report_device("0", "sm_90a")


def test_without_a_gpu_a_wanted_one_is_refused_with_the_reason(run: Run) -> None:
    status, out = run("--json", "--device", "0")
    assert status == 2
    error = json.loads(out)["error"]
    assert NO_DRIVER in error["seen"]
    assert "--assume" in error["fix"]


def test_the_cache_is_shown_with_what_lies_in_it(run: Run, tmp_path: Path) -> None:
    assert _report(run)["cache"] == {"folder": str(tmp_path / "cache"), "cubin": 0, "verdicts": 0}
    for folder, name in (("cubin", "a.cubin"), ("cubin", "b.tmp"), ("verdicts", "c.json")):
        (tmp_path / "cache" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / folder / name).write_text("")
    assert _report(run)["cache"] == {"folder": str(tmp_path / "cache"), "cubin": 1, "verdicts": 1}


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_121a"])
def test_the_list_fits_the_terminal_and_names_every_kernel_that_serves(
    run: Run, columns: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("VT_CACHE_DIR", "/cache")
    out = run("--assume", target)[1]
    assert [line for line in out.splitlines() if len(line) > columns and len(line.split()) > 1] == []
    for name, kernel in _kernels(run, "--assume", target).items():
        assert (name in out.split()) >= kernel["serves"], name


def test_what_cannot_serve_is_told_once_per_reason_with_folded_names_that_lose_none(run: Run) -> None:
    shown = _kernels(run)
    for_cuda = [name for name, kernel in shown.items() if kernel["reason"] == "made for cuda, not cpu"]
    text = " ".join(run()[1].split())
    assert text.count("made for cuda, not cpu") == 1
    assert f"made for cuda, not cpu: {len(for_cuda)} kernels" in text
    lines = folded((kernel["op"], name) for name, kernel in shown.items())
    assert len(lines) < 12
    names = []
    for line in lines:
        found = re.fullmatch(r"(\{[^}]*\}|\w+?)(\{[^}]*\})?(_\w+)?", line)
        assert found is not None, line
        ops, ends = (part.strip("{}").split(", ") for part in (found[1], found[2] or found[3] or ""))
        names += [op + end for op in ops for end in ends] if "{" in line else [line]
    assert sorted(names) == sorted(shown)


def _kernel(name: str, refuse: Callable[[KernelRequest], str | None], **facts: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        op="linear",
        schemes=("nvfp4",),
        targets=("cuda",),
        numerics="bitwise",
        refuse=refuse,
        bind=lambda prepared, request: print,
        **facts,
    )


def _with(*specs: KernelSpec) -> Plugins:
    plugin = module("fast", {"vtensors_kernels": lambda: list(specs)})
    return Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})


def test_a_third_partys_kernel_names_its_plugin_and_claims_no_state() -> None:
    plugins = _with(_kernel("mine", lambda request: None, tokens=(1, 8)))
    (facts,) = [f for f in kernel_facts(plugins, report_device(None, "sm_90a")) if f.kernel.name == "mine"]
    assert (facts.plugin, facts.distribution, facts.rows) == ("fast", "fast-dist", "M = 1..8")
    assert (facts.reason, facts.state) == (None, None)


def test_a_kernel_for_quantised_activations_alone_serves_the_device() -> None:
    def refuse(request: KernelRequest) -> str | None:
        return None if request.activations == "fp4" else f"needs fp4 activations, not {request.activations}"

    plugins = _with(_kernel("w4a4", refuse))
    (facts,) = [f for f in kernel_facts(plugins, report_device(None, "sm_120a")) if f.kernel.name == "w4a4"]
    assert facts.reason is None


def test_a_kernel_that_raises_when_asked_is_told_with_the_exception() -> None:
    def refuse(request: KernelRequest) -> str | None:
        raise KeyError("sm_121")

    plugins = _with(_kernel("rash", refuse))
    (facts,) = [f for f in kernel_facts(plugins, report_device(None, "sm_121a")) if f.kernel.name == "rash"]
    assert facts.reason is not None
    assert "failed to say whether it can: KeyError" in facts.reason


@pytest.mark.parametrize("answer", [True, 7, ""])
def test_a_kernel_that_answers_with_something_else_than_a_reason_cannot_serve(answer: Any) -> None:
    plugins = _with(_kernel("odd", lambda request: answer))
    (facts,) = [f for f in kernel_facts(plugins, report_device(None, "sm_121a")) if f.kernel.name == "odd"]
    assert facts.reason == f"failed to say whether it can: refuse() gives {answer!r}, not a reason or None"


def test_a_kernel_of_an_unknown_op_serves_nothing_and_the_ops_are_named() -> None:
    plugins = _with(attrs.evolve(_kernel("typo", lambda request: None), op="linaer"))
    (facts,) = [f for f in kernel_facts(plugins, report_device(None, "sm_121a")) if f.kernel.name == "typo"]
    assert facts.reason is not None
    assert facts.reason.startswith("computes 'linaer', which is no op; ops: linear, linears, ")


def test_neither_torch_nor_cupy_is_imported_where_they_are_not_needed() -> None:
    script = (
        "import sys; sys.modules['cupy'] = None; from vtensors.cli import main\n"
        "status = main(['kernels', '--assume', 'sm_90a'])\n"
        "print(*(name for name in ('torch', 'numpy') if name in sys.modules), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""


def test_a_compiler_that_does_not_know_the_device_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    old = kernels.Toolkit(version=(12, 4), targets=(80, 86, 89, 90))
    monkeypatch.setattr(kernels, "find_toolkit", lambda: old)
    report = _report(run, "--assume", "sm_121a")
    assert report["compiler"]["name"] == "NVRTC 12.4"
    assert report["compiler"]["problem"] == "NVRTC 12.4 does not know sm_121a (newest: sm_90)"
    assert _report(run, "--assume", "sm_90a")["compiler"]["problem"] is None
