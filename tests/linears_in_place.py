"""Every linear of a loaded model against the reference, on the very inputs that the model gives it.

Where activations are quantized, single logits tell little of a kernel: a code that rounds the other way changes its
value by up to a quarter, layers turn that into more, and two right models soon differ as much as one that ignores the
declared activations. One product of the same x and the same weight must agree up to its own roundings.

    calls = watch(monkeypatch)
    model = vtensors.load_model(path, device="cuda", dtype="float16", activations="declared")
    model.logits(ids)
    check_calls(calls)

Import as `from linears_in_place import watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.kernel_binding import BoundKernel
from vtensors.records import KernelRequest
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu
from vtensors_plugins.architectures import binding

# Of one rounding of the result, relative to all of it; more where operands or steps between are rounded as well.
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}
# Of the way to a product of an x that is not quantized, which a kernel that quantizes it may seem to go.
APART = 0.25


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One call of a bound op: what it was given and what came out, on the CPU.

    kernel: of its number of rows; kernels: of every number.
    """

    request: KernelRequest
    kernel: str
    kernels: tuple[str, ...]
    weights: tuple[Weight, ...]
    arguments: tuple[Any, ...]
    output: Tensor

    @property
    def rows(self) -> int:
        """M."""
        return int(self.arguments[0].shape[0])

    @property
    def error(self) -> float:
        """Of the output, relative to the reference's."""
        return _relative(self.output, self.wanted())

    @property
    def unquantized(self) -> float:
        """How far the output lies from the reference towards what that gives without quantizing x: 0 to 1.

        Roundings have no part in it on average, so that it tells in bfloat16 too, and beside a residual.
        """
        wanted = self.wanted()
        towards = self.wanted(quantized=False) - wanted
        length = float(towards.square().sum())
        return float(((self.output.float() - wanted) * towards).sum()) / length if length else 0.0

    @property
    def accepted(self) -> float:
        """The largest error of a right kernel."""
        request, dtype = self.request, self.output.dtype
        several = request.op.startswith("norm_") or request.op.endswith("swiglu") or request.op == "experts"
        # Scales of groups are rounded into x, those of blocks into the weight, and scales of tokens beyond 64 rows.
        scaled = request.scheme == "fp8-block" or request.activations == "fp8-dynamic"
        static = request.activations == "fp8-static"
        return ROUNDING[dtype] * (1 + 3 * several + 2 * scaled + static)

    def wanted(self, *, quantized: bool = True) -> Tensor:
        """float32: the op by the reference, x quantized as the request says unless that is to be left out."""
        op, x = self.request.op, self.arguments[0]
        if op == "embedding":
            return embedding(x, self.weights[0], self.arguments[1]).float()
        quantized = quantized and self.request.activations != "16bit"
        if op == "experts":
            return self._mixture(quantized=quantized)
        if op.startswith("norm_"):
            x = rms_norm(x, *self.arguments[1:3], zero_centered=False)
        sums = [_product(x, weight, quantized=quantized) for weight in self.weights]
        if op.endswith("swiglu"):
            return swiglu(*sums)
        y = torch.cat(sums, dim=-1)
        return y + self.arguments[1].float() if op == "linear_add" else y

    def _mixture(self, *, quantized: bool) -> Tensor:
        """Experts, whose activations are rounded between gate_up and down, and nothing else."""
        x, chosen, router, gate, shared, residual = self.arguments
        beside = torch.ones(1) if gate is None else gate.reshape(-1, 1).float().sigmoid()
        out = torch.zeros(x.shape)
        for index in range(len(self.weights) // 3):
            first, up, down = self.weights[3 * index : 3 * index + 3]
            sums = [_product(x, weight, quantized=quantized) for weight in (first, up)]
            own = (router * (chosen == index)).sum(-1, keepdim=True)
            act = swiglu(*sums).to(x.dtype)
            out += (own if index < self.request.experts else beside) * _product(
                act, down, quantized=quantized
            )
        if shared is not None:
            out += beside * shared.float()
        return out if residual is None else out + residual.float()

    def told(self) -> str:
        """The call in a line."""
        request = self.request
        what = f"{self.kernel} {request.scheme} {request.activations} {request.shape} M={self.rows}"
        return f"{what}: error {self.error:.1e} of at most {self.accepted:.1e}"


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The list that every kernel bound from now on adds its calls to."""
    calls: list[Call] = []
    bind: Callable[..., BoundKernel] = binding.bind_plan

    def watched(plan: Any, weights: Sequence[Weight], *rest: Any, **named: Any) -> BoundKernel:
        kept = tuple(weight.to("cpu") for weight in weights)
        bound = bind(plan, weights, *rest, **named)
        if bound.decomposed:
            return bound
        return attrs.evolve(bound, call=_noted(bound, kept, calls))

    monkeypatch.setattr(binding, "bind_plan", watched)
    return calls


def check_calls(calls: Sequence[Call]) -> None:
    """Fails at calls that are farther from the reference than their roundings allow, and where x was not quantized."""
    assert calls
    # Written so that NaN fails.
    wrong = [call.told() for call in calls if not call.error <= call.accepted]
    worst = max(calls, key=lambda call: call.error / call.accepted)
    print(f"{len(calls)} calls; the worst: {worst.told()}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(calls)} calls are wrong:", *wrong[:12]])
    declared = [call for call in calls if call.request.activations != "16bit"]
    if declared:
        least = max(declared, key=lambda call: abs(call.unquantized))
        print(f"towards 16-bit activations at most {least.unquantized:.3f}: {least.told()}")
    apart = [
        f"{call.told()}, {call.unquantized:.2f}" for call in declared if not abs(call.unquantized) < APART
    ]
    assert not apart, "\n".join(["x was not quantized as declared, by these shares:", *apart[:12]])


def _noted(bound: BoundKernel, weights: tuple[Weight, ...], calls: list[Call]) -> Callable[..., Tensor]:
    def call(x: Tensor, *rest: Any) -> Tensor:
        arguments = tuple(v.cpu().clone() if isinstance(v, Tensor) else v for v in (x, *rest))
        y: Tensor = bound.call(x, *rest)
        rows = x.shape[0]
        (kernel,) = (s.kernel.name for s in bound.segments if _within(rows, s.tokens))
        calls.append(
            Call(
                request=bound.plan.request,
                kernel=kernel,
                kernels=tuple(s.kernel.name for s in bound.segments),
                weights=weights,
                arguments=arguments,
                output=y.cpu().clone(),
            )
        )
        return y

    return call


def _within(rows: int, tokens: tuple[int, int | None]) -> bool:
    return tokens[0] <= rows and (tokens[1] is None or rows <= tokens[1])


def _product(x: Tensor, weight: Weight, *, quantized: bool) -> Tensor:
    """float32 [M, N]: a pre-scale is rounded into x, codes and scales are the reference's, nothing else is rounded."""
    if weight.pre_scale is not None:
        x = (x.float() * weight.pre_scale.float()).to(x.dtype)
        weight = attrs.evolve(weight, pre_scale=None)
    return linear(x.float(), weight, weight.activation if quantized else None)


def _relative(ours: Tensor, wanted: Tensor) -> float:
    # Some of the checkpoints have weights of zeros.
    return float((ours.float() - wanted).norm() / (wanted.norm() or 1.0))
