"""The self-tests of kernels with NVFP4 activations: the quantizer bit for bit, products against the reference.

Both conventions are tried, since a request does not tell which one a weight has. The products are compared with the
reference in float32, whose activations are not rounded to 16 bits behind the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight, e4m3
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.arguments import scaled_x
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.nvfp4.quantize_activations import NVFP4Quantizer
from vtensors_kernels.probing import ROWS, TOLERANCES, random_x
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.nvfp4_activations import fragments, tiled_scales, widened
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

# call(weights, request) -> the op's call, as a layer gets it.
Bind = Callable[[Sequence[NVFP4Weight], KernelRequest], Callable[..., Tensor]]
_EPS = 1e-6
_TOKENS = 9
# A norm's reciprocal root may be one float32 step off, which then shows in a few codes; and so does a product.
_ACCEPTED_BEHIND_NORM, _ROUNDINGS_BEHIND_NORM = 2e-3, 4
_LARGEST = 2688.0  # 6 * 448: of code times scale


def probe_w4a4(request: KernelRequest, bind: Bind, *, output: str, same_rows: bool) -> None:
    """The quantizer with that output, and the op as bound, at the fewest and the most rows and between.

    same_rows: a row must be the same bits at any number of rows. Raises VtensorsError where one is wrong.
    """
    for divisor in (False, True):
        probe_quantizer(request, output, divisor=divisor)
        probe_product(request, bind, divisor=divisor, same_rows=same_rows)


def probe_quantizer(request: KernelRequest, output: str, *, divisor: bool) -> None:
    """Codes and scales of x with zeros, ties and sizes over many binades, bit for bit the reference's on the CPU."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    norm = request.op.startswith("norm_")
    k = _columns(request)
    x = _edges(k, dtype)
    activation = _activation(x, divisor=divisor)
    gain = torch.linspace(0.5, 1.5, k) if norm else None
    quantizer = NVFP4Quantizer(
        activation.to(request.device), k, dtype, source="norm" if norm else "plain", output=output
    )
    on_device = None if gain is None else gain.to(request.device)
    out, scales = quantizer(x.to(request.device), on_device, _EPS if norm else 0.0)
    normed = x if gain is None else rms_norm(x, gain, _EPS, zero_centered=False)
    wanted = activation.codes(normed)
    whole = {
        "codes": wanted.codes,
        "tiled": wanted.codes,
        "fragments": fragments(wanted.codes, wanted.scale),
        "widened": widened(wanted.codes, wanted.scale, dtype),
    }[output]
    pairs = [(out.cpu(), whole)]
    if output in ("codes", "tiled"):
        wanted_scales = tiled_scales(wanted.scale) if output == "tiled" else wanted.scale
        pairs.append((e4m3.as_bytes(scales.cpu()), e4m3.as_bytes(wanted_scales)))
    for ours, theirs in pairs:
        bits = (ours.view(torch.int16), theirs.view(torch.int16)) if output == "widened" else (ours, theirs)
        different = int((bits[0] != bits[1]).sum())
        if different > (_ACCEPTED_BEHIND_NORM * bits[0].numel() if norm else 0):
            raise VtensorsError(
                f"the self-test failed: quantized activations ({output}) differ from the reference's",
                seen=f"{different} of {bits[0].numel()}",
            )


def probe_product(request: KernelRequest, bind: Bind, *, divisor: bool, same_rows: bool) -> None:
    """The op as bound on a small random weight of one convention, at several numbers of rows."""
    paired = request.op.endswith("swiglu")
    count = 2 if paired else max(1, len(request.parts))
    sizes = _sizes(request)
    x = random_x(request, sizes[-1])
    k, norm = _columns(request), request.op.startswith("norm_")
    gain = torch.linspace(0.5, 1.5, k, device=x.device) if norm else None
    activation = _activation(x.cpu(), divisor=divisor).to(request.device)
    parts = [_weight(request, seed, activation, divisor=divisor, factor=0.75**seed) for seed in range(count)]
    call = bind(parts, request)
    normed = x if gain is None else rms_norm(x, gain, _EPS, zero_centered=False)
    sums = [reference_w4a4(normed, part) for part in parts]
    wanted = swiglu(*sums) if paired else torch.cat(sums, dim=-1)
    residual = None
    if request.op == "linear_add":
        residual = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape).to(x.dtype)
        wanted = wanted + residual.float()
    accepted = TOLERANCES[x.dtype] * (_ROUNDINGS_BEHIND_NORM if norm or paired else 1)
    first: Tensor | None = None
    for m in sizes:
        rest: tuple[Any, ...] = () if gain is None else (gain, _EPS)
        y = call(x[:m], *(() if residual is None else (residual[:m],)), *rest)
        error = float((y.float() - wanted[:m]).norm() / wanted[:m].norm())
        # Written so that NaN fails.
        if not error < accepted:
            raise VtensorsError(
                f"the self-test failed: {request.op} at M = {m}",
                seen=f"relative error {error:.1e}",
                accepted=f"{accepted}",
            )
        first = y if first is None else first
        if same_rows and not torch.equal(y[: first.shape[0]], first):
            raise VtensorsError(f"the self-test failed: rows at M = {m} differ from those at M = {sizes[0]}")


def reference_w4a4(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """float32 [M, N]: x times its pre-scale, rounded to 16 bits, quantized and multiplied in float32."""
    plain = attrs.evolve(weight, pre_scale=None)
    return linear(scaled_x(x, weight.pre_scale).float(), plain, weight.activation)


def _weight(
    request: KernelRequest, seed: int, activation: FP4Activation, *, divisor: bool, factor: float
) -> NVFP4Weight:
    weight = random_weight(request, ROWS, seed=seed, scale_factor=factor)
    if divisor and weight.global_scale is not None:
        weight = attrs.evolve(weight, global_scale=None, global_divisor=1 / weight.global_scale)
    return attrs.evolve(weight, activation=activation)


def _activation(x: Tensor, *, divisor: bool) -> FP4Activation:
    """As a writer calibrates it on x, so that no group saturates."""
    amax = x.float()[x.isfinite()].abs().max()
    if divisor:
        return FP4Activation(global_divisor=_LARGEST / amax)
    return FP4Activation(global_scale=amax / _LARGEST)


def _edges(k: int, dtype: torch.dtype) -> Tensor:
    """[9, K] on the CPU: random values whose rows differ in size by binades, groups of zeros, ties of E2M1."""
    source = torch.Generator().manual_seed(k)
    x = torch.randn(_TOKENS, k, generator=source) * torch.logspace(-3, 3, _TOKENS, base=2.0).reshape(-1, 1)
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[0, :16] = 0.0
    x[1, :16] = -0.0
    x[2, :16] = torch.cat([ties, -ties])
    x[3, :16] *= 2.0**-30
    return x.to(dtype)


def _sizes(request: KernelRequest) -> list[int]:
    """Rows to try: the ends of the range, and what lies between."""
    least, most = request.tokens[0], request.tokens[1] or max(70, request.tokens[0] + 3)
    return sorted({m for m in (least, 3, 8, 17, 32, 40, 64, 70, most) if least <= m <= min(most, 130)})


def _columns(request: KernelRequest) -> int:
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    return request.shape[1]
