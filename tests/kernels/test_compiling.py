"""From CUDA source to a cubin without a GPU: inlining, options, errors, the cache.

`test_machine_code.py` compiles every form of every kernel for every target.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from vtensors.errors import RequestError
from vtensors.switches import Switches
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, macro_of, target_of
from vtensors_kernels.compiling.cubin_cache import CubinCache, cache_key, default_cache_folder
from vtensors_kernels.compiling.instantiations import Instantiation, all_instantiations
from vtensors_kernels.compiling.nvrtc import (
    CompileError,
    Toolkit,
    compile_source,
    elf_size,
    find_toolkit,
    options_of,
    whole_cubin,
)
from vtensors_kernels.compiling.sources import Source, load_source, source_names
from vtensors_plugins.switches import vtensors_switches

# The first form of each source that is for every target.
COMMON = {form.source: form for form in reversed(all_instantiations()) if form.source.startswith("common/")}


@pytest.fixture(scope="module")
def toolkit() -> Toolkit:
    found = find_toolkit()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a"), ((11, 0), "sm_110a"), ((12, 1), "sm_121a")],
)
def test_a_known_device_gets_its_exact_target(capability: tuple[int, int], target: str) -> None:
    assert target_of(capability) == target


def test_a_newer_device_gets_portable_code_and_an_older_one_is_refused() -> None:
    assert target_of((13, 0)) == PORTABLE
    with pytest.raises(RequestError, match=r"7\.5"):
        target_of((7, 5))
    assert macro_of("sm_121a") == 1210


def test_local_includes_are_inlined_once() -> None:
    for name in source_names():
        text = load_source(name).text
        assert '#include "' not in text
        assert "#pragma once" not in text


def test_a_missing_source_names_who_includes_it() -> None:
    with pytest.raises(RequestError, match="no such CUDA source"):
        load_source("common/absent.cu")


@pytest.mark.parametrize("form", COMMON.values(), ids=lambda form: form.label)
def test_every_common_kernel_compiles_to_portable_code(toolkit: Toolkit, form: Instantiation) -> None:
    assert b".target sm_80" in form.compile(PORTABLE, toolkit)


@pytest.mark.parametrize("target", COMPILED)
def test_an_image_for_each_target_is_a_whole_elf_file(toolkit: Toolkit, target: str) -> None:
    image = compile_source(load_source("common/widen_fp8.cu"), target, {}, toolkit)
    assert elf_size(image) == len(image)


def test_a_compile_error_shows_the_line_the_options_and_the_toolkit(toolkit: Toolkit) -> None:
    source = Source(name="common/broken.cu", text="__global__ void k() {\n  undefined_name;\n}\n")
    with pytest.raises(CompileError) as caught:
        compile_source(source, "sm_90a", {"VT_X": 1}, toolkit)
    text = str(caught.value)
    assert "common/broken.cu(2)" in text
    assert "undefined_name" in text
    assert "--gpu-architecture=sm_90a" in text
    assert "-DVT_X=1" in text
    assert toolkit.name in text


def test_a_target_that_the_toolkit_does_not_know_says_which_version_does() -> None:
    old = Toolkit(version=(12, 4), targets=(80, 86, 89, 90))
    pytest.importorskip("cupy")
    with pytest.raises(CompileError, match=r"NVRTC 12\.4 does not know sm_121a"):
        compile_source(load_source(source_names()[0]), "sm_121a", {}, old)


def _elf(sections_at: int, sections: int) -> bytes:
    image = bytearray(sections_at + 64 * sections)
    image[:5] = b"\x7fELF\x02"
    struct.pack_into("<QQ", image, 0x20, 64, sections_at)
    struct.pack_into("<HHHH", image, 0x36, 56, 0, 64, sections)
    return bytes(image)


def test_the_byte_that_cupy_cuts_is_put_back_and_a_whole_cubin_is_left_alone() -> None:
    image = _elf(256, 3)
    assert whole_cubin(image) == image
    assert whole_cubin(image[:-1]) == image
    with pytest.raises(CompileError, match="incomplete"):
        whole_cubin(image[:-2])
    with pytest.raises(CompileError, match="not a cubin"):
        whole_cubin(b"PTX" * 40)


KEY = cache_key("text", options_of("sm_90a", {}), "NVRTC 13.0", "0.1.0")


@pytest.mark.parametrize(
    "other",
    [
        cache_key("texts", options_of("sm_90a", {}), "NVRTC 13.0", "0.1.0"),
        cache_key("text", options_of("sm_89", {}), "NVRTC 13.0", "0.1.0"),
        cache_key("text", options_of("sm_90a", {"M": 1}), "NVRTC 13.0", "0.1.0"),
        cache_key("text", options_of("sm_90a", {}), "NVRTC 13.1", "0.1.0"),
        cache_key("text", options_of("sm_90a", {}), "NVRTC 13.0", "0.2.0"),
    ],
)
@pytest.mark.fault("B80")
def test_anything_that_changes_the_code_changes_the_key(other: str) -> None:
    assert other != KEY


def test_an_image_is_made_once_and_a_damaged_entry_again(tmp_path: Path) -> None:
    cache, made = CubinCache(folder=tmp_path / "deep"), []

    def make() -> bytes:
        made.append(1)
        return b"image"

    assert cache.get(KEY, make) == (b"image", False)
    assert cache.get(KEY, make) == (b"image", True)
    (entry,) = (tmp_path / "deep").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] + b"X")
    assert cache.get(KEY, make) == (b"image", False)
    assert len(made) == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert CubinCache(folder=tmp_path / "file").get(KEY, lambda: b"image") == (b"image", False)


def test_processes_that_store_the_same_key_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from vtensors_kernels.compiling.cubin_cache import CubinCache\n"
        "for _ in range(50): CubinCache(folder=Path(sys.argv[1]))._store(Path(sys.argv[1]) / 'k.cubin', b'x' * 9999)"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["k.cubin"]
    assert CubinCache(folder=tmp_path).get("k", lambda: b"")[1]


def test_the_cache_folder_follows_the_environment() -> None:
    assert default_cache_folder({"VT_CACHE_DIR": "a/b"}) == Path("a/b")
    assert default_cache_folder({"XDG_CACHE_HOME": "c"}) == Path("c/vtensors")


def test_the_cache_folder_is_the_one_that_the_switch_means() -> None:
    for text in ("~/kernels", " a/b "):
        environment = {"VT_CACHE_DIR": text}
        switches = Switches.read(vtensors_switches(), environment)
        assert default_cache_folder(environment) == switches.path("VT_CACHE_DIR")
    assert default_cache_folder({"VT_CACHE_DIR": " ", "XDG_CACHE_HOME": "c"}) == Path("c/vtensors")


def test_without_cupy_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    found = find_toolkit()
    assert isinstance(found, str)
    assert "cuda13" in found
