"""Attention of many new tokens of one sequence over its pages: torch's attention between kernels of our own."""

from __future__ import annotations

from itertools import product

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.paged_attention import AttentionShape

PREPARE, GATHER, GATE = (
    f"common/{name}.cu" for name in ("paged_attention_prepare", "paged_attention_gather", "attention_gate")
)
INSTANTIATIONS = (
    *(
        Instantiation(
            source=f"common/{name}.cu", function=name, defines={"VT_F16": f16, "VT_FP8": fp8}, hot=True
        )
        for name, f16, fp8 in product(("paged_attention_prepare", "paged_attention_gather"), (0, 1), (0, 1))
    ),
    *(
        Instantiation(source=GATE, function="attention_gate", defines={"VT_F16": f16}, hot=True)
        for f16 in (0, 1)
    ),
)
_HEADS_PER_BLOCK, _THREADS, _VALUES = 4, 256, 8
# Neither makes a matrix of all scores. Others are left out: which one runs must not depend on what is installed.
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class PagedPrefill:
    """The prefill of one layer. device_index: of the CUDA device."""

    def __init__(self, shape: AttentionShape, device_index: int) -> None:
        self._shape = shape
        half = dtype_defines(shape.dtype)
        cached = {**half, "VT_FP8": int(shape.kv_scales is not None)}
        self._prepare = compiled_function(PREPARE, "paged_attention_prepare", device_index, cached)
        self._gather = compiled_function(GATHER, "paged_attention_gather", device_index, cached)
        self._gate = compiled_function(GATE, "attention_gate", device_index, half)
        self._scales = [float_bits(scale) for scale in shape.kv_scales or (1.0, 1.0)]

    def call(
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
        """[T, H * D]; see `PagedAttention.prefill`, which has checked the arguments."""
        shape, tokens = self._shape, q.shape[0]
        dim, groups = shape.head_dim, shape.kv_heads
        stream = current_stream(q.device)
        out = q.new_empty(tokens, shape.heads * dim)
        if not tokens:
            return out
        turned = q.new_empty(tokens, shape.heads, dim)
        keys, values = (q.new_empty(groups, start + tokens, dim) for _ in range(2))
        q_head = q.shape[1] // shape.heads
        # Without history the chunk's own keys and values are all there is.
        own = [0, 0] if start else [keys.data_ptr(), values.data_ptr()]
        blocks = -(-(shape.heads + 2 * groups) // _HEADS_PER_BLOCK)
        _launch(self._prepare, (blocks, tokens), 32 * _HEADS_PER_BLOCK, 24).call(
            stream,
            *(tensor.data_ptr() for tensor in (q, k, v, k_pages, v_pages, page_table, cos_sin)),
            *(0 if gain is None else gain.data_ptr() for gain in (shape.q_gain, shape.k_gain)),
            turned.data_ptr(),
            *own,
            float_bits(shape.eps),
            *self._scales,
            *(tensor.stride(0) for tensor in (q, k, v)),
            shape.heads,
            groups,
            dim,
            q_head,
            shape.rotary_dim,
            start,
        )
        if start:
            pieces = keys.numel() // _VALUES
            _launch(self._gather, (-(-pieces // _THREADS), 2), _THREADS, 10).call(
                stream,
                *(tensor.data_ptr() for tensor in (k_pages, v_pages, page_table, keys, values)),
                *self._scales,
                start + tokens,
                groups,
                dim,
            )
        mixed = causal_attention(turned, keys, values, shape.scale)
        pieces = out.numel() // _VALUES
        _launch(self._gate, (-(-pieces // _THREADS), 1), _THREADS, 12).call(
            stream,
            mixed.data_ptr(),
            q.data_ptr() + dim * q.element_size() if shape.gated else 0,
            out.data_ptr(),
            tokens,
            *mixed.stride()[:3],
            q.stride(0),
            q_head,
            shape.heads,
            shape.heads // groups,
            dim,
        )
        return out


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[KV, H / KV, T, D] of q [T, H, D], the newest tokens of keys and values [KV, S, D]; 16-bit, last dimension dense.

    The heads that share keys are a batch's heads over one copy of them. No matrix of all scores is made on CUDA.
    """
    tokens, heads, dim = q.shape
    groups, length, _ = keys.shape
    shared = heads // groups
    queries = q.view(tokens, groups, shared, dim).permute(1, 2, 0, 3)
    keys, values = (x.unsqueeze(1).expand(groups, shared, length, dim) for x in (keys, values))
    # The newest token sees all: no mask.
    mask = None if tokens == 1 else causal_lower_right(tokens, length)
    backends = _BACKENDS if q.is_cuda else (*_BACKENDS, SDPBackend.MATH)
    with sdpa_kernel(list(backends)):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def _launch(function: DeviceFunction, grid: tuple[int, int], threads: int, arguments: int) -> Launch:
    return Launch(
        function=function,
        grid=(*grid, 1),
        block=(threads, 1, 1),
        arguments=arguments,
        dependent=may_depend(function),
    )
