"""The self-test of `linear_nvfp4_stream`: what a request would be bound to, on a weight of the same K and few rows.

Outputs start as NaN, keys of the argmax as 0xFF. Two clusters get so many row tiles that every ring and slot is used
several times; a hundred launches must agree, and each row must be the same bits at any number of tokens.
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import fingerprint
from vtensors_kernels.nvfp4.packed import TILE_ROWS, PackedNVFP4
from vtensors_kernels.nvfp4.probes import TOLERANCES, random_weight, random_x, reference
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stored import PICK_SOURCE
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.stream_form import StreamForm, choose_form, serves
from vtensors_kernels.nvfp4.stream_launches import EPILOGUES, SOURCE
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

REPLAYS = 100
_CLUSTERS, _ROUNDS = 2, 2
_EPS = 1e-6
# x after a norm may round the other way; silu is computed from rounded exponentials.
_ROUNDINGS = 2


def probe_stream(request: KernelRequest) -> None:
    """Every form that request.tokens may need, for the request's op, traits and K; raises where one is wrong."""
    subject = _Subject.make(request)
    few, whole = subject.bound(_CLUSTERS), subject.bound(None)
    alone = torch.cat([subject.outputs(whole, t, 1, 1)[0] for t in range(subject.x.shape[0])])
    for m in _tokens_to_try(request):
        for call, launches in ((few, REPLAYS), (whole, 2)):
            y = subject.outputs(call, 0, m, launches)
            _require_same(y, y[:1].expand_as(y), f"launches at M = {m} differ")
            _require_same(y[0], alone[:m], f"rows at M = {m} differ from those at M = 1")
            subject.compare(y[0], m)


def fingerprint_stream(request: KernelRequest) -> str:
    """What a verdict depends on: sources, options and toolkit of every form that the request may be given."""
    capability = request.capability or (8, 0)
    f16 = int(request.dtype == "float16")
    found = [fingerprint(SOURCE, {"VT_F16": f16}, capability)]
    if request.op == "linear_argmax":
        found.append(fingerprint(PICK_SOURCE, {}, capability))
    forms = [repr(form) for form in _forms(request)]
    return " ".join([*found, *dict.fromkeys(forms)])


@attrs.frozen(kw_only=True)
class _Subject:
    """The small weight, its input and what the reference makes of it, or of an argmax the linear's own result."""

    request: KernelRequest
    packed: PackedNVFP4
    x: Tensor
    gain: Tensor | None
    wanted: Tensor

    @classmethod
    def make(cls, request: KernelRequest) -> _Subject:
        n, k = _shape(request)
        paired = request.op.endswith("swiglu")
        forms = _forms(request)
        tiles = _CLUSTERS * (_ROUNDS * max(form.slots for form in forms) + 1)
        count = 2 if paired else max(1, len(request.parts))
        # Tails in rows and tiles that are stored as the real ones would be: four rows at a time, or one by one.
        each = max(8, tiles * TILE_ROWS // count // 4 * 4 - 4)
        each -= 1 if (n // 2 if paired else n) % 4 else 0
        parts = [random_weight(request, each, seed=i, scale_factor=0.75**i) for i in range(count)]
        if request.op == "linear_argmax":
            _repeat_rows(parts[0])
        packed = pack(parts, paired=paired)
        x = random_x(request, len(forms))
        gain = torch.linspace(0.5, 1.5, k, device=x.device) if request.op.startswith("norm_") else None
        normed = x if gain is None else rms_norm(x, gain, _EPS, zero_centered=False)
        sums = [reference(normed, part) for part in parts]
        wanted = swiglu(*sums) if paired else torch.cat(sums, dim=-1)
        return cls(request=request, packed=packed, x=x, gain=gain, wanted=wanted)

    def bound(self, clusters: int | None) -> StreamLinear | StreamArgmax:
        """The op on the small weight in the forms of the real one, with a grid of so many clusters."""
        dtype, rows, op = self.x.dtype, _shape(self.request)[0], self.request.op
        if op == "linear_argmax":
            return StreamArgmax(self.packed, dtype, rows=rows, clusters=clusters)
        plain = op.removeprefix("norm_")
        epilogue = plain if plain in EPILOGUES else "linear"
        return StreamLinear(
            self.packed, dtype, epilogue, None if plain == op else "norm", rows=rows, clusters=clusters
        )

    def outputs(self, call: StreamLinear | StreamArgmax, first: int, m: int, launches: int) -> Tensor:
        """[launches, m, columns], or [launches, m] ids: results for tokens first .. first + m."""
        x = self.x[first : first + m]
        if isinstance(call, StreamArgmax):
            ids = torch.full((launches, m), -1, device=x.device)
            keys = call.empty_keys(m)
            for one in ids:
                keys.fill_(-1)
                call.run(x, keys, one)
            return ids
        out = torch.full((launches, m, call.out_features), float("nan"), dtype=x.dtype, device=x.device)
        residual = self.residual()[first : first + m] if self.request.op == "linear_add" else None
        for one in out:
            call(x, residual, self.gain, 0.0 if self.gain is None else _EPS, one)
        return out

    def residual(self) -> Tensor:
        """[M, N] of the dtype."""
        wanted = self.wanted
        return (
            torch.linspace(-2, 2, wanted.numel(), device=wanted.device).reshape(wanted.shape).to(self.x.dtype)
        )

    def compare(self, y: Tensor, m: int) -> None:
        """Raises VtensorsError unless y is what the reference gives."""
        wanted = self.wanted[:m]
        if self.request.op == "linear_argmax":
            linear = StreamLinear(self.packed, self.x.dtype, rows=_shape(self.request)[0])
            logits = linear(self.x[:m])
            self._close(logits, wanted)
            rows = torch.arange(logits.shape[1], device=y.device).expand_as(logits)
            largest = torch.where(logits == logits.amax(-1, keepdim=True), rows, logits.shape[1]).amin(-1)
            _require_same(y, largest, "the largest is another row")
            return
        self._close(y, wanted + self.residual()[:m].float() if self.request.op == "linear_add" else wanted)

    def _close(self, y: Tensor, wanted: Tensor) -> None:
        error = float((y.float() - wanted.float()).norm() / wanted.float().norm())
        accepted = TOLERANCES[self.x.dtype] * _ROUNDINGS
        # Written so that NaN fails.
        if not error < accepted:
            raise VtensorsError(
                f"the self-test failed: {self.request.op} of {y.shape[0]} tokens",
                seen=f"relative error {error:.1e}",
                accepted=f"{accepted}",
            )


def _forms(request: KernelRequest) -> tuple[StreamForm, ...]:
    """The forms for 1, 2, ... tokens of a launch on the request's device."""
    (n, k), target = _shape(request), target_of(request.capability or (8, 0))
    count = torch.cuda.get_device_properties(torch.device(request.device)).multi_processor_count
    most = min(serves(k, target), request.tokens[1] or serves(k, target))
    return tuple(choose_form(n, k, m, count, target) for m in range(1, most + 1))


def _tokens_to_try(request: KernelRequest) -> list[int]:
    """One token, and the most of each compiled form."""
    forms = _forms(request)
    tops = [m for m, (one, other) in enumerate(pairwise(forms), start=1) if one.defines != other.defines]
    return sorted({1, *tops, len(forms)})


def _repeat_rows(weight: NVFP4Weight) -> None:
    """The second half of the rows becomes the first: every value is there twice."""
    half = weight.shape[0] // 2
    tensors = [weight.codes, weight.block_scale]
    tensors += [t for t in (weight.global_scale, weight.bias) if t is not None and t.ndim and t.shape[0] > 1]
    for tensor in tensors:
        tensor[half : 2 * half] = tensor[:half].clone()


def _shape(request: KernelRequest) -> tuple[int, int]:
    if request.shape is None:
        raise RequestError("a self-test needs the weight's shape", seen=repr(request))
    return request.shape


def _require_same(ours: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(ours, wanted):
        different = int((ours != wanted).sum())
        raise VtensorsError(f"the self-test failed: {what}", seen=f"{different} of {wanted.numel()} differ")
