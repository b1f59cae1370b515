"""The grouped experts of a layer on a CUDA device: silu(gate) * up of every chosen expert, then the weighted downs.

    pairs (M * top)     launches
    1..96               gate_up, down
    ..256               gate_up, down into float32, finish
    more                group, gate_up, down into float32, finish, for every 2048 tokens (of up to 16 experts each)

A token's result is the same bits whatever other tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.launch import DeviceFunction, Launch
from vtensors_kernels.experts.compiled import (
    FINISH,
    FINISH_COLUMNS,
    FINISH_THREADS,
    GROUP,
    down_defines,
    linear_defines,
    sources_of,
)
from vtensors_kernels.experts.form import (
    GROUP_WARPS,
    MOST_EXPERTS,
    MOST_PAIRS,
    MOST_SLOTS,
    ExpertsTuning,
    LinearGrid,
    form_for,
    group_bytes,
    linear_grid,
    tokens_at_a_time,
)
from vtensors_kernels.experts.packed import PackedExperts
from vtensors_kernels.nvfp4.activations import dtype_defines, may_depend, output_for
from vtensors_kernels.nvfp4.packed import TILE_ROWS
from vtensors_kernels.nvfp4.repack import aligned

_READY = 64
_LINEAR_ARGUMENTS, _DOWN_ARGUMENTS, _FINISH_ARGUMENTS, _GROUP_ARGUMENTS = 13, 15, 12, 6


class GroupedExperts:
    """call(x, chosen, weights, gate=None, shared=None, residual=None, out=None) -> [M, K]: the op `experts`.

    packed: on a CUDA device. dtype: bfloat16 or float16. Errors: RequestError for arguments that do not fit;
    CompileError, LaunchError.
    """

    def __init__(
        self, packed: PackedExperts, dtype: torch.dtype, tuning: ExpertsTuning | None = None
    ) -> None:
        self.packed, self.dtype, self.device = packed, dtype, packed.gate_up.blocks.device
        if self.device.type != "cuda" or packed.experts > MOST_EXPERTS:
            raise RequestError(
                "these experts are not served",
                seen=f"{packed.experts} experts on {self.device}",
                accepted=f"up to {MOST_EXPERTS} on a CUDA device",
            )
        self._tuning = tuning or ExpertsTuning()
        self._count = torch.cuda.get_device_properties(self.device).multi_processor_count
        widths, size = (packed.hidden, packed.width), packed.format.block_bytes
        self._forms = {
            many: tuple(given or form_for(k, size, many=many) for given, k in zip(tuned, widths, strict=True))
            for many, tuned in ((False, self._tuning.few), (True, self._tuning.many))
        }
        self._functions = self._compiled(dtype_defines(dtype)["VT_F16"])
        self._ready: dict[tuple[str, int, int], tuple[Launch, LinearGrid]] = {}
        # The kernels read weights without waiting for what was launched before, so they must be there for good.
        torch.cuda.current_stream(self.device).synchronize()

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate: Tensor | None = None,
        shared: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[M, K] of the dtype, rounded once.

        x: [M, K] of the dtype. chosen: [M, top] int32 (int64 is converted), experts of each token, every one different;
        one that is none makes the token NaN. weights: [M, top] float32. gate: [M] or [M, 1] of the dtype, logits of
        the shared expert's weight, or None: 1. shared: [M, K] of the dtype, the shared expert's output where it is not
        among the packed ones. residual: [M, K] of the dtype. out: to write into, contiguous.
        """
        x, chosen, weights = self._checked(x, chosen, weights)
        m = x.shape[0]
        out = output_for(x, (m, self.packed.hidden), self.dtype, out)
        if self.packed.shared and shared is not None:
            raise RequestError("the shared expert is among the packed ones; its output is not given")
        rest = (
            self._beside(gate, m, 1, "gate"),
            self._beside(shared, m, self.packed.hidden, "shared"),
            self._beside(residual, m, self.packed.hidden, "residual"),
        )
        step = tokens_at_a_time(m, chosen.shape[1])
        for first in range(0, m, max(step, 1)):
            part = slice(first, first + step)
            self._run(
                x[part],
                chosen[part],
                weights[part],
                tuple(None if t is None else t[part] for t in rest),
                out[part],
            )
        return out

    def _run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, rest: tuple[Tensor | None, ...], out: Tensor
    ) -> None:
        packed, (m, top) = self.packed, chosen.shape
        pairs, slots = m * top, top + packed.shared
        grouped, many = 0, pairs > MOST_PAIRS
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if many:
            launch, grid = self._launch("group", m, top)
            scratch = x.new_empty(4 + 4 * grid.bound + pairs, dtype=torch.int32)
            grouped = scratch.data_ptr()
            tokens = self._forms[True][0].tokens
            launch.call(stream, chosen.data_ptr(), grouped, pairs, packed.experts, tokens, grid.bound)
        act = x.new_empty(m * slots, packed.width)
        self._linear("gate_up", stream, x, chosen, grouped, act)
        beside = tuple(0 if t is None else t.data_ptr() for t in rest)
        if slots <= MOST_SLOTS and pairs <= self._tuning.direct_pairs and not many:
            launch, _ = self._launch("direct", m, top)
            down = packed.down
            launch.call(
                stream,
                down.blocks.data_ptr(),
                down.row_scale.data_ptr(),
                act.data_ptr(),
                chosen.data_ptr(),
                weights.data_ptr(),
                *beside,
                out.data_ptr(),
                m,
                top,
                packed.experts,
                slots,
                packed.hidden,
                packed.width,
            )
            return
        y = x.new_empty(m * slots, packed.hidden, dtype=torch.float32)
        self._linear("down", stream, act, chosen, grouped, y)
        launch, _ = self._launch("finish", m, top)
        launch.call(
            stream,
            y.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            *beside,
            out.data_ptr(),
            m,
            top,
            packed.experts,
            slots,
            packed.hidden,
        )

    def _linear(self, kind: str, stream: int, x: Tensor, chosen: Tensor, grouped: int, out: Tensor) -> None:
        (m, top), packed = chosen.shape, self.packed
        matrix = packed.gate_up if kind == "gate_up" else packed.down
        launch, grid = self._launch(kind, m, top)
        launch.call(
            stream,
            matrix.blocks.data_ptr(),
            matrix.row_scale.data_ptr(),
            x.data_ptr(),
            chosen.data_ptr(),
            grouped,
            out.data_ptr(),
            m,
            top,
            packed.experts,
            self._rows(kind),
            matrix.shape[1],
            grid.bound,
            grid.tiles,
        )

    def _rows(self, kind: str) -> int:
        return 2 * self.packed.width if kind == "gate_up" else self.packed.hidden

    def _launch(self, kind: str, m: int, top: int) -> tuple[Launch, LinearGrid]:
        """The launch of a kernel for m tokens; those of few are kept."""
        key = kind, m, top
        found = self._ready.get(key)
        if found is None:
            found = self._made(kind, m, top)
            if m <= _READY:
                self._ready[key] = found
        return found

    def _made(self, kind: str, m: int, top: int) -> tuple[Launch, LinearGrid]:
        packed, many = self.packed, m * top > MOST_PAIRS
        grid = self._grid("gate_up" if kind == "group" else kind, m, top)
        if kind in ("gate_up", "down"):
            function, threads = self._functions[kind, many], grid.form.threads
            return _made(function, grid.grid, threads, _LINEAR_ARGUMENTS, grid.shared_bytes), grid
        if kind == "direct":
            threads, blocks = self._forms[False][1].threads, (packed.hidden // TILE_ROWS, m, 1)
            return _made(self._functions["direct", False], blocks, threads, _DOWN_ARGUMENTS), grid
        if kind == "finish":
            blocks = (-(-packed.hidden // (FINISH_COLUMNS * FINISH_THREADS)), m, 1)
            return _made(self._functions["finish", False], blocks, FINISH_THREADS, _FINISH_ARGUMENTS), grid
        function, shared = self._functions["group", True], group_bytes(packed.experts)
        return _made(function, (1, 1, 1), 32 * GROUP_WARPS, _GROUP_ARGUMENTS, shared), grid

    def _grid(self, kind: str, m: int, top: int) -> LinearGrid:
        index, many = int(kind != "gate_up"), m * top > MOST_PAIRS
        return linear_grid(
            self._forms[many][index],
            self._rows(kind),
            m,
            top,
            self.packed.experts,
            self._count,
            many=many,
            shared=self.packed.shared,
            tiles=self._tuning.tiles[index],
        )

    def _compiled(self, f16: int) -> dict[tuple[str, bool], DeviceFunction]:
        packed_format = self.packed.format
        (linear, function), (down, direct) = sources_of(packed_format)
        wanted: dict[tuple[str, bool], Wanted] = {}
        for many, forms in self._forms.items():
            for epilogue, (kind, form) in enumerate(zip(("gate_up", "down"), forms, strict=True)):
                wanted[kind, many] = Wanted(
                    source=linear,
                    name=function,
                    defines=tuple(linear_defines(form, packed_format, f16, epilogue).items()),
                    shared_bytes=form.shared_bytes(form.most_tiles),
                )
        defines = down_defines(self._forms[False][1], packed_format, f16)
        wanted["direct", False] = Wanted(source=down, name=direct, defines=tuple(defines.items()))
        wanted["finish", False] = Wanted(source=FINISH[0], name=FINISH[1], defines=(("VT_F16", f16),))
        # No more than is needed: not every device has what the most experts would take.
        own = group_bytes(self.packed.experts)
        wanted["group", True] = Wanted(source=GROUP[0], name=GROUP[1], shared_bytes=own)
        found = compile_many(tuple(wanted.values()), self.device.index or 0)
        return dict(zip(wanted, found, strict=True))

    def _checked(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, device = self.packed.hidden, self.device
        if x.dim() != 2 or x.shape[1] != k or x.dtype != self.dtype or x.device != device:
            raise RequestError(
                "the input does not fit the experts",
                seen=f"{x.dtype} {list(x.shape)} on {x.device}",
                accepted=f"{self.dtype} [M, {k}] on {device}",
            )
        shape = x.shape[0], chosen.shape[-1]
        fits = chosen.shape == shape and weights.shape == shape and 1 <= shape[1] <= self.packed.experts
        kinds = chosen.dtype in (torch.int32, torch.int64) and weights.dtype == torch.float32
        if not fits or not kinds or chosen.device != device or weights.device != device:
            raise RequestError(
                "the choice of experts does not fit",
                seen=f"{chosen.dtype} {list(chosen.shape)} on {chosen.device}, "
                f"{weights.dtype} {list(weights.shape)} on {weights.device}",
                accepted=f"int32 or int64, and float32, [{x.shape[0]}, top] on {device}, "
                f"top 1..{self.packed.experts}",
            )
        return aligned(x, 16), aligned(chosen.to(torch.int32), 4), aligned(weights, 4)

    def _beside(self, tensor: Tensor | None, m: int, columns: int, what: str) -> Tensor | None:
        """The tensor as [M, columns] contiguous, or None. Raises RequestError where it does not fit."""
        if tensor is None:
            return None
        if tensor.dtype != self.dtype or tensor.device != self.device or tensor.numel() != m * columns:
            raise RequestError(
                f"the {what} does not fit",
                seen=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                accepted=f"{self.dtype} [{m}, {columns}] on {self.device}",
            )
        return aligned(tensor, 8 if columns > 1 else 2).reshape(m, columns)


def _made(
    function: DeviceFunction, grid: tuple[int, int, int], threads: int, arguments: int, shared_bytes: int = 0
) -> Launch:
    return Launch(
        function=function,
        grid=grid,
        block=(threads, 1, 1),
        arguments=arguments,
        shared_bytes=shared_bytes,
        dependent=may_depend(function),
    )
