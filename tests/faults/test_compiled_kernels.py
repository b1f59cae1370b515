"""From source to a loaded image: targets, toolkits, caches and errors that misled elsewhere. No GPU, no compiler."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from kernel_specs import kernel, reference, request
from vtensors.errors import RequestError
from vtensors.kernel_binding import bind_plan
from vtensors.selection import plan_kernels
from vtensors_kernels.compiling import functions
from vtensors_kernels.compiling.architectures import COMPILED, TARGETS, capability_of, target_of
from vtensors_kernels.compiling.functions import compiled_image
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import LaunchError, load_function
from vtensors_kernels.compiling.nvrtc import CompileError, Toolkit, compile_source, find_toolkit
from vtensors_kernels.compiling.sources import Source, load_source

SOURCE = "common/widen_fp8.cu"
ALL = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
Options = list[list[str]]


class NVRTCError(Exception):
    """What CuPy raises where a program does not compile."""


@attrs.define
class FakeCompiler:
    """NVRTC as CuPy shows it. log: of a program that does not compile. compiled: options of each that did."""

    version: tuple[int, int] = (13, 0)
    targets: tuple[int, ...] = ALL
    log: str = ""
    compiled: Options = attrs.field(factory=list)

    def compile(self, program: dict[str, Any], options: list[str]) -> None:
        if self.log:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append(options)
        program["image"] = _elf(repr((self.version, program["text"], options)).encode())

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            NVRTCError=NVRTCError,
            getVersion=lambda: self.version,
            getSupportedArchs=lambda: self.targets,
            createProgram=lambda text, name, headers, names: {"text": text},
            compileProgram=self.compile,
            getProgramLog=lambda program: self.log,
            getCUBIN=lambda program: program["image"],
            destroyProgram=lambda program: None,
        )


def _elf(content: bytes) -> bytes:
    image = bytearray(64) + content
    image[:5] = b"\x7fELF\x02"
    struct.pack_into("<QQ", image, 0x20, 64, len(image))
    return bytes(image)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCompiler]:
    """The installed NVRTC, and an empty cache folder."""
    fake, cuda = FakeCompiler(), ModuleType("cupy.cuda")
    cuda.nvrtc = fake.module()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path / "cache"))
    functions._image.cache_clear()
    yield fake
    functions._image.cache_clear()


def _new_process() -> None:
    """What was compiled stays on disk only."""
    functions._image.cache_clear()


# --- B75: the `a` targets ------------------------------------------------------------------------------------


@pytest.mark.fault("B75")
@pytest.mark.parametrize(("capability", "target"), TARGETS.items(), ids=str)
def test_the_compiler_is_asked_for_the_devices_own_target(
    compiler: FakeCompiler, capability: tuple[int, int], target: str
) -> None:
    assert target.endswith("a") == (capability >= (9, 0))
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
import hashlib, json
from click.testing import CliRunner
from vtensors.cli import main
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


# --- B80, B81: the cache of compiled kernels -----------------------------------------------------------------


def _another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_source(SOURCE)
    other = attrs.evolve(found, text=found.text.replace("extern", "eXtern", 1))
    assert len(other.text) == len(found.text)
    monkeypatch.setattr(functions, "load_source", lambda name: other)


def _damage(cut: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (entry,) = folder.iterdir()
        stamp = entry.stat()
        entry.write_bytes(cut(entry.read_bytes()))
        os.utime(entry, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    return damage


@pytest.mark.fault("B80")
@pytest.mark.parametrize("change", ["nothing", "toolkit", "source", "options", "target", "library"])
def test_a_compiled_kernel_is_used_again_only_for_the_same_source_options_target_toolkit_and_library(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first = compiled_image(SOURCE, "sm_90a", {})
    _new_process()
    target, defines = "sm_90a", dict[str, int]()
    match change:
        case "toolkit":
            compiler.version = (12, 8)
        case "source":
            _another_source(monkeypatch)
        case "options":
            defines["VT_OUT_F16"] = 1
        case "target":
            target = "sm_100a"
        case "library":
            monkeypatch.setattr(functions, "own_version", lambda: "99.0")
    second = compiled_image(SOURCE, target, defines)
    assert len(compiler.compiled) == (1 if change == "nothing" else 2)
    assert (first == second) == (change in ("nothing", "library"))


@pytest.mark.fault("B80")
@pytest.mark.parametrize(
    "damage",
    [
        _damage(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        _damage(lambda data: data[:60]),
        _damage(lambda data: b""),
        lambda folder: (folder / "3fa4b2.tmp").write_bytes(b"half of a file"),
    ],
    ids=["a flipped bit", "cut short", "empty", "a file that another process left"],
)
def test_a_damaged_entry_is_made_anew_and_leftovers_of_a_reinstall_stop_nobody(
    compiler: FakeCompiler, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first = compiled_image(SOURCE, "sm_90a", {})
    damage(tmp_path / "cache" / "cubin")
    _new_process()
    assert compiled_image(SOURCE, "sm_90a", {}) == first
    _new_process()
    compiled = len(compiler.compiled)
    assert compiled_image(SOURCE, "sm_90a", {}) == first
    assert len(compiler.compiled) == compiled


@pytest.mark.fault("B81")
def test_other_spellings_of_the_cache_folder_and_of_the_toolkits_find_the_same_kernel(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "cache", tmp_path / "link", "cache", tmp_path / "link" / ".." / "link"):
        monkeypatch.setenv("VT_CACHE_DIR", str(folder))
        for home in ("/usr/local/cuda", "/usr/local/cuda-13.0", "/usr/local/cuda-13.0/"):
            monkeypatch.setenv("CUDA_HOME", home)
            compiled_image(SOURCE, "sm_90a", {})
            _new_process()
    assert len(compiler.compiled) == 1


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
        load_function(_elf(b""), "linear_x", "sm_120a")
    assert no_image in str(caught.value)
    assert "compiled for sm_120a" in str(caught.value)

    def probe(asked: object) -> None:
        load_function(_elf(b""), "linear_x", "sm_120a")

    kernels = [kernel("linear_nvfp4_native", cost=1.0, probe=probe), reference()]
    bound = bind_plan(plan_kernels(request(capability=(12, 1)), kernels), ["weight"])
    assert bound.segments[0].kernel.name == "linear_reference"
    reason = dict(bound.rejected)["linear_nvfp4_native"]
    assert no_image in reason
    assert "compiled for sm_120a" in reason


def test_the_fake_compiler_gives_images_that_differ_and_are_whole(compiler: FakeCompiler) -> None:
    images = {hashlib.sha256(compiled_image(SOURCE, target, {})).digest() for target in COMPILED}
    assert len(images) == len(COMPILED)
