"""A gated delta net between its projections, on a CUDA device: a token of many sequences, or many of one.

Reference: `reference/gated_delta_net.py`. float32 inside, rounded to the model dtype where the reference rounds:
behind the convolution's silu, and the result. The states live in slots that the caller owns and that need no clearing:

    history: [S, W, C] model dtype, a ring: entry p % W holds the raw input of position p.
    memory: [S, HV, DK, DV] float32.

Inputs before position 0 and the memory at position 0 count as zero whatever the slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import output_for
from vtensors_kernels.compiling.functions import Wanted, compile_many
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.gated_delta_net import GatedDeltaWeights
from vtensors_kernels.steps.gated_delta_form import (
    PREFILL_COLUMNS,
    PREFILL_SPAN,
    FormLaunch,
    GatedDeltaForm,
)

# The real shape and the one of tiny models; head counts are no macros.
INSTANTIATIONS = tuple(
    one
    for f16 in (False, True)
    for size in (128, 32)
    for one in GatedDeltaForm(
        key_heads=1, value_heads=1, key_dim=size, value_dim=size, taps=4, f16=f16
    ).instantiations
)
# Tokens of a prompt that go through the kernels at a time: what they hand on fits a large L2 cache.
PIECE = 1024
_FACTORS = 8  # floats for each token and value head
_READY = 256  # launches kept
Arguments = tuple[Tensor | int | float, ...]


class GatedDeltaNetKernel:
    """One layer's weights bound to the kernels."""

    def __init__(
        self,
        *,
        key_heads: int,
        value_heads: int,
        conv: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        dtype: torch.dtype,
        prefill_columns: tuple[int, int] = (PREFILL_COLUMNS, PREFILL_SPAN),
    ) -> None:
        """conv: [C, W]; decay: [HV], -exp(A_log); dt_bias: [HV]; norm: [DV]; float32 on one CUDA device.

        dtype: of the activations, bfloat16 or float16. DK follows from C. prefill_columns: of a lane and of a
        block, as `GatedDeltaForm` has them; a block of more than divide DV is one of 16. Errors: RequestError for
        shapes or dtypes that do not fit or have no kernel; CompileError, LaunchError.
        """
        kept = [one.contiguous() for one in (conv, decay, dt_bias, norm)]
        sizes = [one.dim() for one in kept]
        if sizes != [2, 1, 1, 1] or any(
            one.dtype != torch.float32 or one.device != conv.device for one in kept
        ):
            raise RequestError(
                "the weights of a gated delta net do not fit",
                seen=", ".join(f"{one.dtype} {list(one.shape)} on {one.device}" for one in kept),
                accepted="float32 [C, W], [HV], [HV], [DV] on one device",
            )
        keys = conv.shape[0] - value_heads * norm.shape[0]
        if decay.shape[0] != value_heads or dt_bias.shape[0] != value_heads or keys % (2 * key_heads):
            raise RequestError(
                "the weights of a gated delta net do not fit its heads",
                seen=f"{conv.shape[0]} channels, decay {list(decay.shape)}, dt_bias {list(dt_bias.shape)}, "
                f"norm {list(norm.shape)}; {key_heads} key and {value_heads} value heads",
                accepted="C = 2 * HK * DK + HV * DV, decay and dt_bias [HV]",
            )
        self.form = GatedDeltaForm(
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=keys // (2 * key_heads),
            value_dim=norm.shape[0],
            taps=conv.shape[1],
            f16=bool(dtype_defines(dtype)["VT_F16"]),
            columns=prefill_columns[0],
            span=prefill_columns[1] if norm.shape[0] % prefill_columns[1] == 0 else 16,
        )
        self.weights = GatedDeltaWeights(
            key_heads=key_heads, conv=kept[0], decay=kept[1], dt_bias=kept[2], norm=kept[3], eps=eps
        )
        self.dtype, self.device = dtype, conv.device
        form = self.form
        self.launch = DeviceLaunches(
            (form.decode(1), form.prepare(1), form.prefill(), form.norm(1)), self.device
        )

    def decode(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        history: Tensor,
        memory: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """[B, HV * DV] in the model dtype: one token of each row's sequence; moves history and memory on.

        qkv: [B, C] (q, k, v); z: [B, HV * DV]; b, a: [B, HV]; model dtype, rows any distance apart. slots, positions:
        [B] int32. Rows with one slot (padding) leave anything in it. Errors: RequestError for what does not fit.
        """
        rows = qkv.shape[0]
        self._check(qkv, z, b, a, history, memory)
        self._check_integers(slots, positions, rows)
        out = output_for(qkv, (rows, self.form.value_width), self.dtype, out)
        if rows:
            own = self.weights
            inputs = (qkv, z, b, a, own.conv, own.decay, own.dt_bias, own.norm, history, memory)
            strides = (qkv.stride(0), z.stride(0), b.stride(0), a.stride(0))
            numbers = (self.form.key_heads, memory.shape[0], own.eps)
            arguments = (*inputs, slots, positions, out, *strides, *numbers)
            self.launch(self.form.decode(rows), arguments)
        return out

    def prefill(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        history: Tensor,
        memory: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """[T, HV * DV]: T tokens of the sequence in slot slots[0], the first of them at positions[0].

        Arguments as in `decode`, with slots and positions [1]. Outputs and states are bit for bit what T calls of
        `decode` give. Errors: RequestError for what does not fit.
        """
        tokens, form = qkv.shape[0], self.form
        self._check(qkv, z, b, a, history, memory)
        self._check_integers(slots, positions, 1)
        out = output_for(qkv, (tokens, form.value_width), self.dtype, out)
        scratch = self.scratch(min(tokens, PIECE))
        for start in range(0, tokens, PIECE):
            here = slice(start, min(start + PIECE, tokens))
            inputs = (qkv[here], z[here], b[here], a[here])
            for launch in self.piece(
                inputs, (history, memory), (slots, positions), out[here], scratch, start
            ):
                self.launch(*launch)
        return out

    def scratch(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the launches of a piece of so many tokens hand on."""
        form, floats = self.form, self.weights.conv
        return (
            floats.new_empty(tokens, form.channels, dtype=self.dtype),
            floats.new_empty(tokens, form.value_heads, _FACTORS),
            floats.new_empty(tokens, form.value_heads, form.value_dim),
        )

    def piece(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],
        states: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor],
        out: Tensor,
        scratch: tuple[Tensor, Tensor, Tensor],
        start: int,
    ) -> tuple[tuple[FormLaunch, Arguments], ...]:
        """The launches for tokens start .. of a prompt, `inputs` their rows, with their arguments."""
        (qkv, z, b, a), (history, memory), (mixed, factors, outputs) = inputs, states, scratch
        form, own, tokens = self.form, self.weights, qkv.shape[0]
        numbers = (tokens, start, form.key_heads, form.value_heads)
        strides = (qkv.stride(0), b.stride(0), a.stride(0))
        weights = (own.conv, own.decay, own.dt_bias)
        gates = (outputs, z, own.norm, out, z.stride(0), tokens, form.value_heads, own.eps)
        return (
            (
                form.prepare(tokens),
                (qkv, b, a, *weights, history, *place, mixed, factors, *strides, *numbers),
            ),
            (form.prefill(), (mixed, factors, memory, *place, outputs, *numbers)),
            (form.norm(tokens), gates),
        )

    def _check(self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, history: Tensor, memory: Tensor) -> None:
        form, rows = self.form, qkv.shape[0]
        for name, x, width in (
            ("qkv", qkv, form.channels),
            ("z", z, form.value_width),
            ("b", b, form.value_heads),
            ("a", a, form.value_heads),
        ):
            fits = x.shape == (rows, width) and x.dtype == self.dtype and x.device == self.device
            if not fits or (width > 1 and x.stride(1) != 1):
                raise RequestError(
                    f"{name} does not fit the gated delta net",
                    seen=_told(x),
                    accepted=f"{self.dtype} [{rows}, {width}] on {self.device}, columns side by side",
                )
        slots = history.shape[0]
        for name, x, shape, dtype in (
            ("history", history, (slots, form.taps, form.channels), self.dtype),
            ("memory", memory, (slots, form.value_heads, form.key_dim, form.value_dim), torch.float32),
        ):
            fits = x.shape == shape and x.dtype == dtype and x.device == self.device and x.is_contiguous()
            if not fits or x.data_ptr() % 16:
                raise RequestError(
                    f"{name} does not fit the gated delta net",
                    seen=_told(x),
                    accepted=f"{dtype} {list(shape)} on {self.device}, contiguous, aligned to 16 bytes",
                )

    def _check_integers(self, slots: Tensor, positions: Tensor, rows: int) -> None:
        for name, x in (("slots", slots), ("positions", positions)):
            fits = x.shape == (rows,) and x.dtype == torch.int32 and x.device == self.device
            if not fits or (rows > 1 and x.stride(0) != 1):
                raise RequestError(
                    f"{name} do not fit the gated delta net",
                    seen=_told(x),
                    accepted=f"torch.int32 [{rows}] on {self.device}, side by side",
                )


class DeviceLaunches:
    """Compiled functions of a form on a CUDA device, and their launches by grid."""

    def __init__(self, forms: Sequence[FormLaunch], device: torch.device) -> None:
        """forms: one for each function. Errors: RequestError off a CUDA device; CompileError, LaunchError."""
        if device.type != "cuda":
            raise RequestError("a gated delta net kernel runs on a CUDA device", seen=str(device))
        wanted = [Wanted(source=one.source, name=one.function, defines=one.defines) for one in forms]
        found = compile_many(wanted, device.index or 0)
        self._functions = {one.function: function for one, function in zip(forms, found, strict=True)}
        self._device = device
        self._ready = lru_cache(maxsize=_READY)(self._make)
        # Launches read the weights before they wait for what runs in front of them.
        torch.cuda.synchronize(device)

    def __call__(self, form: FormLaunch, arguments: Arguments) -> None:
        """Launch on the current stream. arguments: tensors go as addresses, floats as float32."""
        launch = self._ready(form.function, form.grid, form.block, len(arguments))
        stream = current_stream(self._device)
        launch.call(stream, *(_slot(value) for value in arguments))

    def _make(
        self, name: str, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: int
    ) -> Launch:
        function = self._functions[name]
        return Launch(
            function=function, grid=grid, block=block, arguments=arguments, dependent=may_depend(function)
        )


def _slot(value: Tensor | int | float) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return float_bits(value) if isinstance(value, float) else value


def _told(x: Tensor) -> str:
    return (
        f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}, address % 16 = {x.data_ptr() % 16}"
    )
