"""Runs the project's CUDA kernels on the CPU: the source compiled as C++, threads as fibers; finds hangs, overruns.

No speed, no order of floating-point contraction and no hardware rounding of matrix products is emulated; the maths, the
indices, who waits for whom and what is read where, are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vtensors_kernels.compiling.sources import Source, load_source

Argument = Tensor | int | float | bool | None
_HERE = Path(__file__).parent
_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-w",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-stack-protector",
    "-U_FORTIFY_SOURCE",
)
_TOKENS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|^[ \t]*\#(?:\\\n|[^\n])*|\basm\b|[{};]""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_NAMESPACE = re.compile(r'(?:\bnamespace\b[^(){};]*|\bextern\s+"C"\s*)$')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\s*\w+\s*\)\s*)?([\w ]+?)\s+(\w+)\[\];")
_ENTRY = """
}}  // namespace
extern "C" const char* run(const unsigned* grid, const unsigned* block, unsigned shared_bytes, unsigned long long seed,
                           const unsigned long long* slots, int count) {{
  if (count != emulation::parameters_of({function})) return "the kernel has another number of parameters";
  emulation::slots = slots;
  emulation::kernel = [] {{ emulation::call_kernel({function}); }};
  return emulation::run_grid(grid, block, shared_bytes, seed) ? nullptr : emulation::message;
}}
"""


class EmulationError(Exception):
    """A source that does not compile here, or a launch that hung, read outside its memory or broke a rule."""


def compiler() -> str | None:
    """The C++ compiler, g++ before c++; None without one."""
    return shutil.which("g++") or shutil.which("c++")


needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="the emulator needs g++ or c++, neither is installed"
)


def emulate(
    source: str | Source,
    function: str,
    defines: Mapping[str, int],
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Argument],
    *,
    shared_bytes: int = 0,
    arch: int = 900,
    seed: int = 0,
    guard: bool = True,
) -> None:
    """Launch `function` of the `.cu` file (or Source) once, to its end.

    grid, block: up to three numbers. args: one per parameter: CPU tensors (read and written in place), integers,
    floats (float32), None for a null pointer. arch: VT_ARCH, 900 or 800. seed: not 0 runs threads in orders drawn
    from it, which shows missing barriers. guard: tensors lie against a page that faults, so that what is touched
    past the end of a storage is an error. Errors: EmulationError.
    """
    library = _library(source if isinstance(source, Source) else load_source(source), function, defines, arch)
    guarded = {}
    slots = (ctypes.c_uint64 * max(1, len(args)))()
    for place, argument in enumerate(args):
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage()
            at = storage.data_ptr()
            if guard and at not in guarded and storage.nbytes():
                guarded[at] = (_Guarded(storage.nbytes()), storage)
                ctypes.memmove(guarded[at][0].address, at, storage.nbytes())
            start = guarded[at][0].address if at in guarded else at
            slots[place] = start + argument.data_ptr() - at
        elif isinstance(argument, float):
            slots[place] = int.from_bytes(struct.pack("<f", argument), "little")
        elif argument is not None:
            slots[place] = int(argument) & (1 << 64) - 1
    sizes = [(ctypes.c_uint * 3)(*three, *[1] * (3 - len(three))) for three in (grid, block)]
    problem = library.run(*sizes, shared_bytes, ctypes.c_uint64(seed), slots, len(args))
    for at, (copy, storage) in guarded.items():
        ctypes.memmove(at, copy.address, storage.nbytes())
        copy.free()
    if problem is not None:
        raise EmulationError(f"{function}: {problem.decode(errors='replace')}")


def at_the_end_of_memory(size: int) -> Tensor:
    """Bytes of 0xff, a multiple of 16, for launches that are given addresses: a page that faults follows them.

    They are there for as long as the process.
    """
    return torch.frombuffer((ctypes.c_char * size).from_address(_Guarded(size).address), dtype=torch.uint8)


def emulated_text(source: Source) -> tuple[str, tuple[str, ...]]:
    """The source without the functions that hold inline assembly, line for line, and the names of those."""
    text, pieces, names = source.text, [], []
    start = depth = copied = 0
    holds_asm = False
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token[0] == "/":
            continue
        if token.lstrip().startswith("#") or token == ";":
            if depth == 0:
                start = found.end()
        elif token == "asm":
            holds_asm = True
        elif token == "{":
            if depth == 0 and _NAMESPACE.search(text, start, found.start()):
                start = found.end()
                continue
            depth += 1
        elif token == "}" and depth:
            depth -= 1
            if depth == 0:
                if holds_asm:
                    names.append(_name_of(text[start : found.start()]))
                    pieces += [text[copied:start], "\n" * text.count("\n", start, found.end())]
                    copied = found.end()
                holds_asm, start = False, found.end()
    if depth:
        raise EmulationError(f"{source.name}: braces do not match (each branch of an #if must close its own)")
    return "".join([*pieces, text[copied:]]), tuple(names)


def _name_of(head: str) -> str:
    """Of the function whose head it is."""
    found = re.search(r"(\w+)\s*\(", re.sub(r"//[^\n]*|__\w+__\([^)]*\)", "", head))
    return found[1] if found else "?"


@lru_cache(maxsize=256)
def _built(text: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    command = compiler()
    if command is None:
        raise EmulationError("no C++ compiler: install g++")
    key = hashlib.sha256("\0".join([text, repr(defines), *_OPTIONS, command]).encode())
    for header in sorted(_HERE.glob("*.h")):
        key.update(header.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"vtensors-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key.hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file, built = Path(scratch) / "kernel.cc", Path(scratch) / "kernel.so"
            file.write_text(text)
            macros = [f"-D{name}={value}" for name, value in defines]
            done = subprocess.run(
                [command, *_OPTIONS, *macros, f"-I{_HERE}", str(file), "-o", str(built)],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise EmulationError("\n".join(done.stderr.splitlines()[:40]))
            built.rename(path)
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_char_p
    return library


def _library(source: Source, function: str, defines: Mapping[str, int], arch: int) -> ctypes.CDLL:
    text, _ = emulated_text(source)
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulation::dynamic);", text)
    text = re.sub(r'\bextern\s+"C"\s+(?=__global__)', "", text)
    start, end = (
        f'#include "ptx.h"\nnamespace {{\n#line 1 "{source.name}"\n',
        _ENTRY.format(function=function),
    )
    return _built(f"{start}{text}\n{end}", tuple(sorted({**defines, "VT_ARCH": arch}.items())))


class _Guarded:
    """Memory of some bytes that ends, but for padding to 16, where a page begins that faults; 0xff before it."""

    def __init__(self, size: int) -> None:
        page = os.sysconf("SC_PAGESIZE")
        padded = -(-size // 16) * 16
        room = -(-padded // page) * page
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc, self._room = libc, room + page
        self._base = libc.mmap(None, room + page, 3, 0x22, -1, 0)  # read and write, private and anonymous
        if self._base in (None, ctypes.c_void_p(-1).value):
            raise EmulationError(f"no memory for {size} bytes")
        ctypes.memset(self._base, 0xFF, room)
        libc.mprotect(self._base + room, page, 0)
        self.address = self._base + room - padded

    def free(self) -> None:
        """Gives the memory back."""
        self._libc.munmap(self._base, self._room)
