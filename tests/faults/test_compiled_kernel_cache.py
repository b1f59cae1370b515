"""The cache of compiled kernels: used again only for the same code, and always for it; damage and moves are no harm."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from fake_compiler import FakeCompiler, install, new_process

from vtensors_kernels.compiling import functions
from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.compiling.functions import compiled_image
from vtensors_kernels.compiling.sources import load_source

SOURCE = "common/widen_fp8.cu"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCompiler]:
    """The installed NVRTC, and an empty cache folder."""
    yield install(monkeypatch, tmp_path / "cache")
    new_process()


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
    new_process()
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
    new_process()
    assert compiled_image(SOURCE, "sm_90a", {}) == first
    new_process()
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
            new_process()
    assert len(compiler.compiled) == 1


def test_the_fake_compiler_gives_images_that_differ_and_are_whole(compiler: FakeCompiler) -> None:
    images = {hashlib.sha256(compiled_image(SOURCE, target, {})).digest() for target in COMPILED}
    assert len(images) == len(COMPILED)
