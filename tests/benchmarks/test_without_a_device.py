"""Scripts that need a CUDA device end with one line and status 2 where there is none."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import cuda_device
import pytest
import torch

from project.source_tree import REPOSITORY

SCRIPTS = (
    "benchmarks/accuracy.py",
    "benchmarks/engine_speed.py",
    "benchmarks/experts.py",
    "benchmarks/experts_sweep.py",
    "benchmarks/gated_delta_net.py",
    "benchmarks/host_time.py",
    "benchmarks/linear.py",
    "benchmarks/paged_attention.py",
    "benchmarks/segments_sweep.py",
    "benchmarks/stream_sweep.py",
    "benchmarks/w4a4.py",
    "benchmarks/w8a8_products.py",
    "benchmarks/wgmma_limits.py",
    "benchmarks/wgmma_sweep.py",
    "benchmarks/widening.py",
    "tests/kernels/launch_each_kernel.py",
)
# What they cannot do without, besides a device.
ARGUMENTS = {
    "benchmarks/accuracy.py": ("DIR", "--ids", "ids.npy"),
    "benchmarks/engine_speed.py": ("DIR",),
}
# Run on a CPU, or only imported by the others.
OTHERS = {"convert_speed", "cuda_device", "graph_timing", "linear_goals", "linear_subjects", "linear_table"}
OTHERS |= {"engine_tables", "load_memory", "measured_on", "read_ceiling", "selected", "verify_speed"}
OTHERS |= {"experts_tunings", "rounding_places", "rounding_study", "rounding_table"}
OTHERS |= {"synthetic", "synthetic_configs", "synthetic_models", "synthetic_values"}


def _script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.rpartition("/")[2][:-3], REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_script_without_a_device_says_what_it_needs_and_exits_with_2(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [path, *ARGUMENTS.get(path, ())])
    with pytest.raises(SystemExit) as ended:
        _script(path).main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("needs a CUDA device")


def test_every_benchmark_is_known_to_need_a_device_or_not() -> None:
    needing = {path.rpartition("/")[2][:-3] for path in SCRIPTS if path.startswith("benchmarks/")}
    assert needing | OTHERS == {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py")}


def test_another_device_and_a_missing_compiler_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "L4")
    monkeypatch.setattr(cuda_device, "find_toolkit", lambda: "cupy is not installed")
    assert cuda_device.missing_for("sm_90a") == (
        "needs a CUDA device of sm_90a; torch's current device is L4 (sm_89)"
    )
    assert cuda_device.missing_for() == "needs a compiler for the device: cupy is not installed"
    monkeypatch.setattr(cuda_device, "find_toolkit", lambda: object())
    assert cuda_device.missing_for("sm_89") is None
