"""An NVRTC that compiles nothing, in the place of CuPy's. Import as `from fake_compiler import FakeCompiler`."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from vtensors_kernels.compiling import functions

ALL = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)


class NVRTCError(Exception):
    """What CuPy raises where a program does not compile."""


@attrs.define
class FakeCompiler:
    """NVRTC as CuPy shows it. log: of a program that does not compile. compiled: options of each that did."""

    version: tuple[int, int] = (13, 0)
    targets: tuple[int, ...] = ALL
    log: str = ""
    compiled: list[list[str]] = attrs.field(factory=list)

    def compile(self, program: dict[str, Any], options: list[str]) -> None:
        """The image of a program depends on version, text and options."""
        if self.log:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append(options)
        program["image"] = elf(repr((self.version, program["text"], options)).encode())

    def module(self) -> SimpleNamespace:
        """What `from cupy.cuda import nvrtc` gives."""
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


def elf(content: bytes) -> bytes:
    """The least that counts as a whole cubin, with that content."""
    image = bytearray(64) + content
    image[:5] = b"\x7fELF\x02"
    struct.pack_into("<QQ", image, 0x20, 64, len(image))
    return bytes(image)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeCompiler:
    """The fake as the installed NVRTC, with `folder` as the cache and nothing compiled in this process."""
    fake, cuda = FakeCompiler(), ModuleType("cupy.cuda")
    cuda.nvrtc = fake.module()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setenv("VT_CACHE_DIR", str(folder))
    new_process()
    return fake


def new_process() -> None:
    """Forget what was compiled here: it stays on disk only."""
    functions._image.cache_clear()
