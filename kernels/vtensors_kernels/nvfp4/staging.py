"""x as the products by warpgroups read it: laid out by a launch before them, which may be that of the norm in front."""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import VtensorsError
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.packed_tiles import STEP_COLUMNS, column_steps
from vtensors_kernels.steps.rms_norm import NORM_CHUNKS, NormForm, norm_rows

_log = logging.getLogger("vtensors")

PERMUTE, PERMUTE_FUNCTION = "sm90/permute_activations.cu", "permute_activations"
NORM, NORM_FUNCTION = "sm90/norm_activations.cu", "norm_activations"
# Small blocks, about as many as fit beside those of a linear that is still at work; tokens of each.
_THREADS, _BLOCKS, _TOKENS = 64, 288, 4
# Up to here one launch norms and lays out: before an MLP of 5120 columns it took 1 to 2 us less than two on an H200,
# but 2 to 4 us more for 48 and 64 tokens.
_NORM_TOKENS = 32
# Of a row in whole stages.
_STAGE_ROW_BYTES = 2 * STEP_COLUMNS

INSTANTIATIONS = (
    *(
        Instantiation(
            source=PERMUTE,
            function=PERMUTE_FUNCTION,
            defines={"VT_F16": f16, "VT_PRE_SCALE": scaled},
            targets=("sm_90a",),
            hot=True,
        )
        for f16, scaled in product((0, 1), (0, 1))
    ),
    *(
        Instantiation(
            source=NORM,
            function=NORM_FUNCTION,
            defines={"VT_F16": f16, "VT_CHUNKS": chunks},
            targets=("sm_90a",),
            hot=True,
            shared_bytes=2 * most,
        )
        for f16, (chunks, most) in product((0, 1), NORM_CHUNKS)
    ),
)


@attrs.frozen(kw_only=True)
class Norm:
    """The norm in front of a linear. gain: [K] float32, contiguous."""

    gain: Tensor
    eps: float


@attrs.frozen(kw_only=True)
class Staging:
    """The launches that lay out rows of one length for products of so many tokens. pre_scale: [K] float32 or None.

    norm: None for rows that are too long, and for more than 32 tokens.
    """

    columns: int
    tokens: int
    pre_scale: Tensor | None
    permute: Launch
    norm: Launch | None

    @classmethod
    def of(
        cls, columns: int, tokens: int, pre_scale: Tensor | None, dtype: torch.dtype, index: int
    ) -> Staging:
        """columns: K, a multiple of 16. index: of the device. Errors: CompileError, LaunchError."""
        f16, groups, steps = dtype_defines(dtype), -(-tokens // _TOKENS), column_steps(columns)
        of_block = -(-steps // max(1, _BLOCKS // groups))
        scaled = {"VT_PRE_SCALE": int(pre_scale is not None)}
        permute = Launch(
            function=compiled_function(PERMUTE, PERMUTE_FUNCTION, index, {**f16, **scaled}),
            grid=(-(-steps // of_block), groups, 1),
            block=(_THREADS, 1, 1),
            arguments=7,
            dependent=True,
        )
        norm = None
        if tokens <= _NORM_TOKENS and NormForm.serves(columns):
            form = NormForm.of(columns)
            defines = {**f16, "VT_CHUNKS": form.chunks}
            norm = Launch(
                function=compiled_function(NORM, NORM_FUNCTION, index, defines, form.shared_bytes),
                grid=(tokens, 1, 1),
                block=(form.threads, 1, 1),
                arguments=9,
                shared_bytes=form.shared_bytes,
                dependent=True,
            )
        return cls(columns=columns, tokens=tokens, pre_scale=pre_scale, permute=permute, norm=norm)

    @property
    def nbytes(self) -> int:
        """Of all stages."""
        return column_steps(self.columns) * self.tokens * _STAGE_ROW_BYTES

    def norms(self, x: Tensor, norm: Norm) -> bool:
        """Whether one launch norms x and lays it out; with others the norm comes before.

        The first call for a length and dtype runs the self-test, which a graph capture does not allow.
        """
        fits = x.is_contiguous() and x.data_ptr() % 16 == 0 and norm.gain.data_ptr() % 16 == 0
        if self.norm is None or not fits or norm.gain.dtype != torch.float32 or not norm.gain.is_contiguous():
            return False
        return _why_not(self.columns, x.dtype, x.device) is None

    def call(self, stream: int, x: Tensor, norm: Norm | None, staged: int) -> None:
        """x: [M, K], M <= tokens, rows side by side or apart, aligned to 16 bytes. staged: where to, in bytes."""
        scale = 0 if self.pre_scale is None else self.pre_scale.data_ptr()
        rest = staged, x.stride(0), x.shape[0], self.columns, self.tokens
        if norm is None:
            self.permute.call(stream, x.data_ptr(), scale, *rest)
        elif self.norm is not None:
            self.norm.call(stream, x.data_ptr(), norm.gain.data_ptr(), scale, *rest, float_bits(norm.eps))


def probe_staging(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises VtensorsError where rows that one launch has normed and laid out are not those of two launches."""
    x = torch.linspace(-3e4, 3e4, 5 * columns, device=device).cos().reshape(5, columns).to(dtype)
    norm = Norm(gain=torch.linspace(-0.5, 1.5, columns, device=device), eps=1e-6)
    for pre_scale in (None, torch.linspace(0.5, 1.5, columns, device=device)):
        staging = Staging.of(columns, 8, pre_scale, dtype, device.index or 0)
        # What no token has stays NaN in both.
        both = [torch.full((staging.nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(2)]
        stream = current_stream(device)
        staging.call(stream, x, norm, both[0].data_ptr())
        staging.call(stream, norm_rows(x, norm.gain, norm.eps), None, both[1].data_ptr())
        if not torch.equal(*both):
            raise VtensorsError(
                "the self-test failed: normed and laid out in one launch",
                seen=f"{int((both[0] != both[1]).sum())} of {staging.nbytes} bytes differ",
            )


@lru_cache(maxsize=256)
def _why_not(columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    try:
        probe_staging(columns, dtype, device)
    except PLUGIN_FAILURES as problem:
        reason = str(problem).partition("\n")[0]
        _log.warning(
            "norms of %d columns are launched before the laying out of their rows: %s", columns, reason
        )
        return reason
    return None
