"""What the kernels of grouped experts are compiled in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from vtensors_kernels.compiling.architectures import COMPILED
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.experts.batch_form import (
    BatchForm,
    gate_up_form,
    gate_up_grid,
    most_outputs_bytes,
    outputs_form,
)
from vtensors_kernels.experts.form import (
    MOST_DOWN_BYTES,
    ExpertsForm,
    down_form,
    form_for,
    group_bytes,
    targets_by_most_experts,
)
from vtensors_kernels.fp8.packed import Scales
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.packed_matrix import PackedFormat

GATE_UP, DOWN = 0, 1
FINISH, GROUP = ("common/experts_finish.cu", "experts_finish"), ("common/experts_group.cu", "experts_group")
FINISH_THREADS, FINISH_COLUMNS = 128, 4


def sources_of(packed_format: PackedFormat) -> tuple[tuple[str, str], tuple[str, str]]:
    """(source, function) of the linear and of the direct down projection of a format."""
    kind = "nvfp4" if packed_format == FORMAT else "fp8"
    return (
        (f"common/experts_linear_{kind}.cu", f"experts_linear_{kind}"),
        (f"common/experts_down_{kind}.cu", f"experts_down_{kind}"),
    )


def batch_sources(packed_format: PackedFormat) -> tuple[tuple[str, str], tuple[str, str]]:
    """(source, function) of the two kernels of a batch, gate_up and outputs."""
    kind = "nvfp4" if packed_format == FORMAT else "fp8"
    return (
        (f"common/experts_gate_up_{kind}.cu", f"experts_gate_up_{kind}"),
        (f"common/experts_outputs_{kind}.cu", f"experts_outputs_{kind}"),
    )


def batch_defines(form: BatchForm, packed_format: PackedFormat, f16: int) -> dict[str, int]:
    """The macros of `experts_gate_up_*` and `experts_outputs_*`."""
    return {**form.defines, **dict(packed_format.defines), "VT_F16": f16}


def linear_defines(form: ExpertsForm, packed_format: PackedFormat, f16: int, epilogue: int) -> dict[str, int]:
    """The macros of `experts_linear_*`."""
    return {**form.defines, **dict(packed_format.defines), "VT_F16": f16, "VT_EPILOGUE": epilogue}


def down_defines(form: ExpertsForm, packed_format: PackedFormat, f16: int) -> dict[str, int]:
    """The macros of `experts_down_*`."""
    return {**form.defines, **dict(packed_format.defines), "VT_F16": f16}


def _instantiations() -> Iterator[Instantiation]:
    """Long and short rows in both 16-bit formats; of tails and of scales within blocks what a mixture asks for."""
    for packed_format in (FORMAT, *(scales.format for scales in Scales)):
        plain = packed_format in (FORMAT, Scales.ROWS.format)
        for f16, k, many, epilogue in product((0, 1), (2048, 512), (False, True), (GATE_UP, DOWN)):
            usual = epilogue == (DOWN if k == 512 else GATE_UP)
            if plain or (usual and not f16):
                yield _linear(packed_format, f16, k, epilogue, many=many)
        for f16, k in product((0, 1), (2048, 512)):
            if plain or (k == 512 and not f16):
                yield _down(packed_format, f16, k)
    for many in (False, True):
        yield _linear(FORMAT, 0, 2000, GATE_UP, many=many)
        yield _linear(FORMAT, 0, 400, DOWN, many=many)
    yield _down(FORMAT, 0, 400)


def _linear(packed_format: PackedFormat, f16: int, k: int, epilogue: int, *, many: bool) -> Instantiation:
    form, (source, function) = form_for(k, packed_format.block_bytes, many=many), sources_of(packed_format)[0]
    return Instantiation(
        source=source,
        function=function,
        defines=linear_defines(form, packed_format, f16, epilogue),
        hot=True,
        expects=("mma",),
        shared_bytes=form.most_shared_bytes,
    )


def _down(packed_format: PackedFormat, f16: int, k: int) -> Instantiation:
    form, (source, function) = down_form(k, packed_format.block_bytes), sources_of(packed_format)[1]
    defines = down_defines(form, packed_format, f16)
    return Instantiation(
        source=source,
        function=function,
        defines=defines,
        hot=True,
        expects=("mma",),
        shared_bytes=MOST_DOWN_BYTES,
    )


def _batch_instantiations() -> Iterator[Instantiation]:
    """As `_instantiations`: short rows in both kernels, the usual ones of each in all formats, tails."""
    for packed_format in (FORMAT, *(scales.format for scales in Scales)):
        plain = packed_format in (FORMAT, Scales.ROWS.format)
        for f16, k in product((0, 1), (2048, 512)):
            if plain or not f16:
                yield from _batch(packed_format, f16, k, (GATE_UP,) if k == 2048 else (DOWN,))
    yield from _batch(FORMAT, 0, 2000, (GATE_UP,))
    yield from _batch(FORMAT, 0, 400, (DOWN,))
    # Long rows: a loop over their segments.
    yield from _batch(FORMAT, 0, 5120, (GATE_UP,))
    yield from _batch(FORMAT, 0, 1536, (DOWN,))


def _batch(packed_format: PackedFormat, f16: int, k: int, kinds: tuple[int, ...]) -> Iterator[Instantiation]:
    """One for every form and shared memory that targets have."""
    size, sources = packed_format.block_bytes, batch_sources(packed_format)
    for kind in kinds:
        found: dict[tuple[BatchForm, int], tuple[str, ...]] = {}
        for target in COMPILED:
            if kind == GATE_UP:
                form = gate_up_form(k, size, target)
                grid = gate_up_grid(form, size, 1, target)
                one = form, 0 if grid is None else grid.shared_bytes
            else:
                one = outputs_form(k, size, target), most_outputs_bytes(target)
            found[one] = (*found.get(one, ()), target)
        for (form, shared_bytes), targets in found.items():
            yield Instantiation(
                source=sources[kind][0],
                function=sources[kind][1],
                defines=batch_defines(form, packed_format, f16),
                targets=targets,
                hot=True,
                expects=("mma", "bulk_copy"),
                shared_bytes=shared_bytes,
            )


INSTANTIATIONS = (
    *_instantiations(),
    *_batch_instantiations(),
    *(
        Instantiation(source=FINISH[0], function=FINISH[1], defines={"VT_F16": f16}, hot=True)
        for f16 in (0, 1)
    ),
    *(
        Instantiation(source=GROUP[0], function=GROUP[1], targets=targets, shared_bytes=group_bytes(most))
        for most, targets in targets_by_most_experts().items()
    ),
)
