"""What `linear_nvfp4_stream` is compiled in, and launches of it or `linear_fp8_stream` for one packed matrix."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.compiling.architectures import COMPILED, RUN, target_of
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import (
    DeviceFunction,
    Launch,
    current_stream,
    float_bits,
    max_active_clusters,
    may_depend,
)
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.nvfp4.stream_form import (
    Rule,
    StreamForm,
    choose_form,
    defines_of,
    rules_of,
    serves,
    shared_limit,
)
from vtensors_kernels.packed_matrix import PackedFormat, PackedMatrix

SOURCE, FUNCTION = FORMAT.stream
EPILOGUES = {"linear": 0, "linear_add": 1, "linear_swiglu": 2, "linear_argmax": 3}
# What happens to x first: nothing, the weight's pre-scale, an RMSNorm; or nothing, and each token's sums are scaled.
PROLOGUES = {"plain": 0, "pre_scale": 1, "norm": 2, "token_scale": 3}
_ARGUMENTS = 15


def stream_defines(form: StreamForm | Rule, f16: int, epilogue: int = 0, prologue: int = 0) -> dict[str, int]:
    """The macros of one compiled form and variant."""
    return {**defines_of(form), "VT_F16": f16, "VT_EPILOGUE": epilogue, "VT_PROLOGUE": prologue}


def instantiations(packed_format: PackedFormat, *, few: bool = False) -> Iterator[Instantiation]:
    """Every form in both 16-bit formats, and with the longest variant; every other variant in one form.

    few: plain forms alone, and where none of them was run those in bfloat16.
    """
    alike: dict[tuple[tuple[Rule, int], ...], list[str]] = {}
    for target in COMPILED:
        limited = tuple((rule, shared_limit(target, rule.blocks_per_sm)) for rule in rules_of(target))
        alike.setdefault(limited, []).append(target)
    source, function = packed_format.stream
    for limited, targets in alike.items():
        run = set(targets) <= set(RUN)
        for f16, (place, (rule, limit)) in product((0, 1), enumerate(limited)):
            for epilogue, prologue in _variants(f16, first=place == 0, run=run, few=few):
                yield Instantiation(
                    source=source,
                    function=function,
                    defines={**stream_defines(rule, f16, epilogue, prologue), **dict(packed_format.defines)},
                    targets=tuple(targets),
                    hot=True,
                    expects=("mma", "bulk_copy"),
                    shared_bytes=limit,
                )


def _variants(f16: int, *, first: bool, run: bool, few: bool) -> list[tuple[int, int]]:
    """(epilogue, prologue) to compile of a form; all that ops ask for of the first one where it is run."""
    longest = EPILOGUES["linear_swiglu"], PROLOGUES["norm"]
    if few:
        return [(0, 0)] if run or not f16 else []
    if not run:
        return [(0, 0)] if f16 else [(0, 0), longest]
    if not first:
        return [(0, 0), longest]
    # No op has a norm before a residual or an argmax.
    return [
        (epilogue, prologue)
        for name, epilogue in EPILOGUES.items()
        for prologue in (PROLOGUES["plain"], PROLOGUES["pre_scale"], PROLOGUES["norm"])
        if prologue != PROLOGUES["norm"] or name in ("linear", "linear_swiglu")
    ]


INSTANTIATIONS = tuple(instantiations(FORMAT))


class StreamLaunches:
    """One packed matrix and its launches by number of tokens, made at first use; functions are compiled at once.

    rows: the N whose forms are taken, the matrix's own where it is None. clusters: of every grid, for tests.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        dtype: torch.dtype,
        variant: tuple[int, int],
        *,
        rows: int | None = None,
        clusters: int | None = None,
    ) -> None:
        n, k = packed.shape
        device = packed.blocks.device
        self.packed, self.dtype, self.device, self._clusters = packed, dtype, device, clusters
        _require(packed, variant)
        index = device.index or 0
        target = target_of(torch.cuda.get_device_capability(device))
        block_bytes = packed.format.block_bytes
        self.most = serves(k, target, block_bytes)
        if not self.most:
            raise RequestError("a row of x does not fit into shared memory", seen=f"K = {k} on {target}")
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self.forms = tuple(
            choose_form(rows or n, k, m, count, target, block_bytes) for m in range(1, self.most + 1)
        )
        self._functions = _compiled(
            self.forms, packed.format, dtype_defines(dtype)["VT_F16"], variant, target, index
        )
        self._launches: list[Launch | None] = [None] * self.most
        # Those of the weight; x, out, residual and keys come with each call.
        self._blocks, self._row_scale = packed.blocks.data_ptr(), packed.row_scale.data_ptr()
        self._bias = 0 if packed.bias is None else packed.bias.data_ptr()
        self._pre_scale = None if packed.pre_scale is None else aligned(packed.pre_scale.float(), 16)
        self._gain = 0 if self._pre_scale is None else self._pre_scale.data_ptr()
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(device).synchronize()

    def checked(self, x: Tensor) -> Tensor:
        """x as the kernel reads it, copied only where it is strided or not at a multiple of 16 bytes.

        Raises RequestError unless it is [M, K] of the dtype on the device.
        """
        k = self.packed.shape[1]
        if x.dim() != 2 or x.shape[1] != k or x.dtype != self.dtype or x.device != self.device:
            raise RequestError(
                "the input does not fit the weight",
                seen=f"{x.dtype} {list(x.shape)} on {x.device}",
                accepted=f"{self.dtype} [M, {k}] on {self.device}",
            )
        return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else aligned(x, 16)

    def chunks(self, m: int) -> Iterator[tuple[int, int]]:
        """(first token, tokens) of each launch for m tokens: one wherever the device has room for them."""
        return ((first, min(self.most, m - first)) for first in range(0, m, self.most))

    def launch_for(self, m: int) -> Launch:
        """The launch for m tokens."""
        launch = self._launches[m - 1]
        if launch is None:
            launch = self._launches[m - 1] = self._made(m)
        return launch

    def keys(self, m: int) -> int:
        """Keys per token that the argmax variant writes for m tokens."""
        return self.launch_for(m).grid[0] * self.forms[m - 1].reducers

    def run(
        self, m: int, x: int, out: int, residual: int, keys: int, gain: int = 0, eps: float = 0.0
    ) -> None:
        """One launch for m tokens on torch's current stream; x, out, residual, keys, gain are addresses or 0."""
        launch = self._launches[m - 1] or self.launch_for(m)
        scale = float_bits(eps) if eps else 0
        launch.call(current_stream(self.device), x, out, residual, gain or self._gain, keys, scale)

    def _constants(self, m: int) -> dict[int, int]:
        """The parameters of the kernel that are the same in every launch for m tokens."""
        (n, k), form = self.packed.shape, self.forms[m - 1]
        rest = (m, n, k, form.stages, form.stage_blocks, form.slots)
        weight = {0: self._blocks, 3: self._row_scale, 4: self._bias}
        return {**weight, **dict(enumerate(rest, _ARGUMENTS - len(rest)))}

    def _made(self, m: int) -> Launch:
        form = self.forms[m - 1]
        function = self._functions[tuple(form.defines.values())]
        clusters = form.grid // form.cluster
        if self._clusters is not None:
            clusters = self._clusters
        elif form.cluster > 2:
            with torch.cuda.device(self.device):
                clusters = max_active_clusters(function, form.cluster, form.threads, form.shared_bytes)
        return Launch(
            function=function,
            grid=(form.fitted(self.packed.shape[0], clusters).grid, 1, 1),
            block=(form.threads, 1, 1),
            arguments=_ARGUMENTS,
            constants=self._constants(m),
            shared_bytes=form.shared_bytes,
            dependent=may_depend(function),
        )


def _require(packed: PackedMatrix, variant: tuple[int, int]) -> None:
    paired = variant[0] == EPILOGUES["linear_swiglu"]
    if packed.paired != paired:
        raise RequestError(
            "the matrix is packed for another op",
            seen="paired rows" if packed.paired else "stacked rows",
            accepted="paired rows for linear_swiglu, stacked rows for all else",
        )
    if packed.blocks.device.type != "cuda" or packed.shape[1] % 16:
        raise RequestError(
            "this kernel cannot serve the weight",
            seen=f"{packed.shape} on {packed.blocks.device}",
            accepted="K a multiple of 16, on a CUDA device",
        )


def _compiled(
    forms: tuple[StreamForm, ...],
    packed_format: PackedFormat,
    f16: int,
    variant: tuple[int, int],
    target: str,
    index: int,
) -> dict[tuple[int, ...], DeviceFunction]:
    """Form's macros -> function, compiled in threads; each may be launched with all the shared memory there is."""
    kinds = {tuple(form.defines.values()): form for form in forms}
    wanted = [
        Wanted(
            source=packed_format.stream[0],
            name=packed_format.stream[1],
            defines=(*stream_defines(form, f16, *variant).items(), *packed_format.defines),
            shared_bytes=shared_limit(target, 1),
        )
        for form in kinds.values()
    ]
    return dict(zip(kinds, compile_many(wanted, index), strict=True))
