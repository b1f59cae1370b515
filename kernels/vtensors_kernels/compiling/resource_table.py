"""The tables of docs/kernels.md and docs/kernel-forms.md: what compiled kernels use on each target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import attrs

from vtensors_kernels.compiling.architectures import COMPILED, state_of
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.machine_code import Disassembler, MachineCode, read_machine_code
from vtensors_kernels.compiling.nvrtc import Toolkit

_WORDS = """Made by {toolkit}: {count} compiled forms, a row each, with registers per thread on each target; a dash
where a form is not compiled. Shared memory of a block in bytes: static (from sm_90a on with the 1 KiB that the system
reserves) + the most that a launch asks for. Spills: loads from and stores to local memory in the machine code.
Instructions: `e2m1` and `e4m3` are conversions in hardware, `mma`, `wgmma` and `omma` tensor cores, `bulk_copy`
asynchronous copies by the copy engine. Where targets differ, those that do are named."""
_SUMMARY_WORDS = """Made by {toolkit}: {count} compiled forms, {images} images, a row per source and group of targets.
Registers per thread: fewest .. most. Shared memory: the most of a block in bytes, static (from sm_90a on with the 1 KiB
that the system reserves) + what a launch asks for. Spills: loads from and stores to local memory in the machine code,
of all images together. Instructions: those found, in every form unless told otherwise. The state is that of the
targets: not every form need have been launched on a target that is *run*."""


@attrs.frozen(kw_only=True)
class Compiled:
    """One form on one target, and what its machine code uses."""

    instantiation: Instantiation
    target: str
    code: MachineCode


def compile_all(
    instantiations: Sequence[Instantiation], toolkit: Toolkit, disassembler: Disassembler, *, threads: int
) -> list[Future[Compiled]]:
    """Every form on every target of its own, in order and done. NVRTC lets several threads compile at once.

    A result raises CompileError or DisassemblyError where that form failed.
    """

    def one(form: Instantiation, target: str) -> Compiled:
        codes = read_machine_code(form.compile(target, toolkit), disassembler)
        return Compiled(instantiation=form, target=target, code=codes[form.function])

    with ThreadPoolExecutor(threads) as pool:
        return [pool.submit(one, form, target) for form in instantiations for target in form.targets]


def resource_table(compiled: Sequence[Compiled], toolkit: Toolkit) -> str:
    """The table of all forms, in Markdown: a row per form, a column of registers per target."""
    rows: dict[str, dict[str, Compiled]] = {}
    for entry in compiled:
        rows.setdefault(entry.instantiation.label, {})[entry.target] = entry
    lines = [
        _WORDS.format(toolkit=toolkit.name, count=len(rows)),
        "",
        _line("kernel", *COMPILED, "shared memory", "spills", "instructions"),
        _line(*["---"] * (len(COMPILED) + 4)),
        _line("*state*", *map(state_of, COMPILED), "", "", ""),
    ]
    lines += [_line(*_cells(label, found)) for label, found in rows.items()]
    return "\n".join(lines)


def resource_summary(compiled: Sequence[Compiled], toolkit: Toolkit) -> str:
    """The same in short, in Markdown: a row for each source and group of targets that forms share and of one state."""
    groups: dict[tuple[str, tuple[str, ...]], list[Compiled]] = {}
    for entry in compiled:
        state = state_of(entry.target)
        alike = tuple(t for t in entry.instantiation.targets if state_of(t) == state)
        groups.setdefault((entry.instantiation.source, alike), []).append(entry)
    # Rows of one source stand together, in the order in which sources are first met.
    sources = list(dict.fromkeys(source for source, _ in groups))
    order = sorted(groups, key=lambda group: (sources.index(group[0]), COMPILED.index(group[1][0])))
    forms = {entry.instantiation.label for entry in compiled}
    lines = [
        _SUMMARY_WORDS.format(toolkit=toolkit.name, count=len(forms), images=len(compiled)),
        "",
        _line("source", "targets", "state", "forms", "registers", "shared memory", "spills", "instructions"),
        _line(*["---"] * 8),
    ]
    lines += [_line(*_summary_cells(*group, groups[group])) for group in order]
    return "\n".join(lines)


def _summary_cells(source: str, targets: Sequence[str], entries: Sequence[Compiled]) -> list[str]:
    registers = sorted({entry.code.registers for entry in entries})
    most = max(entries, key=lambda entry: entry.code.shared_bytes + entry.instantiation.shared_bytes)
    return [
        f"`{source}`",
        ", ".join(targets),
        state_of(targets[0]),
        str(len({entry.instantiation.label for entry in entries})),
        " .. ".join(map(str, registers[:1] + registers[1:][-1:])),
        _shared(most),
        str(sum(entry.code.spills for entry in entries)),
        "; ".join(_found(entries)) or "-",
    ]


def _found(entries: Sequence[Compiled]) -> list[str]:
    """Each feature that any of the machine code has; with its targets, and with its share, where that is not all."""
    told = []
    for name in dict.fromkeys(name for entry in entries for name in entry.code.features):
        having = [entry for entry in entries if name in entry.code.features]
        on = list(dict.fromkeys(entry.target for entry in having))
        there = [entry for entry in entries if entry.target in on]
        where = "" if len(there) == len(entries) else f" on {', '.join(on)}"
        share = "" if len(there) == len(having) else f" in {len(having)} of {len(there)} images"
        told.append(f"{name}{where}{share}")
    return told


def _cells(label: str, found: Mapping[str, Compiled]) -> list[str]:
    registers = [str(found[target].code.registers) if target in found else "-" for target in COMPILED]
    shared = {target: _shared(entry) for target, entry in found.items()}
    spills = {target: str(entry.code.spills) for target, entry in found.items()}
    features = dict.fromkeys(name for entry in found.values() for name in entry.code.features)
    having = {name: [t for t, entry in found.items() if name in entry.code.features] for name in features}
    told = [name if len(on) == len(found) else f"{name} on {', '.join(on)}" for name, on in having.items()]
    return [f"`{label}`", *registers, _by_target(shared), _by_target(spills), "; ".join(told) or "-"]


def _shared(entry: Compiled) -> str:
    static, dynamic = entry.code.shared_bytes, entry.instantiation.shared_bytes
    return f"{static} + {dynamic}" if dynamic else str(static)


def _by_target(values: Mapping[str, str]) -> str:
    """The value that most targets have, then the others with their targets."""
    groups: dict[str, list[str]] = {}
    for target, value in values.items():
        groups.setdefault(value, []).append(target)
    most, *others = sorted(groups, key=lambda value: -len(groups[value]))
    return "; ".join((most, *(f"{value} on {', '.join(groups[value])}" for value in others)))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
