"""Random calls of an op with bound weights, and what they must give: the op in float32 over dequantized weights."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.records import KernelRequest
from vtensors_formats import Weight
from vtensors_formats.activations import ActivationQuantizer
from vtensors_kernels.reference.experts import experts
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm

_EPS = 1e-6
OPS = (
    *("linear", "linears", "linear_swiglu", "linear_add", "linear_argmax"),
    *("norm_linears", "norm_linear_swiglu", "experts", "embedding"),
)


@attrs.frozen(kw_only=True, eq=False)
class OpCall:
    """arguments: of the bound callable, x or ids first. expected: float32, the logits for an argmax.

    dtype: of the result. index: the result is the place of the largest expected value of each row.
    """

    arguments: tuple[object, ...]
    expected: Tensor
    dtype: torch.dtype
    index: bool = False

    @property
    def floating(self) -> bool:
        """Whether the rows are activations, not ids."""
        return isinstance(self.arguments[0], Tensor) and self.arguments[0].is_floating_point()

    def spoilt(self) -> OpCall:
        """The same call with NaN in the last row of x."""
        x, *rest = self.copied().arguments
        if isinstance(x, Tensor):
            x[-1] = float("nan")
        return attrs.evolve(self, arguments=(x, *rest))

    def copied(self) -> OpCall:
        """The same call with arguments of its own."""
        copies = (one.clone() if isinstance(one, Tensor) else one for one in self.arguments)
        return attrs.evolve(self, arguments=tuple(copies))

    def same_arguments(self, other: OpCall) -> bool:
        """Whether both are given the same values."""
        pairs = zip(self.arguments, other.arguments, strict=True)
        return all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs
        )

    def difference(self, found: object, tolerance: float, *, rows: int | None = None) -> str | None:
        """What is wrong with the result, of which the first so many rows count; None where nothing is.

        tolerance: most of ‖found - expected‖ / ‖expected‖; of an argmax, how far below the largest value the chosen one
        may be, as a share of the largest magnitude.
        """
        if not isinstance(found, Tensor):
            return f"the result is a {type(found).__name__}, not a tensor"
        shape = self.expected.shape[:1] if self.index else self.expected.shape
        dtype = torch.int64 if self.index else self.dtype
        if found.shape != shape or found.dtype != dtype:
            return f"the result is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}"
        expected, found = self.expected[:rows], found[:rows]
        if self.index:
            if bool(((found < 0) | (found >= expected.shape[1])).any()):
                return f"the result has indices outside of 0..{expected.shape[1] - 1}"
            short = expected.amax(-1) - expected.gather(-1, found.unsqueeze(-1)).squeeze(-1)
            error = float((short / expected.abs().amax()).max())
        else:
            error = float((found.float() - expected).norm() / expected.norm())
        return None if error <= tolerance else f"relative error {error:.2g}, accepted: at most {tolerance:g}"


def op_call(request: KernelRequest, weights: Sequence[Weight], rows: int) -> OpCall:
    """A call of request.op with random arguments; the same for the same request and rows.

    weights: of the call, in the op's order, on the request's device. rows: M, or ids of an embedding.
    Errors: RequestError for an op that has no weights bound.
    """
    if request.op not in OPS or request.shape is None:
        raise RequestError(
            "an op cannot be called", seen=f"{request.op}, shape {request.shape}", accepted=", ".join(OPS)
        )
    (n, k), dtype = request.shape, getattr(torch, request.dtype)
    generator = torch.Generator().manual_seed(1000 * rows + n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(request.device, dtype)

    if request.op == "embedding":
        ids = torch.randint(0, n, (rows,), generator=generator).to(request.device)
        return OpCall(arguments=(ids, dtype), expected=weights[0].dequantize(torch.float32)[ids], dtype=dtype)
    x = random(rows, k)
    if request.op == "experts":
        return _experts_call(request, weights, x, random(rows, k), generator)
    wide, gain = x.float(), None
    if request.op.startswith("norm_"):
        gain = torch.rand(k, generator=generator).to(request.device) + 0.5
        wide = rms_norm(wide, gain, _EPS, zero_centered=False)
    parts = [linear(wide, weight, _quantizer(request, weight)) for weight in weights]
    expected = F.silu(parts[0]) * parts[1] if request.op.endswith("swiglu") else torch.cat(parts, dim=-1)
    arguments: tuple[object, ...] = (x,) if gain is None else (x, gain, _EPS)
    if request.op == "linear_add":
        residual = random(rows, n)
        expected, arguments = expected + residual.float(), (x, residual)
    return OpCall(arguments=arguments, expected=expected, dtype=dtype, index=request.op == "linear_argmax")


def _quantizer(request: KernelRequest, weight: Weight) -> ActivationQuantizer | None:
    return None if request.activations == "16bit" else weight.activation


def _experts_call(
    request: KernelRequest, weights: Sequence[Weight], x: Tensor, residual: Tensor, generator: torch.Generator
) -> OpCall:
    rows, top, count = x.shape[0], request.chosen, request.experts
    chosen = torch.rand(rows, count, generator=generator).argsort(-1)[:, :top].to(torch.int32).to(x.device)
    router = torch.rand(rows, top, generator=generator).to(x.device)
    router = router / router.sum(-1, keepdim=True)
    quantizers = [_quantizer(request, weight) for weight in weights]
    expected = experts(x.float(), chosen, router, None, None, residual.float(), weights, count, quantizers)
    return OpCall(arguments=(x, chosen, router, None, None, residual), expected=expected, dtype=x.dtype)
