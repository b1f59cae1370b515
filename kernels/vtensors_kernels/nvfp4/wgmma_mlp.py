"""h + down(silu(gate(norm(h))) * up(norm(h))) of 17 to 64 tokens on sm_90a: gate and up write their result as down
reads it, so that no launch lays it out between the two products.

The bits of the two linears one after the other: of `WgmmaSegments`, but of `WgmmaLinear` for more than 32 tokens of
NVFP4.

Both stagings are in the workspace, down's behind that of gate and up, whose blocks still read theirs while others
write. No launch writes over what an earlier one has yet to read: every launch of these linears waits for the end of
the one before it on the stream (griddepcontrol.wait) before it writes memory and before it ends itself, so behind its
wait all earlier launches have ended. Stages of the next call are so written when both products of this one are done,
and down reads its own behind the end of gate and up. Between the launches of a call no other thread makes one: the
workspace's `turn` is held over all of them.
"""

from __future__ import annotations

from functools import partial

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.arguments import check_x
from vtensors_kernels.compiling.launch import current_stream
from vtensors_kernels.nvfp4 import wgmma, wgmma_form, wgmma_segments_form
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.staging import Norm
from vtensors_kernels.nvfp4.wgmma import WgmmaWorkspace
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm
from vtensors_kernels.nvfp4.wgmma_launches import (
    EPILOGUES,
    STAGED_SWIGLU,
    WgmmaLaunches,
    check_packed,
    make_launches,
)
from vtensors_kernels.nvfp4.wgmma_segments import kernel_of
from vtensors_kernels.nvfp4.wgmma_segments_form import SegmentsForm
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.packed_tiles import row_tiles

MIN_TOKENS, MAX_TOKENS = 17, wgmma.MAX_TOKENS
_SEGMENTS_TOKENS = wgmma_segments_form.MAX_TOKENS
Form = SegmentsForm | WgmmaForm


@attrs.frozen(kw_only=True)
class Asked:
    """What a form is chosen by. shape: [N, K]. block_bytes: of a packed block."""

    shape: tuple[int, int]
    block_bytes: int

    @classmethod
    def of(cls, packed: PackedMatrix) -> Asked:
        """Of a matrix."""
        return cls(shape=packed.shape, block_bytes=packed.format.block_bytes)


@attrs.frozen(kw_only=True)
class MlpForms:
    """Of gate and up, and of down, of the same width: so many tokens of a stage."""

    gate_up: Form
    down: Form


class WgmmaMlp:
    """call(h [M, K], gain [K] float32, eps) -> h + mlp(norm(h)), [M, K].

    gate_up: paired, [2 I, K], I a multiple of 16; down: [K, I] without pre_scale; NVFP4, or FP8 32 tokens at a time,
    both on one CUDA device. dtype: bfloat16 or float16. tokens: fewest and most M that it is to serve, within 1..64.
    workspace: shared as those of the linears, own memory without it. forms: for tests, instead of the chosen ones.
    Errors: RequestError for others; CompileError, LaunchError.
    """

    def __init__(
        self,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        dtype: torch.dtype,
        *,
        tokens: tuple[int, int] = (MIN_TOKENS, MAX_TOKENS),
        workspace: WgmmaWorkspace | None = None,
        forms: MlpForms | None = None,
    ) -> None:
        _check(gate_up, down, tokens)
        self.tokens, self._dtype, self._device = tokens, dtype, gate_up.blocks.device
        self._columns = gate_up.shape[1]
        self.workspace = workspace or WgmmaWorkspace(device=self._device)
        make = partial(_launches, gate_up, down, dtype, self.workspace)
        count = torch.cuda.get_device_properties(self._device).multi_processor_count
        asked = Asked.of(gate_up), Asked.of(down)
        four_bits = isinstance(gate_up, PackedNVFP4) and isinstance(down, PackedNVFP4)
        self._at_once = MAX_TOKENS if four_bits else _SEGMENTS_TOKENS
        sizes = {size for m in range(tokens[0], tokens[1] + 1) for size in self._sizes(m)}
        chosen = {m: forms or choose_forms(*asked, m, count) for m in sorted(sizes)}
        made = {both: make(both) for both in dict.fromkeys(chosen.values())}
        self._by_tokens = {m: made[both] for m, both in chosen.items()}
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(self._device).synchronize()

    def serves(self, h: Tensor) -> bool:
        """Whether it takes rows of that shape."""
        return h.dim() == 2 and self.tokens[0] <= h.shape[0] <= self.tokens[1]

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> Tensor:
        """On torch's current stream. h: of any strides. gain: a parameter, complete for good."""
        check_x(h, k=self._columns, dtype=self._dtype)
        if not self.serves(h):
            raise RequestError(
                "too many or too few tokens for this MLP",
                seen=str(h.shape[0]),
                accepted=f"{self.tokens[0]}..{self.tokens[1]}",
            )
        out, sizes = h.new_empty(h.shape[0], self._columns), self._sizes(h.shape[0])
        for rows, given in zip(torch.split(out, sizes), torch.split(h, sizes), strict=True):
            self._into(rows, given, Norm(gain=gain, eps=eps))
        return out

    def _into(self, out: Tensor, h: Tensor, norm: Norm) -> None:
        """Three launches, four where no one launch norms and lays out."""
        (up, down), m, work = self._by_tokens[h.shape[0]], h.shape[0], self.workspace
        x, first_norm = up.readable(h, norm)
        residual, stream = aligned(h, 4), current_stream(self._device)
        with work.turn:
            first = work.staged.data_ptr()
            second = first + up.staging.nbytes
            up.staging.call(stream, x, first_norm, first)
            up.products(stream, first, None, second, m, work)
            down.products(stream, second, residual, out.data_ptr(), m, work)

    def _sizes(self, m: int) -> list[int]:
        """Tokens of each round of launches."""
        return [min(self._at_once, m - first) for first in range(0, m, self._at_once)]


def choose_forms(gate_up: Asked, down: Asked, m: int, multiprocessors: int) -> MlpForms:
    """Beyond 32 tokens those of the linears, which fix their bits; else of one width with the least modelled time."""
    if m > _SEGMENTS_TOKENS:
        width = wgmma_form.width_of(m)
        return MlpForms(
            gate_up=wgmma_form.choose_form(*gate_up.shape, width, multiprocessors),
            down=wgmma_form.choose_form(*down.shape, width, multiprocessors),
        )

    def time(asked: Asked, form: SegmentsForm) -> float:
        return wgmma_segments_form.modelled_time(*asked.shape, form)

    def best(asked: Asked, width: int) -> SegmentsForm:
        forms = wgmma_segments_form.candidates(asked.shape[0], width, multiprocessors, asked.block_bytes)
        return min(forms, key=lambda form: time(asked, form))

    widths = [width for width in wgmma_segments_form.WIDTHS if width >= m]
    pairs = [(best(gate_up, width), best(down, width)) for width in widths]
    up, behind = min(pairs, key=lambda pair: time(gate_up, pair[0]) + time(down, pair[1]))
    return MlpForms(gate_up=up, down=behind)


def _check(gate_up: PackedMatrix, down: PackedMatrix, tokens: tuple[int, int]) -> None:
    """Raises RequestError unless both can be multiplied one after the other, for so many tokens."""
    check_packed(gate_up, "linear_swiglu")
    check_packed(down, "linear_add")
    (n, k), (hidden, width) = gate_up.shape, down.shape
    alike = (n, k) == (2 * width, hidden) and gate_up.blocks.device == down.blocks.device
    if not alike or down.pre_scale is not None:
        scaled = "" if down.pre_scale is None else ", with a pre_scale"
        raise RequestError(
            "down does not take what gate and up give",
            seen=f"{gate_up.shape} on {gate_up.blocks.device}, {down.shape} on {down.blocks.device}{scaled}",
            accepted="[2 I, K] and [K, I] on one device, down without a pre_scale",
        )
    if not 1 <= tokens[0] <= tokens[1] <= MAX_TOKENS:
        seen, accepted = f"{tokens[0]}..{tokens[1]}", f"1..{MAX_TOKENS}"
        raise RequestError("the MLP cannot serve so many tokens", seen=seen, accepted=accepted)


def _launches(
    gate_up: PackedMatrix, down: PackedMatrix, dtype: torch.dtype, workspace: WgmmaWorkspace, forms: MlpForms
) -> tuple[WgmmaLaunches, WgmmaLaunches]:
    """Of gate and up, whose output is stages, and of down; with what they need of the workspace."""

    def made(packed: PackedMatrix, form: Form, epilogue: int) -> WgmmaLaunches:
        segments = isinstance(form, SegmentsForm)
        kernel = kernel_of(packed.format) if segments else (wgmma.LINEAR, wgmma.FUNCTION)
        own = form.fitted(packed.shape[0]) if isinstance(form, SegmentsForm) else form.fitted(*packed.shape)
        partials = own.node_bytes if isinstance(own, SegmentsForm) else own.partial_bytes
        workspace.reserve(staged=0, partials=partials, counters=row_tiles(packed.shape[0]))
        return make_launches(*kernel, own, packed, dtype, epilogue)

    up, behind = made(gate_up, forms.gate_up, STAGED_SWIGLU), made(down, forms.down, EPILOGUES["linear_add"])
    workspace.reserve(staged=up.staging.nbytes + behind.staging.nbytes, partials=0, counters=0)
    return up, behind
