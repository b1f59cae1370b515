"""Attention over a paged cache: one token of many sequences, or many tokens of one; reference of the same name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.arguments import output_for
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.paged_attention import PAGE_TOKENS, AttentionShape
from vtensors_kernels.steps.paged_attention_forms import (
    HEAD_DIMS,
    HEADS,
    WARPS,
    DecodeForm,
    choose_form,
    hardware_of,
    instantiations,
)
from vtensors_kernels.steps.paged_prefill import PagedPrefill
from vtensors_kernels.steps.rows import check_rows, check_vector, device_of

COMBINE = "common/paged_attention_combine.cu"
# The dimensions that a warp of the combination makes.
_COMBINED_DIMS = 64
INSTANTIATIONS = (
    *instantiations(),
    *(
        Instantiation(source=COMBINE, function="paged_attention_combine", defines={"VT_F16": f16}, hot=True)
        for f16 in (0, 1)
    ),
)
# As attention_splits.cuh has it; up to FINE_TOKENS tokens a split is one page.
MOST_SPLITS, FINE_TOKENS = 64, 2048


class PagedAttention:
    """One layer's attention, norms, rotation and gate included; keys and values are written to the cache.

    See AttentionShape for the arguments of the same names. max_positions: the most of one sequence. device: of the
    tensors to come; without it that of a gain, else torch's current CUDA device. form: of decode's kernel, else what
    `choose_form` says. blocks: about so many a launch, else as the form has it; with max_positions it sizes grids. No
    result depends on forms or grids. fine_tokens: of `splits_of`. Errors: RequestError for a shape that no kernel has;
    CompileError and LaunchError.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        gated: bool,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        eps: float,
        scale: float,
        dtype: torch.dtype,
        kv_scales: tuple[float, float] | None,
        max_positions: int,
        device: torch.device | None = None,
        form: DecodeForm | None = None,
        blocks: int | None = None,
        fine_tokens: int = FINE_TOKENS,
    ) -> None:
        if head_dim not in HEAD_DIMS or heads % kv_heads or rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
            raise RequestError(
                "no attention kernel has this shape",
                seen=f"{heads} heads, {kv_heads} of keys and values, {head_dim} dimensions, {rotary_dim} turned",
                accepted=f"a whole number of heads for each of keys and values; {HEAD_DIMS} dimensions; "
                "an even number of them turned",
            )
        self.shape = AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            gated=gated,
            q_gain=_gain(q_gain, head_dim),
            k_gain=_gain(k_gain, head_dim),
            eps=eps,
            scale=scale,
            dtype=dtype,
            kv_scales=kv_scales,
        )
        gains = [gain.device for gain in (q_gain, k_gain) if gain is not None]
        self.device = device_of(device or (gains[0] if gains else "cuda"))
        self.max_positions = max_positions
        index, half = self.device.index or 0, dtype_defines(dtype)
        target, multiprocessors = hardware_of(index)
        form = form or choose_form(target, half, head_dim, kv_scales is not None)
        self.form, self._fine_tokens = form, fine_tokens
        self._blocks = blocks or form.blocks(multiprocessors)
        self._attend = compiled_function(form.source, form.function, index, form.defines, form.shared_bytes)
        self._combine = compiled_function(COMBINE, "paged_attention_combine", index, half)
        self._prefill = PagedPrefill(self.shape, index)
        self._launches: dict[int, tuple[Launch, Launch]] = {}
        self._q_head = head_dim * (2 if gated else 1)
        scales = kv_scales or (1.0, 1.0)
        self._factor = float_bits(scale * scales[0] / math.log(2))
        self._scales = [float_bits(scale) for scale in scales]
        # Launches read the gains before the kernels that have written them need be done.
        torch.cuda.current_stream(self.device).synchronize()

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """[B, H * D]: one new token of each row attends to those before it and itself.

        q: [B, H * D], gated [B, H * 2 * D]; k, v: [B, KV * D]; rows may be strided. k_pages, v_pages: [pages, KV, 64,
        D] of the dtype, with kv_scales float8_e4m3fn; the token is written to entry position % 64 of its page.
        page_table: [B, P] int32. positions: [B] int32, of the new token, below 64 * P. cos_sin: [positions, R]
        float32. Nothing waits for the device; what a row gets depends on its own tokens alone, bit for bit. kv_scales
        multiply sums, where the reference rounds each value that the cache gives back.
        Errors: RequestError for tensors that do not fit.
        """
        rows, shape = q.shape[0], self.shape
        self._check(q, k, v, k_pages, v_pages, cos_sin)
        check_rows(page_table, None, torch.int32, self.device, "the page tables")
        check_vector(positions, rows, torch.int32, self.device, "the positions")
        if page_table.shape[0] != rows:
            raise _unfit("page_table", page_table, f"[{rows}, P]")
        out = output_for(q, (rows, shape.heads * shape.head_dim), shape.dtype, out)
        if not rows:
            return out
        attend, combine = self._launches_for(rows)
        # A sequence has no more splits than pages.
        splits = min(MOST_SPLITS, page_table.shape[1])
        parts = torch.empty(rows, shape.heads, splits, shape.head_dim, device=q.device)
        tops = torch.empty(rows, shape.heads, splits, 2, device=q.device)
        stream = current_stream(q.device)
        attend.call(
            stream,
            *(tensor.data_ptr() for tensor in (q, k, v, k_pages, v_pages, page_table, positions, cos_sin)),
            *(0 if gain is None else gain.data_ptr() for gain in (shape.q_gain, shape.k_gain)),
            *(tensor.data_ptr() for tensor in (out, parts, tops)),
            float_bits(shape.eps),
            self._factor,
            *self._scales,
            *(tensor.stride(0) for tensor in (q, k, v, page_table)),
            shape.heads,
            shape.kv_heads,
            self._q_head,
            shape.rotary_dim,
            self._fine_tokens,
            splits,
        )
        combine.call(
            stream,
            *(tensor.data_ptr() for tensor in (parts, tops, positions, q, out)),
            self._scales[1],
            q.stride(0),
            shape.heads,
            shape.head_dim,
            self._q_head,
            self._fine_tokens,
            splits,
        )
        return out

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        start: int,
        cos_sin: Tensor,
    ) -> Tensor:
        """[T, H * D]: T new tokens of one sequence attend to the `start` before them and, causally, to themselves.

        As in `decode`, with rows for tokens and one row of page_table [1, P]. What comes out depends on the sequence,
        start and T alone. Errors: RequestError for tensors that do not fit.
        """
        self._check(q, k, v, k_pages, v_pages, cos_sin)
        check_rows(page_table, None, torch.int32, self.device, "the page tables")
        if page_table.shape[0] != 1:
            raise _unfit("page_table", page_table, "[1, P]")
        end, held = start + q.shape[0], min(page_table.shape[1] * PAGE_TOKENS, self.max_positions)
        if start < 0 or end > held:
            raise RequestError(
                "the tokens lie outside the sequence's pages",
                seen=f"{start} .. {end}",
                accepted=f"0 .. {held}",
            )
        return self._prefill.call(q, k, v, k_pages, v_pages, page_table, start, cos_sin)

    def _launches_for(self, rows: int) -> tuple[Launch, Launch]:
        if rows not in self._launches:
            shape = self.shape
            groups = shape.kv_heads * -(-shape.heads // shape.kv_heads // HEADS)
            pages = -(-self.max_positions // PAGE_TOKENS)
            at_a_time = max(1, min(MOST_SPLITS, pages, self._blocks // (groups * rows)))
            pieces = shape.heads * -(-shape.head_dim // _COMBINED_DIMS)
            self._launches[rows] = (
                Launch(
                    function=self._attend,
                    grid=(at_a_time, groups, rows),
                    block=(32 * WARPS, 1, 1),
                    arguments=27,
                    shared_bytes=self.form.shared_bytes,
                    dependent=may_depend(self._attend),
                ),
                Launch(
                    function=self._combine,
                    grid=(-(-pieces // WARPS), rows, 1),
                    block=(32 * WARPS, 1, 1),
                    arguments=12,
                    dependent=may_depend(self._combine),
                ),
            )
        return self._launches[rows]

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, cos_sin: Tensor
    ) -> None:
        shape, rows = self.shape, q.shape[0]
        columns = shape.kv_heads * shape.head_dim
        for name, x, width in (
            ("q", q, shape.heads * self._q_head),
            ("k", k, columns),
            ("v", v, columns),
        ):
            check_rows(x, width, shape.dtype, self.device, f"rows of {name}")
            if x.shape[0] != rows:
                raise _unfit(name, x, f"[{rows}, {width}]")
        stored = shape.dtype if shape.kv_scales is None else torch.float8_e4m3fn
        page = (shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
            fits = x.shape[1:] == page and x.dtype == stored and x.device == self.device
            if not fits or not x.is_contiguous() or x.data_ptr() % 16:
                raise _unfit(
                    name, x, f"{stored} [pages, {', '.join(map(str, page))}] on {self.device}, contiguous"
                )
        fits = cos_sin.shape[1:] == (shape.rotary_dim,) and cos_sin.dtype == torch.float32
        if not fits or cos_sin.device != self.device or not cos_sin.is_contiguous():
            raise _unfit("cos_sin", cos_sin, f"torch.float32 [positions, {shape.rotary_dim}], contiguous")


def splits_of(length: int, fine_tokens: int = FINE_TOKENS) -> int:
    """Into how many splits the tokens of one sequence are cut: the twin of attention_splits.cuh.

    fine_tokens: up to so many a split is one page, beyond them two or more.
    """
    pages = -(-length // PAGE_TOKENS)
    return -(-pages // max(1 if length <= fine_tokens else 2, -(-pages // MOST_SPLITS)))


def _gain(gain: Tensor | None, dim: int) -> Tensor | None:
    if gain is not None and (gain.shape != (dim,) or gain.dtype != torch.float32):
        raise _unfit("the gain of a norm", gain, f"torch.float32 [{dim}]")
    return None if gain is None else gain.contiguous()


def _unfit(name: str, x: Tensor, accepted: str) -> RequestError:
    return RequestError(
        f"{name} does not fit the attention",
        seen=f"{x.dtype} {list(x.shape)}, strides {x.stride()}, on {x.device}",
        accepted=accepted,
    )
