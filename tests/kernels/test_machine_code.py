"""The machine code of every compiled form of every kernel: no spills where it is hot, the instructions it expects."""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import attrs
import pytest

import vtensors_kernels
from vtensors.errors import RequestError
from vtensors_kernels.compiling.architectures import COMPILED, RUN, SHARED_KIB, macro_of
from vtensors_kernels.compiling.instantiations import (
    FEATURES,
    LAUNCHERS,
    Instantiation,
    all_instantiations,
)
from vtensors_kernels.compiling.machine_code import (
    OPCODES,
    Disassembler,
    DisassemblyError,
    MachineCode,
    find_disassembler,
    parse_listing,
    read_machine_code,
)
from vtensors_kernels.compiling.nvrtc import Toolkit, compile_source, find_toolkit
from vtensors_kernels.compiling.resource_table import (
    Compiled,
    compile_all,
    resource_summary,
    resource_table,
)
from vtensors_kernels.compiling.sources import Source, source_names

ROOT = Path(__file__).parents[2]
PAGES = ("kernels.md", "kernel-forms.md")
FORMS = all_instantiations()
KEYS = [(form.label, target) for form in FORMS for target in form.targets]
PAIRS = [pytest.param(form, target, id=f"{form.label} {target}") for form in FORMS for target in form.targets]
Codes = dict[tuple[str, str], Future[Compiled]]


@pytest.fixture(scope="session")
def toolkit() -> Toolkit:
    found = find_toolkit()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def disassembler() -> Disassembler:
    found = find_disassembler()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="session")
def codes(toolkit: Toolkit, disassembler: Disassembler) -> Codes:
    """Every form on every target of its own, compiled and disassembled once for all tests."""
    futures = compile_all(FORMS, toolkit, disassembler, threads=os.cpu_count() or 1)
    return dict(zip(KEYS, futures, strict=True))


@pytest.mark.parametrize(("form", "target"), PAIRS)
def test_a_hot_kernel_spills_nothing(codes: Codes, form: Instantiation, target: str) -> None:
    code = codes[form.label, target].result().code
    assert code.registers > 0
    if form.hot:
        assert (code.spills, code.stack_bytes) == (0, 0)


@pytest.mark.parametrize(("form", "target"), PAIRS)
def test_the_instructions_that_a_kernel_expects_are_there(
    codes: Codes, form: Instantiation, target: str
) -> None:
    missing = set(form.features(target)) - set(codes[form.label, target].result().code.features)
    assert missing == set()


@pytest.mark.parametrize(("form", "target"), PAIRS)
def test_no_kernel_asks_for_more_shared_memory_than_the_device_has(
    codes: Codes, form: Instantiation, target: str
) -> None:
    static = codes[form.label, target].result().code.shared_bytes
    # From sm_90 on the compiler counts 1 KiB that the system takes beside what a block may have.
    reserved = 1024 if macro_of(target) >= 900 else 0
    assert max(0, static - reserved) + form.shared_bytes <= SHARED_KIB[target] << 10


@pytest.mark.parametrize("name", PAGES)
def test_the_table_in_the_documentation_is_what_the_machine_code_says(
    codes: Codes, toolkit: Toolkit, name: str
) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    made_by = re.search(r"Made by (NVRTC \d+\.\d+)", page)
    if made_by and made_by[1] != toolkit.name:
        pytest.skip(f"the table was made by {made_by[1]}, this is {toolkit.name}")
    wanted = _script().wanted_pages([code.result() for code in codes.values()], toolkit)
    assert set(wanted) == set(PAGES)
    assert wanted[name] == page, "run make kernel-docs"


def test_a_page_without_markers_is_refused() -> None:
    script = _script()
    with pytest.raises(ValueError, match="end of compiled"):
        script.updated(f"# Kernels\n{script.BEGIN}\n| a |\n", "| b |")


@pytest.mark.parametrize("name", PAGES)
def test_the_table_was_made_by_the_compiler_that_continuous_integration_installs(name: str) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^nvidia-cuda-nvrtc==(\d+\.\d+)", pins, re.MULTILINE)
    assert pinned
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert f"Made by NVRTC {pinned[1]}:" in page


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_kernels", ROOT / "docs" / "update_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_launcher_that_declares_forms_is_asked_for_them() -> None:
    package = Path(vtensors_kernels.__file__).parent
    declared = {
        ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
        if re.search(r"^INSTANTIATIONS\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert declared == set(LAUNCHERS)


def test_every_source_has_a_form_for_every_target() -> None:
    covered: dict[str, set[str]] = {}
    for form in FORMS:
        covered.setdefault(form.source, set()).update(form.targets)
    assert set(covered) == set(source_names())
    for name in source_names():
        folder = name.partition("/")[0]
        if folder == "common":
            assert covered[name] == set(COMPILED), name


def test_no_form_is_declared_twice() -> None:
    assert len(KEYS) == len(set(KEYS))


def test_an_unknown_feature_or_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="bulk_copy"):
        Instantiation(source="common/x.cu", function="x", expects=("bulk_copies",))
    with pytest.raises(RequestError, match="sm_90a"):
        Instantiation(source="common/x.cu", function="x", targets=("sm_90",))
    assert set(FEATURES) == set(OPCODES)
    assert set(RUN) <= set(COMPILED) <= set(SHARED_KIB)


def test_a_feature_is_expected_only_where_the_hardware_has_it() -> None:
    form = Instantiation(
        source="common/x.cu", function="x", defines={"VT_M": 8, "VT_A": 1}, expects=("e2m1", "mma")
    )
    assert form.label == "x A=1 M=8"
    assert form.features("sm_90a") == ("mma",)
    assert form.features("sm_121a") == ("e2m1", "mma")


LISTING = """
Resource usage:
 Common:
  GLOBAL:4 CONSTANT[4]:8
 Function first:
  REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:928 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function second:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:928 TEXTURE:0 SURFACE:0 SAMPLER:0
\tcode for sm_121a
\t\tFunction : second
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                  /* 0x0000df00ff017b82 */
\t\tFunction : first
        /*0000*/              @!P0 LDL.64 R2, [R1] ;                        /* 0x0000df00ff017b82 */
                                                                            /* 0x000fe20000000800 */
        /*0010*/                   STL [R1+0x4], R2 ;                       /* 0x0000df00ff017b82 */
        /*0020*/                   F2FP.F16.E2M1.UNPACK_B R4, R5 ;          /* 0x0000df00ff017b82 */
        /*0030*/             @!UP0 UBLKCP.S.G [UR4], [UR6], UR8 ;           /* 0x0000df00ff017b82 */
        /*0040*/                   HMMA.16816.F32.BF16 R4, R5, R6, R4 ;     /* 0x0000df00ff017b82 */
"""


def test_a_listing_gives_registers_memory_spills_and_features_per_function() -> None:
    codes = parse_listing(LISTING)
    first = codes["first"]
    assert (first.registers, first.stack_bytes, first.shared_bytes, first.spills) == (40, 16, 1024, 2)
    assert first.features == ("e2m1", "mma", "bulk_copy")
    assert (codes["second"].spills, codes["second"].features) == (0, ())


def test_a_listing_without_code_is_not_taken_for_a_kernel_without_spills() -> None:
    with pytest.raises(DisassemblyError, match="first"):
        parse_listing(LISTING.partition("\tcode for")[0])
    with pytest.raises(DisassemblyError):
        parse_listing("")


def _compiled(target: str, registers: int, **opcodes: int) -> Compiled:
    form = Instantiation(source="common/x.cu", function="x", defines={"VT_M": 8}, shared_bytes=4096)
    code = MachineCode(function="x", registers=registers, shared_bytes=0, stack_bytes=0, opcodes=opcodes)
    return Compiled(instantiation=form, target=target, code=code)


def test_the_table_has_a_row_per_form_and_names_the_targets_that_differ() -> None:
    toolkit = Toolkit(version=(13, 5), targets=(90,))
    entries = [_compiled("sm_80", 40), _compiled("sm_90a", 42), _compiled("sm_121a", 41, **{"LDL.64": 3})]
    heads, _, states, row = resource_table(entries, toolkit).splitlines()[-4:]
    cells = dict(zip(heads.split(" | "), row.split(" | "), strict=True))
    assert (cells["| kernel"], cells["shared memory"]) == ("| `x M=8`", "0 + 4096")
    assert (cells["sm_80"], cells["sm_86"], cells["sm_90a"], cells["sm_121a"]) == ("40", "-", "42", "41")
    assert cells["spills"] == "0; 3 on sm_121a"
    assert dict(zip(heads.split(" | "), states.split(" | "), strict=True))["sm_90a"] == "run"


def test_the_summary_has_a_row_per_source_and_group_of_targets_of_one_state() -> None:
    toolkit = Toolkit(version=(13, 5), targets=(90,))
    entries = [
        _compiled("sm_80", 40, **{"HMMA.16816.F32": 2}),
        _compiled("sm_90a", 42),
        _compiled("sm_120a", 44, **{"HMMA.16816.F32": 2, "F2FP.F16.E2M1.UNPACK_B": 1}),
        _compiled("sm_121a", 41, **{"LDL.64": 3, "STL": 1, "F2FP.F16.E2M1.UNPACK_B": 1}),
    ]
    text = resource_summary(entries, toolkit)
    assert text.startswith("Made by NVRTC 13.5: 1 compiled forms, 4 images")
    others = ", ".join(target for target in COMPILED if target not in RUN)
    assert text.splitlines()[-2:] == [
        f"| `common/x.cu` | {others} | compiled, not run | 1 | 40 .. 44 | 0 + 4096 | 4 "
        "| mma on sm_80, sm_120a; e2m1 on sm_120a, sm_121a |",
        "| `common/x.cu` | sm_90a | run | 1 | 42 | 0 + 4096 | 0 | - |",
    ]


def test_the_summary_tells_how_many_images_have_an_instruction_that_not_every_form_has() -> None:
    with_it, without = _compiled("sm_90a", 40, **{"HMMA.16816.F32": 1}), _compiled("sm_90a", 40)
    other = attrs.evolve(without.instantiation, defines={"VT_M": 16})
    entries = [with_it, attrs.evolve(without, instantiation=other)]
    row = resource_summary(entries, Toolkit(version=(13, 5), targets=(90,))).splitlines()[-1]
    assert row == "| `common/x.cu` | sm_90a | run | 2 | 40 | 0 + 4096 | 0 | mma in 1 of 2 images |"


def test_a_missing_program_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "files", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_disassembler()
    assert isinstance(found, str)
    assert "nvidia-cuda-cuobjdump" in found


SPILLING = """
extern "C" __global__ void spilling(const int* in, int* out, int n) {
  int kept[64];
  for (int i = 0; i < n; ++i) kept[in[i] & 63] = i;
  out[0] = kept[n & 63];
#if VT_ARCH >= 1000
  unsigned pair;
  asm("{ .reg .b8 b; cvt.u8.u32 b, %1; cvt.rn.f16x2.e2m1x2 %0, b; }" : "=r"(pair) : "r"(in[8]));
  out[1] = pair;
#endif
}
"""


@pytest.mark.parametrize(("target", "has_e2m1"), [("sm_90a", False), ("sm_121a", True)])
def test_spills_and_conversions_of_a_real_image_are_seen(
    toolkit: Toolkit, disassembler: Disassembler, target: str, has_e2m1: bool
) -> None:
    image = compile_source(Source(name="common/spilling.cu", text=SPILLING), target, {}, toolkit)
    code = read_machine_code(image, disassembler)["spilling"]
    assert code.spills > 0
    assert code.stack_bytes >= 256
    assert ("e2m1" in code.features) == has_e2m1


def test_what_is_no_image_is_refused(disassembler: Disassembler) -> None:
    with pytest.raises(DisassemblyError):
        read_machine_code(b"not a cubin" * 20, disassembler)
