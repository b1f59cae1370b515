"""NVRTC through CuPy: source text to a cubin (or PTX) for one target, with errors a person can read."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

import attrs

from vtensors.errors import VtensorsError
from vtensors_kernels.compiling.architectures import macro_of
from vtensors_kernels.compiling.known_bad import installed_build, known_bad
from vtensors_kernels.compiling.sources import Source

_NEWER = "install a newer nvidia-cuda-nvrtc (pip install -U vtensors[cuda13])"
_ERROR_LINE = re.compile(r"^.*\berror\b.*$", re.MULTILINE)


class CompileError(VtensorsError):
    """A kernel did not compile, or no compiler is installed."""


@attrs.frozen(kw_only=True)
class Toolkit:
    """The NVRTC in use. version: (major, minor). targets: the numbers it knows, such as 90 or 121.

    build: of the installed package of that version, None where there is none.
    """

    version: tuple[int, int]
    targets: tuple[int, ...]
    build: int | None = None

    @property
    def name(self) -> str:
        """For messages: `NVRTC 13.0`."""
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    @property
    def key(self) -> str:
        """For keys of caches: a patch release that mends what was miscompiled compiles anew."""
        return self.name if self.build is None else f"{self.name}.{self.build}"

    def doubt(self, target: str) -> str | None:
        """What is known against it for the target, in a line; None where nothing is."""
        return known_bad(self.version, target, self.build)

    def knows(self, target: str) -> bool:
        """Whether it compiles for the target."""
        return macro_of(target) // 10 in self.targets

    def refusal(self, target: str) -> str:
        """What to say of a target that it does not know."""
        return f"{self.name} does not know {target} (newest: sm_{max(self.targets)})"


def find_toolkit() -> Toolkit | str:
    """The installed NVRTC, or the reason why there is none. Needs no GPU and no nvcc."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as problem:
        return f"cupy is not installed ({problem}); install vtensors[cuda13] or vtensors[cuda12]"
    try:
        major, minor = nvrtc.getVersion()
        build = installed_build((major, minor))
        return Toolkit(version=(major, minor), targets=tuple(nvrtc.getSupportedArchs()), build=build)
    except Exception as problem:  # CuPy raises its own loader errors of several types
        return f"NVRTC cannot be loaded ({type(problem).__name__}: {str(problem).splitlines()[0]})"


def compiler_for(target: str) -> Toolkit | str:
    """The installed NVRTC if it compiles for the target, else why there is none that does."""
    toolkit = find_toolkit()
    if isinstance(toolkit, str) or toolkit.knows(target):
        return toolkit
    return f"{toolkit.refusal(target)}; {_NEWER}"


def options_of(target: str, defines: Mapping[str, int]) -> tuple[str, ...]:
    """Compiler options: target, standard, `-D` macros in order of name; `VT_ARCH` is the target's number."""
    macros = {**defines, "VT_ARCH": macro_of(target)}
    return (
        f"--gpu-architecture={target}",
        "-std=c++17",
        "-default-device",
        *(f"-D{name}={macros[name]}" for name in sorted(macros)),
    )


def compile_source(source: Source, target: str, defines: Mapping[str, int], toolkit: Toolkit) -> bytes:
    """A cubin for `sm_*`, PTX for `compute_*`.

    Errors: CompileError with the first error line, the options, the target and the toolkit; for a target that
    the installed NVRTC does not know, which version is needed.
    """
    from cupy.cuda import nvrtc

    options = options_of(target, defines)
    if not toolkit.knows(target):
        raise CompileError(
            toolkit.refusal(target),
            file=source.name,
            accepted="NVRTC 12.8 or newer for 100 and 120, 12.9 for 103 and 121, 13.0 for 110",
            fix=_NEWER,
        )
    program = nvrtc.createProgram(source.text, source.name, [], [])
    try:
        try:
            nvrtc.compileProgram(program, list(options))
        except nvrtc.NVRTCError as problem:
            log = nvrtc.getProgramLog(program)
            first = _ERROR_LINE.search(log)
            raise CompileError(
                (first[0] if first else str(problem)).strip(),
                file=source.name,
                seen=f"{toolkit.name}, {target}, options {' '.join(options)}",
            ) from problem
        if target.startswith("compute_"):
            text = nvrtc.getPTX(program)
            return text if isinstance(text, bytes) else text.encode()
        return whole_cubin(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def whole_cubin(image: bytes) -> bytes:
    """The cubin with its last byte: CuPy 14 cuts it, which loads but which no disassembler reads.

    Errors: CompileError for anything but a 64-bit ELF that is complete or short of one byte.
    """
    if len(image) < 64 or image[:5] != b"\x7fELF\x02":
        raise CompileError("NVRTC gave something that is not a cubin", seen=f"{len(image)} bytes")
    missing = elf_size(image) - len(image)
    if missing not in (0, 1):
        raise CompileError("NVRTC gave an incomplete cubin", seen=f"{len(image)} bytes, {missing} missing")
    return image + b"\0" * missing


def elf_size(image: bytes) -> int:
    """Bytes that a 64-bit ELF file spans: its headers' tables and sections (System V ABI, ELF-64)."""
    program_at: int
    section_at: int
    program_at, section_at = struct.unpack_from("<QQ", image, 0x20)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 0x36)
    ends: tuple[int, int] = (program_at + program_size * programs, section_at + section_size * sections)
    return max(ends)
