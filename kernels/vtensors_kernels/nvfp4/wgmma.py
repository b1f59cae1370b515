"""y = x @ W.T for packed NVFP4 weights and up to 64 tokens on sm_90a: x permuted, then warpgroup products."""

from __future__ import annotations

from threading import Lock

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.arguments import output_for, residual_for
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.staging import Norm
from vtensors_kernels.nvfp4.wgmma_form import CLUSTERS, RINGS, WIDTHS, WgmmaForm, choose_form, width_of
from vtensors_kernels.nvfp4.wgmma_launches import (
    EPILOGUES,
    WgmmaLaunches,
    check_packed,
    make_launches,
    product_instantiations,
)
from vtensors_kernels.packed_tiles import row_tiles

LINEAR, FUNCTION = "sm90/linear_nvfp4_wgmma.cu", "linear_nvfp4_wgmma"
MAX_TOKENS = WIDTHS[-1]
# The output rounds to 8 (bfloat16) or 11 bits; a wrong scale, place or order is off by far more.
TOLERANCE = 4e-3
# Of those a selection may take: up to 32 tokens go to `wgmma_segments`.
_WIDTHS = tuple(width for width in WIDTHS if width > 32)
_FORMS = tuple(
    WgmmaForm(tokens=width, warpgroups=groups, cluster=cluster, blocks=cluster, chunk=chunk, slots=slots)
    for width in _WIDTHS
    for groups, (chunk, slots) in RINGS.items()
    for cluster in CLUSTERS
)
INSTANTIATIONS = product_instantiations((LINEAR, FUNCTION), _FORMS)


@attrs.define(kw_only=True)
class WgmmaWorkspace:
    """Memory that the launches of one stream share: staged x, partial sums, counters (zeros between launches).

    It grows when a launcher is made. What it grew out of is kept, because captured graphs may still use it. turn: held
    while a call is launched.
    """

    device: torch.device
    staged: Tensor = attrs.field(init=False)
    partials: Tensor = attrs.field(init=False)
    counters: Tensor = attrs.field(init=False)
    turn: Lock = attrs.field(init=False, factory=Lock, eq=False, repr=False)
    _outgrown: list[Tensor] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.staged, self.partials, self.counters = empty, empty, empty.view(torch.int32)

    def reserve(self, *, staged: int, partials: int, counters: int) -> None:
        """At least so many bytes of staged x and of partial sums, and so many counters."""
        if self.staged.numel() < staged:
            self._outgrown.append(self.staged)
            self.staged = torch.empty(staged, dtype=torch.uint8, device=self.device)
        if self.partials.numel() < partials:
            self._outgrown.append(self.partials)
            self.partials = torch.empty(partials, dtype=torch.uint8, device=self.device)
        if self.counters.numel() < counters:
            self._outgrown.append(self.counters)
            self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)

    def poison(self) -> None:
        """Fill what the kernels must not rely on with 0xFF."""
        self.staged.fill_(255)
        self.partials.fill_(255)


class WgmmaLinear:
    """call(x, residual=None) -> y for one packed matrix; the ops `linear`, `linears`, `linear_add`, `linear_swiglu`.

    packed: on a CUDA device; `paired` for linear_swiglu and only there. dtype: bfloat16 or float16.
    tokens: fewest and most rows M of x that calls will bring. workspace: shared by launchers whose calls follow
    each other on one stream; own memory without it. forms: for measurements, one per width instead of the
    chosen ones.
    Errors: RequestError for arguments that do not fit, CompileError, LaunchError.
    """

    def __init__(
        self,
        packed: PackedNVFP4,
        dtype: torch.dtype,
        epilogue: str = "linear",
        *,
        tokens: tuple[int, int] = (1, MAX_TOKENS),
        workspace: WgmmaWorkspace | None = None,
        forms: tuple[WgmmaForm, ...] = (),
    ) -> None:
        dtype_defines(dtype)
        check_packed(packed, epilogue)
        self.packed, self.dtype, self._adds = packed, dtype, epilogue == "linear_add"
        (n, k), device = packed.shape, packed.blocks.device
        self.out_features = n // 2 if epilogue == "linear_swiglu" else n
        self.workspace = workspace or WgmmaWorkspace(device=device)
        least, most = width_of(tokens[0]), width_of(tokens[1])
        if not forms:
            count = torch.cuda.get_device_properties(device).multi_processor_count
            forms = tuple(choose_form(n, k, width, count) for width in WIDTHS if least <= width <= most)
        made = {form.tokens: self._launches(form, EPILOGUES[epilogue]) for form in forms}
        self._by_tokens = [
            next((made[w] for w in sorted(made) if w >= m), None) for m in range(MAX_TOKENS + 1)
        ]
        self.workspace.reserve(
            staged=max(launches.staging.nbytes for launches in made.values()),
            partials=max(form.partial_bytes for form in forms),
            counters=row_tiles(n),
        )
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(device).synchronize()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [M, K] of the dtype; residual: [M, N] for linear_add. [M, N], or [M, N / 2] for linear_swiglu."""
        return self._into(x, x.new_empty(x.shape[0], self.out_features), residual)

    def normed(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """The same of `norm_rows(x, gain, eps)`, whose bits one launch lays out where it can. gain: [K] float32."""
        return self._into(x, x.new_empty(x.shape[0], self.out_features), None, Norm(gain=gain, eps=eps))

    def run(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same into `out`, contiguous; on torch's current stream."""
        return self._into(x, output_for(x, (x.shape[0], self.out_features), self.dtype, out), residual)

    def _into(self, x: Tensor, out: Tensor, residual: Tensor | None, norm: Norm | None = None) -> Tensor:
        m = x.shape[0]
        width = self._by_tokens[m] if 1 <= m <= MAX_TOKENS else None
        k = self.packed.shape[1]
        if width is None or x.dim() != 2 or x.shape[1] != k or x.dtype != self.dtype:
            raise RequestError(
                "x does not fit", seen=f"{x.dtype} {tuple(x.shape)}", accepted=self._accepted()
            )
        residual = residual_for(x, (m, self.out_features), self.dtype, residual, wanted=self._adds)
        width.run(x, residual, out, self.workspace, norm)
        return out

    def _accepted(self) -> str:
        served = [m for m, width in enumerate(self._by_tokens) if m and width]
        return f"[{served[0]}..{served[-1]}, {self.packed.shape[1]}] {self.dtype}"

    def _launches(self, form: WgmmaForm, epilogue: int) -> WgmmaLaunches:
        form = form.fitted(*self.packed.shape)
        return make_launches(LINEAR, FUNCTION, form, self.packed, self.dtype, epilogue)


def probe_wgmma(
    shape: tuple[int, int], dtype: torch.dtype, epilogue: str, device: torch.device, tokens: tuple[int, int]
) -> None:
    """Launch what (N, K) would be given, on fewer rows, with poisoned memory; raises where it is wrong."""
    from vtensors_kernels.nvfp4.repack import pack
    from vtensors_kernels.reference.nvfp4_packing import unpack_reference

    count = torch.cuda.get_device_properties(device).multi_processor_count
    forms = [choose_form(*shape, w, count) for w in WIDTHS if width_of(tokens[0]) <= w <= width_of(tokens[1])]
    for form in forms:
        paired, m = epilogue == "linear_swiglu", min(form.tokens, tokens[1])
        rows = min(shape[0], form.warps * form.cluster * 16 + 40)
        parts = [random_weight(rows // 2 if paired else rows, shape[1], device, seed) for seed in (1, 2)]
        packed = pack(parts if paired else parts[:1], paired=paired)
        linear = WgmmaLinear(packed, dtype, epilogue, tokens=(m, m), forms=(form,))
        linear.workspace.poison()
        x = torch.linspace(-3, 3, m * shape[1], device=device).cos().reshape(m, -1).to(dtype)
        out = torch.full((m, linear.out_features), float("nan"), dtype=dtype, device=device)
        residual = torch.ones_like(out) if epilogue == "linear_add" else None
        ours = [linear.run(x, out, residual).float() for _ in range(2)]
        wanted = x.float() @ unpack_reference(packed).T
        if paired:
            gate, up = wanted.chunk(2, dim=-1)
            wanted = torch.nn.functional.silu(gate) * up
        if residual is not None:
            wanted += residual.float()
        error = float((ours[1] - wanted).norm() / wanted.norm())
        if not error < TOLERANCE or not torch.equal(*ours):
            raise VtensorsError(
                "the self-test failed", seen=f"relative error {error:.1e}", accepted=f"{TOLERANCE}"
            )


def random_weight(n: int, k: int, device: torch.device, seed: int) -> NVFP4Weight:
    """Random codes with every positive block scale, sized so that sums over K are about 1."""
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8)
    scales = torch.randint(1, 127, (n, k // 16), generator=source, dtype=torch.uint8)
    size = torch.tensor(1.0 / (250.0 * k**0.5))
    weight = NVFP4Weight(codes=codes, block_scale=scales.view(torch.float8_e4m3fn), global_scale=size)
    return weight.to(device)
