"""From source to a loaded image: targets, toolkits and errors that misled elsewhere. No GPU, no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_compiler import FakeCompiler, NVRTCError, elf, install, new_process

from kernel_specs import kernel, reference, request
from vtensors.errors import RequestError
from vtensors.kernel_binding import bind_plan
from vtensors.selection import plan_kernels
from vtensors_kernels.compiling.architectures import capability_of, target_of
from vtensors_kernels.compiling.functions import compiled_image
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import LaunchError, load_function
from vtensors_kernels.compiling.nvrtc import CompileError, Toolkit, compile_source, find_toolkit
from vtensors_kernels.compiling.sources import Source

SOURCE = "common/widen_fp8.cu"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCompiler]:
    """The installed NVRTC, and an empty cache folder."""
    yield install(monkeypatch, tmp_path / "cache")
    new_process()


# --- B75: the `a` targets ------------------------------------------------------------------------------------


@pytest.mark.fault("B75")
@pytest.mark.parametrize(
    ("capability", "target"),
    [
        *(((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")),
        *(((10, 3), "sm_103a"), ((11, 0), "sm_110a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")),
    ],
)
def test_the_compiler_is_asked_for_the_devices_own_target(
    compiler: FakeCompiler, capability: tuple[int, int], target: str
) -> None:
    compiled_image(SOURCE, target_of(capability), {})
    assert compiler.compiled[0][0] == f"--gpu-architecture={target}"


@pytest.mark.fault("B75")
def test_a_target_that_the_compiler_does_not_know_is_an_error_and_no_other_is_taken(
    compiler: FakeCompiler,
) -> None:
    compiler.version, compiler.targets = (12, 8), (80, 86, 89, 90, 100, 120)
    with pytest.raises(CompileError) as caught:
        compiled_image(SOURCE, "sm_121a", {})
    assert "NVRTC 12.8 does not know sm_121a (newest: sm_120)" in str(caught.value)
    assert "12.9 for 103 and 121" in str(caught.value)
    assert compiler.compiled == []


@pytest.mark.fault("B75")
@pytest.mark.parametrize("target", ["sm_120", "sm_100", "10.3a", "sm_12a"])
def test_a_kernel_form_for_a_plain_or_misspelt_target_is_refused_and_never_dropped(target: str) -> None:
    with pytest.raises(RequestError, match="sm_103a") as caught:
        Instantiation(source=SOURCE, function="widen_fp8", targets=("sm_80", target))
    assert target in str(caught.value)
    if not target.startswith("sm_1"):
        with pytest.raises(RequestError, match="not a GPU target"):
            capability_of(target)


@pytest.mark.fault("B75")
def test_a_conversion_for_a_plain_target_is_a_compile_error_that_names_the_target() -> None:
    toolkit = find_toolkit()
    if isinstance(toolkit, str) or not toolkit.knows("sm_120a"):
        pytest.skip(str(toolkit))
    text = """extern "C" __global__ void convert(unsigned short* out, unsigned char* in) {
  unsigned pair; unsigned short codes = in[0];
  asm("{.reg .b8 low, high; mov.b16 {low, high}, %1; cvt.rn.f16x2.e2m1x2 %0, low;}" : "=r"(pair) : "h"(codes));
  out[0] = pair;
}"""
    source = Source(name="common/convert.cu", text=text)
    assert compile_source(source, "sm_120a", {}, toolkit)[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match="sm_120") as caught:
        compile_source(source, "sm_120", {}, toolkit)
    assert "e2m1x2" in str(caught.value)
    assert "--gpu-architecture=sm_120 " in str(caught.value)


# --- B79: the toolkit's folder ------------------------------------------------------------------------------

REPORT = f"""
import json
from click.testing import CliRunner
from vtensors_kernels.compiling.nvrtc import compile_source, find_toolkit
from vtensors_kernels.compiling.sources import load_source
from vtensors_plugins.commands.kernels import command
report = CliRunner().invoke(command, ["--assume", "sm_121a", "--json"]).stdout
toolkit = find_toolkit()
image = "" if isinstance(toolkit, str) else compile_source(load_source({SOURCE!r}), "sm_90a", {{}}, toolkit).hex()
print(json.dumps([json.loads(report), image]))
"""


def _reported(**variables: str) -> Any:
    own = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT")
    environ = {name: value for name, value in os.environ.items() if name not in own} | variables
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.fault("B79")
def test_a_broken_cuda_home_changes_neither_reports_nor_compiled_code() -> None:
    usual = _reported()
    for value in (":/usr/local/cuda", "/usr/local/cuda:/opt/cuda", "/nowhere"):
        assert _reported(CUDA_HOME=value, CUDA_PATH=value, CUDA_ROOT=value) == usual, value


# --- B82: errors of the compiler -----------------------------------------------------------------------------


@pytest.mark.fault("B82")
@pytest.mark.parametrize(
    ("log", "first"),
    [
        (
            'common/fast.cu(1): catastrophic error: cannot open source file "missing.h"\n  #include <missing.h>\n\n'
            "1 catastrophic error detected in the compilation.\nCompilation terminated.\n",
            'common/fast.cu(1): catastrophic error: cannot open source file "missing.h"',
        ),
        (
            "common/fast.cu(4): warning #177-D: variable was declared but never referenced\n"
            'common/fast.cu(9): error: identifier "x" is undefined\ncommon/fast.cu(12): error: expected a ";"\n',
            'common/fast.cu(9): error: identifier "x" is undefined',
        ),
        ("", "NVRTC_ERROR_OUT_OF_MEMORY (1)"),
    ],
    ids=["a missing header", "behind a warning", "without a log"],
)
def test_the_first_error_is_shown_with_options_target_and_toolkit(
    compiler: FakeCompiler, log: str, first: str
) -> None:
    def fail(program: dict[str, Any], options: list[str]) -> None:
        raise NVRTCError("NVRTC_ERROR_OUT_OF_MEMORY (1)")

    compiler.log = log
    sys.modules["cupy.cuda"].nvrtc.compileProgram = fail
    toolkit = find_toolkit()
    assert isinstance(toolkit, Toolkit)
    with pytest.raises(CompileError) as caught:
        compile_source(Source(name="common/fast.cu", text="..."), "sm_121a", {"VT_F16": 1}, toolkit)
    text = str(caught.value)
    assert first in text
    assert "NVRTC 13.0, sm_121a, options --gpu-architecture=sm_121a" in text
    assert "-DVT_F16=1" in text
    assert "never referenced" not in text
    assert "expected a" not in text


# --- B74: an image that the driver does not take --------------------------------------------------------------


@pytest.mark.fault("B74")
def test_an_image_that_the_driver_refuses_is_told_with_its_target_and_the_next_kernel_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_image = "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available for execution on the device"

    class Module:
        def load(self, image: bytes) -> None:
            raise RuntimeError(no_image)

    packages = {
        "cuda": ModuleType("cuda"),
        "cuda.bindings": SimpleNamespace(driver=SimpleNamespace()),
        "cupy": ModuleType("cupy"),
        "cupy.cuda": SimpleNamespace(function=SimpleNamespace(Module=Module)),
    }
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(LaunchError) as caught:
        load_function(elf(b""), "linear_x", "sm_120a")
    assert no_image in str(caught.value)
    assert "compiled for sm_120a" in str(caught.value)

    def probe(asked: object) -> None:
        load_function(elf(b""), "linear_x", "sm_120a")

    kernels = [kernel("linear_nvfp4_native", cost=1.0, probe=probe), reference()]
    bound = bind_plan(plan_kernels(request(capability=(12, 1)), kernels), ["weight"])
    assert bound.segments[0].kernel.name == "linear_reference"
    reason = dict(bound.rejected)["linear_nvfp4_native"]
    assert no_image in reason
    assert "compiled for sm_120a" in reason
