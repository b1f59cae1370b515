"""Norm, router and choice of experts in one launch, for few tokens on GPUs of Hopper's kind.

The bits of `RMSNormKernel`, `SmallLinear` and `RouterTopk` one after the other, which compute the same in three
launches where this does not serve: on other GPUs, for more than 64 tokens, more than 2048 columns, 320 rows (experts
and other gates together) or 256 experts. Reference: `reference/rms_norm.py`, `reference/linear.py` and
`reference/router_topk.py`.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.alignment import aligned
from vtensors_kernels.arguments import check_x, gain_for
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.plain.matrix import PlainMatrix
from vtensors_kernels.plain.small import SmallLinear
from vtensors_kernels.steps.rms_norm import RMSNormKernel
from vtensors_kernels.steps.router import MAX_CHOSEN, RouterTopk
from vtensors_kernels.steps.rows import device_of, row_stride

SOURCE, FUNCTION = "sm90/norm_router.cu", "norm_router"
TARGETS = ("sm_90a",)
MAX_TOKENS = 64
_TOKENS, _WARPS, _STEP = 8, 16, 32
_EPS = 1e-6


@attrs.frozen(kw_only=True)
class RouterForm:
    """cluster: blocks that share a token's rows. row_tiles: of 8 rows, of a block. steps: of 32 columns, of a warp."""

    cluster: int = 8
    row_tiles: int = 5
    steps: int = 4
    per_lane: int = 8

    @property
    def defines(self) -> dict[str, int]:
        """The macros of `norm_router.cu` but for the dtype."""
        return {
            "VT_CLUSTER": self.cluster,
            "VT_ROW_TILES": self.row_tiles,
            "VT_STEPS": self.steps,
            "VT_PER_LANE": self.per_lane,
        }

    @property
    def shared_bytes(self) -> int:
        """Of `Shared`."""
        columns, rows, own = self.columns, 8 * self.row_tiles, -(-_TOKENS // self.cluster)
        floats = columns + _WARPS * _TOKENS * rows + own * self.cluster * rows + _TOKENS
        return -(-(2 * _TOKENS * (columns + 32) + 4 * floats + 8) // 16) * 16

    @property
    def columns(self) -> int:
        """The most of x."""
        return _WARPS * self.steps * _STEP

    @property
    def rows(self) -> int:
        """The most of the matrix."""
        return 8 * self.cluster * self.row_tiles

    @property
    def experts(self) -> int:
        """The most to choose from."""
        return 32 * self.per_lane

    def serves(self, rows: int, columns: int, experts: int) -> bool:
        """Whether it takes a [rows, columns] matrix, of whose rows so many are experts'."""
        few = rows <= self.rows and experts <= min(self.experts, rows)
        return few and columns <= self.columns and columns % 8 == 0

    def most_in_words(self) -> str:
        """What `serves` asks for, for an error."""
        return (
            f"up to {self.rows} rows of up to {self.columns} columns, a multiple of 8, up to {self.experts} "
            f"experts and {MAX_CHOSEN} of them for a token"
        )


FORM = RouterForm()
INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines={**FORM.defines, "VT_F16": f16},
        targets=TARGETS,
        hot=True,
        expects=("mma",),
        shared_bytes=FORM.shared_bytes,
    )
    for f16 in (0, 1)
)


def serves_on(capability: tuple[int, int], shape: tuple[int, int], experts: int, top: int) -> bool:
    """Whether it chooses so many by a [rows, columns] matrix, of whose rows so many are experts', on such devices."""
    there, few = target_of(capability) in TARGETS, 1 <= top <= min(MAX_CHOSEN, experts)
    return there and few and FORM.serves(*shape, experts)


class NormRouter:
    """call(h [M, K], gain [K] float32, eps) -> x [M, K], experts [M, top] int32, weights [M, top], gates [M, N - E].

    matrix: [N, K] on a CUDA device, the router's rows and behind them those of other gates over x; complete for good.
    experts: E, the router's. top: 1..32. most_tokens: that it is to serve, no more than 64.
    Errors: RequestError for others; CompileError, LaunchError.
    """

    def __init__(self, matrix: PlainMatrix, experts: int, top: int, *, most_tokens: int = MAX_TOKENS) -> None:
        device = device_of(matrix.rows.device)
        served = serves_on(torch.cuda.get_device_capability(device), matrix.shape, experts, top)
        if not served or matrix.bias is not None:
            bias = "" if matrix.bias is None else " with a bias"
            raise RequestError(
                "the router kernel cannot choose",
                seen=f"{top} of {experts} experts by a matrix {list(matrix.shape)}{bias} on {device}",
                accepted=f"{FORM.most_in_words()}, on {' or '.join(TARGETS)}, without a bias",
                fix="norm, product and choice as three kernels take others",
            )
        self._matrix, self._experts, self._top, self._device = matrix, experts, top, device
        self._most = min(most_tokens, MAX_TOKENS)
        self._launches = _launches(dtype_defines(matrix.rows.dtype)["VT_F16"], device.index or 0)

    def serves(self, h: Tensor) -> bool:
        """Whether it takes so many rows."""
        return h.shape[0] <= self._most

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's bits depend on the row alone. gain: a parameter, complete for good. Errors: RequestError."""
        (n, k), m, dtype, device = self._matrix.shape, h.shape[0], self._matrix.rows.dtype, self._device
        check_x(h, k=k, dtype=dtype)
        if h.device != device or not self.serves(h):
            raise RequestError(
                "the input does not fit the router",
                seen=f"{m} tokens on {h.device}",
                accepted=f"at most {self._most} on {device}",
            )
        if h.stride(1) != 1 or h.stride(0) % 8 or h.data_ptr() % 16:
            h = aligned(h.contiguous(), 16)
        own_gain = gain_for(k, device, gain, wanted=True)
        x = torch.empty(m, k, dtype=dtype, device=device)
        gates = torch.empty(m, n - self._experts, dtype=dtype, device=device)
        chosen = torch.empty(m, self._top, dtype=torch.int32, device=device)
        weights = torch.empty(m, self._top, dtype=torch.float32, device=device)
        if m and own_gain is not None:
            self._launches[(m - 1) // _TOKENS].call(
                current_stream(device),
                h.data_ptr(),
                own_gain.data_ptr(),
                self._matrix.rows.data_ptr(),
                x.data_ptr(),
                gates.data_ptr(),
                chosen.data_ptr(),
                weights.data_ptr(),
                float_bits(eps),
                m,
                n,
                self._experts,
                k,
                self._top,
                row_stride(h),
            )
        return x, chosen, weights, gates


@lru_cache(maxsize=16)
def _launches(f16: int, device_index: int) -> tuple[Launch, ...]:
    """By groups of eight tokens; all layers share them."""
    defines = {**FORM.defines, "VT_F16": f16}
    function = compiled_function(SOURCE, FUNCTION, device_index, defines, FORM.shared_bytes)
    return tuple(
        Launch(
            function=function,
            grid=(FORM.cluster, groups, 1),
            block=(32 * _WARPS, 1, 1),
            arguments=14,
            shared_bytes=FORM.shared_bytes,
            dependent=may_depend(function),
        )
        for groups in range(1, MAX_TOKENS // _TOKENS + 1)
    )


def probe_norm_router(
    shape: tuple[int, int], experts: int, top: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises VtensorsError where the kernel's bits are not those of norm, product and choice one after the other."""
    source = torch.Generator().manual_seed(shape[1])
    rows = torch.randn(shape, generator=source) / shape[1] ** 0.5
    matrix = PlainMatrix(rows=rows.to(dtype).to(device))
    h = (torch.randn(MAX_TOKENS, shape[1], generator=source) * 3).to(dtype).to(device)
    gain = torch.linspace(-0.5, 1.5, shape[1]).to(device)
    x = RMSNormKernel(gain, _EPS, dtype)(h)
    logits = SmallLinear(matrix, dtype)(x)
    wanted = (x, *RouterTopk(top, dtype, device)(logits[:, :experts]), logits[:, experts:])
    router = NormRouter(matrix, experts, top)
    for first, last in ((0, MAX_TOKENS), (0, 1), (3, 12), (MAX_TOKENS - 8, MAX_TOKENS)):
        for ours, theirs in zip(router(h[first:last], gain, _EPS), wanted, strict=True):
            if not torch.equal(ours, theirs[first:last]):
                raise VtensorsError(
                    "other bits than those of norm, product and choice", seen=f"rows {first} to {last - 1}"
                )
