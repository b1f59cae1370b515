"""y = x @ W.T for a packed matrix and up to 32 tokens on sm_90a by warpgroup products.

Bit for bit the results of `StreamLinear`, so that a row's bits stay the same from 1 to 32 tokens. More tokens
are several launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.arguments import check_x, output_for, residual_for
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.nvfp4.staging import Norm
from vtensors_kernels.nvfp4.wgmma import WgmmaWorkspace, random_weight
from vtensors_kernels.nvfp4.wgmma_launches import (
    EPILOGUES,
    WgmmaLaunches,
    check_packed,
    make_launches,
    product_instantiations,
)
from vtensors_kernels.nvfp4.wgmma_segments_form import (
    MAX_TOKENS,
    WIDTHS,
    SegmentsForm,
    choose_form,
    compiled_forms,
)
from vtensors_kernels.packed_matrix import PackedFormat, PackedMatrix
from vtensors_kernels.packed_tiles import row_tiles


def instantiations(packed: PackedFormat) -> tuple[Instantiation, ...]:
    """Every form, format of activations and epilogue for a packed layout."""
    forms = (form for width in WIDTHS for form in compiled_forms(width, packed.block_bytes))
    return product_instantiations(kernel_of(packed), forms, packed.defines)


def kernel_of(packed: PackedFormat) -> tuple[str, str]:
    """Source and function. Raises RequestError for a layout without such products."""
    if packed.segments is None:
        raise RequestError("no kernel by warpgroup products reads this layout", seen=packed.stream[1])
    return packed.segments


INSTANTIATIONS = instantiations(FORMAT)


class WgmmaSegments:
    """call(x, residual=None, out=None) -> y for one packed matrix: `linear`, `linears`, `linear_add`, `linear_swiglu`.

    packed: on a CUDA device; `paired` for linear_swiglu and only there. dtype: bfloat16 or float16.
    workspace: shared by launchers whose calls follow each other on one stream; own memory without it.
    forms: for measurements, by width, instead of the chosen ones. shape: whose forms are chosen, the matrix's own
    where it is None.
    Errors: RequestError for arguments that do not fit, CompileError, LaunchError.
    """

    def __init__(
        self,
        packed: PackedMatrix,
        dtype: torch.dtype,
        epilogue: str = "linear",
        *,
        workspace: WgmmaWorkspace | None = None,
        forms: tuple[SegmentsForm, ...] = (),
        shape: tuple[int, int] | None = None,
    ) -> None:
        check_packed(packed, epilogue)
        self.packed, self.dtype, self._adds = packed, dtype, epilogue == "linear_add"
        n, self._device = packed.shape[0], packed.blocks.device
        self.out_features = n // 2 if epilogue == "linear_swiglu" else n
        self.workspace = workspace or WgmmaWorkspace(device=self._device)
        if not forms:
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
            size = packed.format.block_bytes
            forms = tuple(choose_form(*(shape or packed.shape), width, count, size) for width in WIDTHS)
        self.forms = tuple(form.fitted(n) for form in dict.fromkeys(forms))
        made = [(form.tokens, self._made(form, EPILOGUES[epilogue])) for form in self.forms]
        self._by_tokens = [
            next((launches for width, launches in made if width >= m), None) for m in range(MAX_TOKENS + 1)
        ]
        self.workspace.reserve(
            staged=max(launches.staging.nbytes for _, launches in made),
            partials=max(form.node_bytes for form in self.forms),
            counters=row_tiles(n),
        )
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(self._device).synchronize()

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """[M, N] of the dtype, [M, N / 2] for linear_swiglu; rounded once; on torch's current stream.

        x: [M, K] of the dtype, M <= 32 or the format's `most_tokens`, any strides. residual: [M, N], with linear_add.
        out: to write into.
        """
        return self._into(x, residual, out, None)

    def normed(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """The same of `norm_rows(x, gain, eps)`, whose bits one launch lays out where it can. gain: [K] float32."""
        return self._into(x, None, None, Norm(gain=gain, eps=eps))

    def _into(self, x: Tensor, residual: Tensor | None, out: Tensor | None, norm: Norm | None) -> Tensor:
        m, most = x.shape[0], max(MAX_TOKENS, self.packed.format.most_tokens)
        check_x(x, k=self.packed.shape[1], dtype=self.dtype)
        if not 1 <= m <= most or self._by_tokens[min(m, MAX_TOKENS)] is None:
            raise RequestError("too many or no tokens for this kernel", seen=str(m), accepted=f"1..{most}")
        out = output_for(x, (m, self.out_features), self.dtype, out)
        if out.data_ptr() % 4:
            raise RequestError("the output must be aligned to 4 bytes")
        residual = residual_for(x, (m, self.out_features), self.dtype, residual, wanted=self._adds)
        for first in range(0, m, MAX_TOKENS):
            rows = slice(first, first + MAX_TOKENS)
            launches = self._by_tokens[min(m - first, MAX_TOKENS)]
            if launches is not None:
                own = None if residual is None else residual[rows]
                launches.run(x[rows], own, out[rows], self.workspace, norm)
        return out

    def _made(self, form: SegmentsForm, epilogue: int) -> WgmmaLaunches:
        return make_launches(*kernel_of(self.packed.format), form, self.packed, self.dtype, epilogue)


def probe_wgmma_segments(
    shape: tuple[int, int],
    dtype: torch.dtype,
    epilogue: str,
    device: torch.device,
    tokens: tuple[int, int],
    matrix: Callable[[int, bool], PackedMatrix] | None = None,
) -> None:
    """Launch what (N, K) would be given, on fewer rows, with poisoned memory.

    matrix: (N, paired) -> a random packed matrix of K columns on the device; NVFP4 where it is None.
    Raises VtensorsError unless the results are bit for bit those of StreamLinear.
    """
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.nvfp4.stream import StreamLinear

    def nvfp4(rows: int, paired: bool) -> PackedMatrix:
        parts = [random_weight(rows // 2 if paired else rows, shape[1], device, seed) for seed in (1, 2)]
        return pack(parts if paired else parts[:1], paired=paired)

    count = torch.cuda.get_device_properties(device).multi_processor_count
    paired, make = epilogue == "linear_swiglu", matrix or nvfp4
    block_bytes = make(16, paired).format.block_bytes
    for m in sorted({min(max(tokens[0], min(width, tokens[1])), MAX_TOKENS) for width in WIDTHS}):
        form = choose_form(*shape, m, count, block_bytes)
        packed = make(min(shape[0], form.warps * form.cluster * 16 + 40), paired)
        linear = WgmmaSegments(packed, dtype, epilogue, forms=(form,))
        x = torch.linspace(-3, 3, m * shape[1], device=device).cos().reshape(m, -1).to(dtype)
        out = torch.full((m, linear.out_features), float("nan"), dtype=dtype, device=device)
        residual = torch.ones_like(out) if epilogue == "linear_add" else None
        wanted = StreamLinear(packed, dtype, epilogue)(x, residual)
        linear.workspace.poison()
        for _ in range(2):
            ours = linear(x, residual, out)
            if not torch.equal(ours, wanted) or wanted.isnan().any():
                raise VtensorsError(
                    "the self-test failed: other bits than the streaming kernel",
                    seen=f"{int((ours != wanted).sum())} of {wanted.numel()} differ at M = {m}",
                )
            out.fill_(float("nan"))
