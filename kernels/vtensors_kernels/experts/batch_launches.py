"""The two launches that take a batch of up to 32 tokens through their experts: gate_up, then outputs."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.compiling.functions import Wanted
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, may_depend
from vtensors_kernels.experts.batch_form import (
    BatchForm,
    BatchGrid,
    gate_up_form,
    gate_up_grid,
    is_batch,
    most_outputs_bytes,
    outputs_form,
    outputs_grid,
)
from vtensors_kernels.experts.compiled import batch_defines, batch_sources
from vtensors_kernels.experts.form import ExpertsTuning
from vtensors_kernels.experts.packed import PackedExperts

GATE_UP, OUTPUTS = "batch gate_up", "batch outputs"
_GATE_UP_ARGUMENTS, _OUTPUTS_ARGUMENTS = 12, 18
_Made = tuple[Launch, BatchGrid]


@attrs.define(kw_only=True)
class BatchLaunches:
    """Their forms for the experts of a layer, and the launches of each number of tokens, made once.

    target: of the device, which has so many multiprocessors. functions: of `wanted`, given before the first call.
    """

    packed: PackedExperts
    target: str
    multiprocessors: int
    tuning: ExpertsTuning
    functions: Mapping[str, DeviceFunction] = attrs.field(factory=dict)
    _forms: tuple[BatchForm, BatchForm] = attrs.field(init=False)
    _gate_up_grid: BatchGrid | None = attrs.field(init=False)
    _ready: dict[tuple[int, int], tuple[_Made, _Made] | None] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        packed, size, (up, out) = self.packed, self.packed.format.block_bytes, self.tuning.batch
        self._forms = (
            up or gate_up_form(packed.hidden, size, self.target),
            out or outputs_form(packed.width, size, self.target),
        )
        self._gate_up_grid = gate_up_grid(self._forms[0], size, self.multiprocessors, self.target)

    def wanted(self, f16: int) -> dict[str, Wanted]:
        """What is to be compiled; nothing where no batch is served."""
        if self._gate_up_grid is None or self._outputs_grid(1, 1) is None:
            return {}
        shared, found = (self._gate_up_grid.shared_bytes, most_outputs_bytes(self.target)), {}
        sources = batch_sources(self.packed.format)
        for kind, form, (source, name), size in zip(
            (GATE_UP, OUTPUTS), self._forms, sources, shared, strict=True
        ):
            defines = batch_defines(form, self.packed.format, f16)
            found[kind] = Wanted(source=source, name=name, defines=tuple(defines.items()), shared_bytes=size)
        return found

    def serve(self, m: int, top: int) -> bool:
        """Whether they are for m tokens of top experts each."""
        size = self.packed.format.block_bytes
        return is_batch(m, top, size, self.tuning.batch_pairs) and self._launches(m, top) is not None

    def run(
        self,
        stream: int,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        act: Tensor,
        beside: tuple[int, ...],
        stride: int,
        out: Tensor,
    ) -> None:
        """Makes both launches, of a batch that they serve.

        act: [pairs, F], written by the first. beside: addresses of gate, shared and residual, 0 for none. stride: of
        the gate. Otherwise as `GroupedExperts`.
        """
        (m, top), packed = chosen.shape, self.packed
        made = self._launches(m, top)
        if made is None:
            raise RequestError(
                "the experts' kernels for a batch do not serve it", seen=f"{m} tokens of {top} experts"
            )
        (first, up_grid), (second, out_grid) = made
        slots = top + packed.shared
        first.call(
            stream,
            packed.gate_up.blocks.data_ptr(),
            packed.gate_up.row_scale.data_ptr(),
            x.data_ptr(),
            chosen.data_ptr(),
            act.data_ptr(),
            m,
            top,
            packed.experts,
            int(packed.shared),
            2 * packed.width,
            packed.hidden,
            up_grid.stages,
        )
        second.call(
            stream,
            packed.down.blocks.data_ptr(),
            packed.down.row_scale.data_ptr(),
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
            out_grid.tiles,
            out_grid.stages,
        )

    def _launches(self, m: int, top: int) -> tuple[_Made, _Made] | None:
        if (m, top) not in self._ready:
            up, out = self._gate_up_grid, self._outputs_grid(m, top)
            made = None
            if up is not None and out is not None and self.functions:
                made = (
                    (self._made(GATE_UP, up, _GATE_UP_ARGUMENTS), up),
                    (self._made(OUTPUTS, out, _OUTPUTS_ARGUMENTS), out),
                )
            self._ready[m, top] = made
        return self._ready[m, top]

    def _made(self, kind: str, grid: BatchGrid, arguments: int) -> Launch:
        form = self._forms[kind == OUTPUTS]
        return made_launch(
            self.functions[kind], (grid.blocks, 1, 1), form.threads, arguments, grid.shared_bytes
        )

    def _outputs_grid(self, m: int, top: int) -> BatchGrid | None:
        packed = self.packed
        return outputs_grid(
            self._forms[1],
            packed.format.block_bytes,
            packed.hidden,
            m,
            top,
            top + packed.shared,
            self.multiprocessors,
            self.target,
        )


def made_launch(
    function: DeviceFunction, grid: tuple[int, int, int], threads: int, arguments: int, shared_bytes: int = 0
) -> Launch:
    """A launch that begins early where its function waits for what it reads."""
    return Launch(
        function=function,
        grid=grid,
        block=(threads, 1, 1),
        arguments=arguments,
        shared_bytes=shared_bytes,
        dependent=may_depend(function),
    )
