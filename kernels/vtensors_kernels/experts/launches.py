"""The grouped experts of a layer on a CUDA device: silu(gate) * up of every chosen expert, then the weighted downs.

    pairs (M * top)     launches
    1..40 (FP8: 64)     gate_up, down (where a token's activations fit a block, else as for 256)
    ..256, M <= 32      gate_up, outputs, both of a batch (where their rings fit, else as without them)
    ..256               gate_up, down (up to 96, where they fit) or down into float32 and finish
    more                group, gate_up, down into float32, finish, for every 2048 tokens (of up to 16 experts each)

A token's result is the same bits whatever other tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import output_for
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.launch import DeviceFunction, Launch
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.experts.arguments import checked_column, checked_inputs, checked_rows
from vtensors_kernels.experts.batch_launches import BatchLaunches, made_launch
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
    DownGrid,
    ExpertsTuning,
    LinearGrid,
    down_form,
    down_grid,
    form_for,
    group_bytes,
    linear_grid,
    tokens_at_a_time,
)
from vtensors_kernels.experts.packed import PackedExperts

_READY = 64
_LINEAR_ARGUMENTS, _DOWN_ARGUMENTS, _FINISH_ARGUMENTS, _GROUP_ARGUMENTS = 13, 17, 13, 6


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
        device = torch.cuda.get_device_properties(self.device)
        self._count, target = device.multi_processor_count, target_of((device.major, device.minor))
        self._batch = BatchLaunches(
            packed=packed, target=target, multiprocessors=self._count, tuning=self._tuning
        )
        widths, size = (packed.hidden, packed.width), packed.format.block_bytes
        self._forms = {
            many: tuple(given or form_for(k, size, many=many) for given, k in zip(tuned, widths, strict=True))
            for many, tuned in ((False, self._tuning.few), (True, self._tuning.many))
        }
        self._direct_form = self._tuning.direct or down_form(packed.width, size)
        self._functions = self._compiled(dtype_defines(dtype)["VT_F16"])
        self._ready: dict[tuple[str, int, int], tuple[Launch, LinearGrid]] = {}
        self._direct_ready: dict[tuple[int, int], tuple[Launch, DownGrid] | None] = {}
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
        one that is none makes the token NaN, and one that is there twice may. weights: [M, top] float32. gate: [M] or
        [M, 1] of the dtype, rows any distance apart, logits of the shared expert's weight, or None: 1. shared: [M, K]
        of the dtype, the shared expert's output where it is not among the packed ones. residual: [M, K] of the dtype.
        out: to write into, contiguous.
        """
        x, chosen, weights = checked_inputs(self.packed, self.dtype, x, chosen, weights)
        m = x.shape[0]
        out = output_for(x, (m, self.packed.hidden), self.dtype, out)
        if self.packed.shared and shared is not None:
            raise RequestError("the shared expert is among the packed ones; its output is not given")
        rest = (
            checked_column(self.packed, self.dtype, gate, m),
            checked_rows(self.packed, self.dtype, shared, m, "shared"),
            checked_rows(self.packed, self.dtype, residual, m, "residual"),
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
        beside = tuple(0 if t is None else t.data_ptr() for t in rest)
        stride = 0 if rest[0] is None else rest[0].stride(0)
        if self._batch.serve(m, top):
            self._batch.run(stream, x, chosen, weights, act, beside, stride, out)
            return
        self._linear("gate_up", stream, x, chosen, grouped, act)
        direct = self._direct(m, top)
        if direct is not None:
            down = packed.down
            direct[0].call(
                stream,
                down.blocks.data_ptr(),
                down.row_scale.data_ptr(),
                act.data_ptr(),
                chosen.data_ptr(),
                weights.data_ptr(),
                *beside,
                out.data_ptr(),
                stride,
                m,
                top,
                packed.experts,
                slots,
                packed.hidden,
                packed.width,
                direct[1].tiles,
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
            stride,
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
        grid = self._grid("down" if kind in ("down", "finish") else "gate_up", m, top)
        if kind in ("gate_up", "down"):
            function, threads = self._functions[kind, many], grid.form.threads
            return made_launch(function, grid.grid, threads, _LINEAR_ARGUMENTS, grid.shared_bytes), grid
        if kind == "finish":
            blocks = (-(-packed.hidden // (FINISH_COLUMNS * FINISH_THREADS)), m, 1)
            function = self._functions["finish", False]
            return made_launch(function, blocks, FINISH_THREADS, _FINISH_ARGUMENTS), grid
        function, shared = self._functions["group", True], group_bytes(packed.experts)
        return made_launch(function, (1, 1, 1), 32 * GROUP_WARPS, _GROUP_ARGUMENTS, shared), grid

    def _direct(self, m: int, top: int) -> tuple[Launch, DownGrid] | None:
        """The launch that makes m tokens' outputs from their activations; None where there is none."""
        if m * top > min(MOST_PAIRS, self._tuning.direct_pairs):
            return None
        if (m, top) not in self._direct_ready:
            grid, threads = self._down_grid(m, top), self._direct_form.threads
            made = None
            if grid is not None:
                function = self._functions["direct", False]
                made = made_launch(function, grid.grid, threads, _DOWN_ARGUMENTS, grid.shared_bytes), grid
            self._direct_ready[m, top] = made
        return self._direct_ready[m, top]

    def _down_grid(self, m: int, top: int) -> DownGrid | None:
        packed, tiles = self.packed, self._tuning.tiles[1]
        slots = top + packed.shared
        return down_grid(self._direct_form, packed.hidden, packed.width, m, slots, self._count, tiles=tiles)

    def _grid(self, kind: str, m: int, top: int) -> LinearGrid:
        index, many = int(kind == "down"), m * top > MOST_PAIRS
        form = self._forms[many][index]
        return linear_grid(
            form,
            self._rows(kind),
            m,
            top,
            self.packed.experts,
            self._count,
            many=many,
            shared=self.packed.shared,
            tiles=self._tiles(index, many=many),
            most=form.most_tiles_at_a_time(self._functions[kind, many].target),
        )

    def _tiles(self, index: int, *, many: bool) -> int | None:
        """Row tiles of a block that the tuning asks for; of many tokens where it gives their form as well."""
        return None if many and self._tuning.many[index] is None else self._tuning.tiles[index]

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
                    shared_bytes=max(
                        form.most_shared_bytes, form.shared_bytes(self._tiles(epilogue, many=many) or 0)
                    ),
                )
        defines = down_defines(self._direct_form, packed_format, f16)
        wanted["direct", False] = Wanted(source=down, name=direct, defines=tuple(defines.items()))
        wanted["finish", False] = Wanted(source=FINISH[0], name=FINISH[1], defines=(("VT_F16", f16),))
        # No more than is needed: not every device has what the most experts would take.
        own = group_bytes(self.packed.experts)
        wanted["group", True] = Wanted(source=GROUP[0], name=GROUP[1], shared_bytes=own)
        batch = self._batch.wanted(f16)
        found = compile_many((*wanted.values(), *batch.values()), self.device.index or 0)
        self._batch.functions = dict(zip(batch, found[len(wanted) :], strict=True))
        return dict(zip(wanted, found, strict=False))
