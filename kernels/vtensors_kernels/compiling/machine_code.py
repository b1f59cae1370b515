"""What a cubin's machine code uses: registers, shared memory, spills and instructions, told by cuobjdump."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import attrs

from vtensors.errors import VtensorsError

# The programs and the distributions that bring them; cuobjdump calls nvdisasm.
PROGRAMS = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}
# Feature -> what the opcode of an instruction that has it looks like, as nvdisasm spells it.
OPCODES = {
    "e2m1": re.compile(r"F2FP\.(\S*\.)?E2M1\b"),
    "e4m3": re.compile(r"F2FP\.(\S*\.)?E4M3\b"),
    "mma": re.compile(r"HMMA\."),
    "wgmma": re.compile(r"HGMMA\."),
    "bulk_copy": re.compile(r"UBLKCP\b"),
    "omma": re.compile(r"OMMA\."),
}
_FUNCTION = re.compile(r"^\s*Function : (\S+)$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_RESOURCES = re.compile(r"^ *Function (\S+):\n *(REG:.*)$", re.MULTILINE)
_RESOURCE = re.compile(r"(\w+)(?:\[\d+\])?:(\d+)")


class DisassemblyError(VtensorsError):
    """An image that cuobjdump does not read, or a disassembler that is not installed."""


@attrs.frozen(kw_only=True)
class Disassembler:
    """Where the two programs lie."""

    cuobjdump: Path
    nvdisasm: Path


@attrs.frozen(kw_only=True)
class MachineCode:
    """One function of a cubin.

    registers: per thread. shared_bytes: static shared memory of a block. stack_bytes: per thread.
    opcodes: opcode with its modifiers -> how often it stands in the code.
    """

    function: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    opcodes: Mapping[str, int]

    @property
    def spills(self) -> int:
        """Loads from and stores to local memory, where spilled registers go."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.partition(".")[0] in ("LDL", "STL"))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of OPCODES whose instructions stand in the code, in their order."""
        return tuple(
            name for name, pattern in OPCODES.items() if any(pattern.match(opcode) for opcode in self.opcodes)
        )


def find_disassembler() -> Disassembler | str:
    """The installed programs, or what is missing. Needs neither GPU nor CUDA toolkit."""
    found = {}
    for program, distribution in PROGRAMS.items():
        path = _installed(program, distribution)
        if path is None:
            return f"{program} is not installed; install {distribution} (extra disassembly)"
        found[program] = path
    return Disassembler(**found)


def read_machine_code(image: bytes, disassembler: Disassembler) -> dict[str, MachineCode]:
    """Every function of a cubin by name.

    Errors: DisassemblyError with what cuobjdump says.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(image)
        done = subprocess.run(
            [str(disassembler.cuobjdump), "-res-usage", "-sass", str(path)],
            capture_output=True,
            text=True,
            check=False,
            env={
                "NVDISASM_PATH": str(disassembler.nvdisasm.parent),
                "PATH": str(disassembler.nvdisasm.parent),
            },
        )
    if done.returncode:
        raise DisassemblyError("cuobjdump does not read the image", seen=(done.stderr or done.stdout).strip())
    return parse_listing(done.stdout)


def parse_listing(text: str) -> dict[str, MachineCode]:
    """The functions of what `cuobjdump -res-usage -sass` prints.

    Errors: DisassemblyError for a function that has resources and no code, or the reverse.
    """
    resources = {name: dict(_RESOURCE.findall(line)) for name, line in _RESOURCES.findall(text)}
    opcodes = _opcodes(text)
    if resources.keys() != opcodes.keys() or not resources:
        raise DisassemblyError(
            "cuobjdump's listing is not understood",
            seen=f"resources of {sorted(resources)}, code of {sorted(opcodes)}",
        )
    return {
        name: MachineCode(
            function=name,
            registers=int(found["REG"]),
            shared_bytes=int(found["SHARED"]),
            stack_bytes=int(found["STACK"]),
            opcodes=opcodes[name],
        )
        for name, found in resources.items()
    }


def _opcodes(text: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if function := _FUNCTION.match(line):
            current = found.setdefault(function[1], Counter())
        elif instruction := _INSTRUCTION.match(line):
            current[instruction[1]] += 1
    return found


def _installed(program: str, distribution: str) -> Path | None:
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == program:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    elsewhere = shutil.which(program)
    return Path(elsewhere) if elsewhere else None
