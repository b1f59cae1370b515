"""Each NVFP4 kernel launched on a small random weight, as bound for a request, against the reference.

Outputs start as NaN. An output rounds to 8 bits (bfloat16: at most 2^-8 off) or 11 (float16: 2^-11), and a
SwiGLU rounds twice before that; a wrong scale, code or place is off by far more than the tolerances. What is promised
bit for bit is compared bit for bit. Scales of every size lie beside each other in one weight; in another, that of
`row_probe`, each row has those of one size.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.nvfp4 import embedding, packed_widening, repack, stored
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.row_probe import MEAN_SQUARE_OF_CODES, TOKENS, RowCase, reference
from vtensors_kernels.probing import ROWS, TOLERANCES, dtype_of, random_x
from vtensors_kernels.reference.embedding import embedding as reference_embedding
from vtensors_kernels.reference.nvfp4_packing import pack_reference
from vtensors_kernels.reference.swiglu import swiglu

_WIDENING_TOKENS = 67
# Shares no divisor with 126.
_SCALE_STRIDE = 55


def probe_linear_stored(request: KernelRequest) -> None:
    """`stored.bind_linear`, every form that `request.tokens` may need; rows must be the same bits at any M."""
    most, weight = _most_tokens(request), random_weight(request, ROWS)
    x = random_x(request, most)
    y = _stored_outputs(request, weight, x)
    _compare(y, reference(x, weight), x.dtype, "one token")
    case = RowCase.make(attrs.evolve(request, op="linear", parts=()), tokens=max(most, TOKENS))
    y = _stored_outputs(request, case.parts[0], case.x)
    case.check(y, TOLERANCES[x.dtype], "rows of different sizes, one token")


def probe_linear_argmax_stored(request: KernelRequest) -> None:
    """`probe_linear_stored`, and `stored.bind_linear_argmax` against the largest of the linear: the same row."""
    probe_linear_stored(request)
    dtype, most, warps = dtype_of(request), _most_tokens(request), _warps(request)
    weight = random_weight(request, ROWS)
    # The last rows repeat the first, so that there are equals.
    weight.codes[ROWS // 2 + 1 :] = weight.codes[: ROWS // 2]
    weight.block_scale[ROWS // 2 + 1 :] = weight.block_scale[: ROWS // 2]
    x = random_x(request, most)
    y = stored.bind_linear(weight, dtype, max_tokens=most, warps=warps)(x)
    rows = torch.arange(ROWS, device=x.device).expand(most, ROWS)
    wanted = torch.where(y == y.amax(-1, keepdim=True), rows, ROWS).amin(-1)
    ours = stored.bind_linear_argmax(weight, dtype, max_tokens=most, warps=warps)(
        x, out=torch.full((most,), -1, device=x.device)
    )
    _same(ours, wanted, "the largest is another row")


def _stored_outputs(request: KernelRequest, weight: NVFP4Weight, x: Tensor) -> Tensor:
    """[M, N] of one token at a time; raises where more at a time give other bits."""
    most, n = _most_tokens(request), weight.shape[0]
    call = stored.bind_linear(weight, x.dtype, max_tokens=most, warps=_warps(request))
    alone = torch.cat([call(one.unsqueeze(0), out=_poisoned(1, n, x)) for one in x])
    for tokens in sorted({min(most, size) for size in (2, 8, 9, 16, 17, 32, 33, 64)}):
        together = call(x[:tokens], out=_poisoned(tokens, n, x))
        _same(together, alone[:tokens], f"{tokens} tokens differ from one")
    return alone


def probe_packed(packed: PackedNVFP4, parts: list[NVFP4Weight]) -> None:
    """A repacked matrix against the reference packing of the same parts, byte for byte."""
    wanted = pack_reference([part.to("cpu") for part in parts], paired=packed.paired)
    _same(packed.blocks.cpu(), wanted.blocks, "the repacked bytes differ")
    _same(packed.row_scale.cpu(), wanted.row_scale, "the repacked scales differ")


def probe_packed_widening(request: KernelRequest) -> None:
    """The repack and `packed_widening` for the request's op: linear, linears, linear_swiglu or linear_add.

    Parts of one global scale take another path than parts of several; both are tried.
    """
    dtype, x = dtype_of(request), random_x(request, _WIDENING_TOKENS)
    paired = request.op == "linear_swiglu"
    roundings = 3 if paired else 1
    count = 2 if paired else max(1, len(request.parts))
    for factor in (1.0, 0.75):
        parts = [random_weight(request, ROWS, seed=i, scale_factor=factor**i) for i in range(count)]
        packed = repack.pack(parts, paired=paired)
        probe_packed(packed, parts)
        sums = [reference(x, part) for part in parts]
        wanted, residual = swiglu(*sums) if paired else torch.cat(sums, dim=-1), None
        if request.op == "linear_add":
            residual = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape).to(dtype)
            wanted = wanted + residual.float()
        _compare(_widened(packed, x, residual), wanted, dtype, request.op, roundings=roundings)
        case = RowCase.make(request, tokens=_WIDENING_TOKENS, factor=factor)
        ours = _widened(repack.pack(case.parts, paired=paired), case.x, case.residual)
        case.check(ours, TOLERANCES[dtype] * roundings, f"{request.op}, rows of different sizes")


def _widened(packed: PackedNVFP4, x: Tensor, residual: Tensor | None) -> Tensor:
    n = packed.shape[0]
    out = _poisoned(x.shape[0], n // 2 if packed.paired else n, x)
    if packed.paired:
        return packed_widening.bind_linear_swiglu(packed, x.dtype)(x, out=out)
    if residual is not None:
        return packed_widening.bind_linear_add(packed, x.dtype)(x, residual, out=out)
    return packed_widening.bind_linear(packed, x.dtype)(x, out=out)


def probe_embedding(request: KernelRequest) -> None:
    """`embedding.bind_embedding` bit for bit against the reference, repeated and last rows included."""
    dtype, weight = dtype_of(request), random_weight(request, ROWS)
    ids = torch.tensor([0, ROWS - 1, 3, 3, ROWS // 2], device=weight.device)
    out = torch.full((ids.shape[0], weight.shape[1]), float("nan"), dtype=dtype, device=weight.device)
    ours = embedding.bind_embedding(weight)(ids, dtype, out=out)
    _same(ours, reference_embedding(ids, weight, dtype), "the rows differ")


def random_weight(
    request: KernelRequest, rows: int, *, seed: int = 0, scale_factor: float = 1.0
) -> NVFP4Weight:
    """[rows, K] on the request's device: random codes, block scales of every size, the request's traits.

    The global scale makes products with `random_x` about as large as scale_factor: normal numbers of either 16-bit
    format at any K and group. It does not depend on the seed.
    """
    if request.shape is None:
        raise RequestError("a probe needs the weight's shape", seen=repr(request))
    k, group = request.shape[1], 32 if "group32" in request.traits else 16
    source = torch.Generator().manual_seed(seed * 1_000_003 + k)
    codes = torch.randint(0, 256, (rows, k // 2), generator=source, dtype=torch.uint8)
    groups = k // group
    # Bytes 1..126, all of them where there are as many groups; neighbours differ in size.
    scales = (torch.arange(rows * groups) * _SCALE_STRIDE % 126 + 1).to(torch.uint8).reshape(rows, groups)
    block_scale = scales.view(torch.float8_e4m3fn)
    squares = group * MEAN_SQUARE_OF_CODES * block_scale.float().square().sum()
    scale = scale_factor * (rows / squares).sqrt()
    if "row_scale" in request.traits:
        scale = scale * torch.linspace(0.5, 1.5, rows).reshape(rows, 1)
    weight = NVFP4Weight(codes=codes, block_scale=block_scale, global_scale=scale)
    if "bias" in request.traits:
        weight = attrs.evolve(weight, bias=torch.linspace(-0.1, 0.1, rows))
    if "pre_scale" in request.traits:
        weight = attrs.evolve(weight, pre_scale=torch.linspace(0.5, 1.5, k))
    return weight.to(request.device)


def _most_tokens(request: KernelRequest) -> int:
    return min(request.tokens[1] or stored.MAX_TOKENS, stored.MAX_TOKENS)


def _warps(request: KernelRequest) -> int | None:
    """What the real weight's shape gets, not what the small one's would."""
    return None if request.shape is None else stored.warps_for(*request.shape)


def _poisoned(tokens: int, columns: int, like: Tensor) -> Tensor:
    return torch.full((tokens, columns), float("nan"), dtype=like.dtype, device=like.device)


def _compare(ours: Tensor, wanted: Tensor, dtype: torch.dtype, what: str, *, roundings: int = 1) -> None:
    error = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
    accepted = TOLERANCES[dtype] * roundings
    # Written so that NaN fails.
    if not error < accepted:
        raise VtensorsError(
            f"the self-test failed: {what}", seen=f"relative error {error:.1e}", accepted=f"{accepted}"
        )


def _same(ours: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(ours, wanted):
        different = int((ours != wanted).sum())
        raise VtensorsError(f"the self-test failed: {what}", seen=f"{different} of {wanted.numel()} differ")
