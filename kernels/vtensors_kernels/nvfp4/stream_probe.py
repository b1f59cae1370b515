"""The self-test of `linear_*_stream`: what a request would be bound to, on a weight of the same K and few rows.

Outputs start as NaN, keys of the argmax as 0xFF. Two clusters get so many row tiles that every ring and slot is used
several times; a hundred launches must agree, and each row must be the same bits at any number of tokens. Where the
format has one, a second weight has rows of different sizes, each judged by its own norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors.records import KernelRequest
from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.functions import fingerprint
from vtensors_kernels.nvfp4.packed import FORMAT
from vtensors_kernels.nvfp4.probes import random_weight
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.row_probe import EPS, ROWS, RowCase, reference
from vtensors_kernels.nvfp4.stored import PICK_SOURCE
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.stream_form import StreamForm, choose_form, serves
from vtensors_kernels.nvfp4.stream_launches import EPILOGUES
from vtensors_kernels.packed_matrix import PackedFormat, PackedMatrix
from vtensors_kernels.packed_tiles import TILE_ROWS
from vtensors_kernels.probing import TOLERANCES, random_x
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu

REPLAYS = 100
_CLUSTERS, _ROUNDS = 2, 2
# x after a norm may round the other way; silu is computed from rounded exponentials.
_ROUNDINGS = 2


def probe_stream(request: KernelRequest, made: ProbeWeights | None = None) -> None:
    """Every form that request.tokens may need, for the request's op, traits and K; raises where one is wrong.

    made: how weights of the request's format are made and packed; NVFP4 where it is None.
    """
    made = made or nvfp4_weights()
    subject = _Subject.make(request, made)
    few, whole = subject.bound(_CLUSTERS), subject.bound(None)
    alone = subject.alone(whole)
    sizes = _tokens_to_try(_forms(request, made.format))
    for m in sizes:
        for call, launches in ((few, REPLAYS), (whole, 2)):
            y = subject.outputs(call, 0, m, launches)
            _require_same(y, y[:1].expand_as(y), f"launches at M = {m} differ")
            _require_same(y[0], alone[:m], f"rows at M = {m} differ from those at M = 1")
            subject.compare(y[0])
    if made.by_rows is None:
        return
    subject = _Subject.of_rows(request, made, made.by_rows)
    whole = subject.bound(None)
    alone = subject.alone(whole)
    subject.compare(alone)
    for m in sizes:
        y = subject.outputs(whole, 0, m, 1)
        _require_same(y[0], alone[:m], f"rows at M = {m} differ from those at M = 1")


def fingerprint_stream(request: KernelRequest, packed_format: PackedFormat = FORMAT) -> str:
    """What a verdict depends on: sources, options and toolkit of every form that the request may be given."""
    capability = request.capability or (8, 0)
    f16 = int(request.dtype == "float16")
    found = [fingerprint(packed_format.stream[0], {"VT_F16": f16, **dict(packed_format.defines)}, capability)]
    if request.op == "linear_argmax":
        found.append(fingerprint(PICK_SOURCE, {}, capability))
    forms = [repr(form) for form in _forms(request, packed_format)]
    return " ".join([*found, *dict.fromkeys(forms)])


@attrs.frozen(kw_only=True)
class ProbeWeights:
    """How the self-test makes weights of a format.

    random: request, rows, seed, factor of the outputs' size -> a weight. repeat: makes the second half of its rows the
    first, in place. pack: weights, paired -> the packed matrix. linear: x, weight -> float32 [M, N] of the reference.
    rows: parts beside one another have multiples of so many. by_rows: request, rows of a part -> weights whose rows
    differ in size, or None where the format has none.
    """

    format: PackedFormat
    random: Callable[[KernelRequest, int, int, float], Any]
    repeat: Callable[[Any], None]
    pack: Callable[[Sequence[Any], bool], PackedMatrix]
    linear: Callable[[Tensor, Any], Tensor]
    rows: int = 1
    by_rows: Callable[[KernelRequest, int], RowCase] | None = None


def nvfp4_weights() -> ProbeWeights:
    """Random NVFP4 weights."""
    return ProbeWeights(
        format=FORMAT,
        random=lambda request, rows, seed, factor: random_weight(
            request, rows, seed=seed, scale_factor=factor
        ),
        repeat=_repeat_rows,
        pack=lambda weights, paired: pack(weights, paired=paired),
        linear=lambda x, weight: reference(x, weight),
        by_rows=lambda request, rows: RowCase.make(request, rows=rows, factor=0.75),
    )


@attrs.frozen(kw_only=True)
class _Subject:
    """The small weight, its input and what the reference makes of it, or of an argmax the linear's own result.

    case: whose check replaces the one norm of all outputs.
    """

    request: KernelRequest
    packed: PackedMatrix
    x: Tensor
    gain: Tensor | None
    residual: Tensor | None
    wanted: Tensor
    case: RowCase | None = None

    @classmethod
    def make(cls, request: KernelRequest, made: ProbeWeights) -> _Subject:
        n, k = _shape(request)
        paired = request.op.endswith("swiglu")
        forms = _forms(request, made.format)
        tiles = _CLUSTERS * (_ROUNDS * max(form.slots for form in forms) + 1)
        count = 2 if paired else max(1, len(request.parts))
        # Tails in rows and tiles that are stored as the real ones would be: four rows at a time, or one by one.
        each = max(8, tiles * TILE_ROWS // count // 4 * 4 - 4)
        each -= 1 if (n // 2 if paired else n) % 4 else 0
        if not paired and count > 1:
            each = each // made.rows * made.rows
        parts = [made.random(request, each, i, 0.75**i) for i in range(count)]
        if request.op == "linear_argmax":
            made.repeat(parts[0])
        packed = made.pack(parts, paired)
        x = random_x(request, len(forms))
        gain = torch.linspace(0.5, 1.5, k, device=x.device) if request.op.startswith("norm_") else None
        normed = x if gain is None else rms_norm(x, gain, EPS, zero_centered=False)
        sums = [made.linear(normed, part) for part in parts]
        wanted, residual = swiglu(*sums) if paired else torch.cat(sums, dim=-1), None
        if request.op == "linear_add":
            between = torch.linspace(-2, 2, wanted.numel(), device=x.device).reshape(wanted.shape)
            residual = between.to(x.dtype)
            wanted = wanted + residual.float()
        return cls(request=request, packed=packed, x=x, gain=gain, residual=residual, wanted=wanted)

    @classmethod
    def of_rows(
        cls, request: KernelRequest, made: ProbeWeights, by_rows: Callable[[KernelRequest, int], RowCase]
    ) -> _Subject:
        """Rows of different sizes, as many of each part as have every block scale, and a tail."""
        paired, n = request.op.endswith("swiglu"), _shape(request)[0]
        case = by_rows(request, ROWS - (1 if (n // 2 if paired else n) % 4 else 0))
        return cls(
            request=request,
            packed=made.pack(case.parts, paired),
            x=case.x,
            gain=case.gain,
            residual=case.residual,
            wanted=case.wanted,
            case=case,
        )

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

    def alone(self, call: StreamLinear | StreamArgmax) -> Tensor:
        """[T, columns], or [T] ids: every token launched by itself."""
        return torch.cat([self.outputs(call, t, 1, 1)[0] for t in range(self.x.shape[0])])

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
        residual = None if self.residual is None else self.residual[first : first + m]
        for one in out:
            call(x, residual, self.gain, 0.0 if self.gain is None else EPS, one)
        return out

    def compare(self, y: Tensor) -> None:
        """Raises VtensorsError unless y is what the reference gives for as many tokens, the first ones."""
        if self.request.op != "linear_argmax":
            self._close(y)
            return
        linear = StreamLinear(self.packed, self.x.dtype, rows=_shape(self.request)[0])
        logits = linear(self.x[: y.shape[0]])
        self._close(logits)
        rows = torch.arange(logits.shape[1], device=y.device).expand_as(logits)
        largest = torch.where(logits == logits.amax(-1, keepdim=True), rows, logits.shape[1]).amin(-1)
        _require_same(y, largest, "the largest is another row")

    def _close(self, y: Tensor) -> None:
        m, accepted = y.shape[0], TOLERANCES[self.x.dtype] * _ROUNDINGS
        if self.case is not None:
            self.case.check(y, accepted, f"{self.request.op}, rows of different sizes")
            return
        wanted = self.wanted[:m]
        error = float((y.float() - wanted).norm() / wanted.norm())
        # Written so that NaN fails.
        if not error < accepted:
            raise VtensorsError(
                f"the self-test failed: {self.request.op} of {m} tokens",
                seen=f"relative error {error:.1e}",
                accepted=f"{accepted}",
            )


def _forms(request: KernelRequest, packed_format: PackedFormat) -> tuple[StreamForm, ...]:
    """The forms for 1, 2, ... tokens of a launch on the request's device."""
    (n, k), target = _shape(request), target_of(request.capability or (8, 0))
    count = torch.cuda.get_device_properties(torch.device(request.device)).multi_processor_count
    size = packed_format.block_bytes
    served = serves(k, target, size)
    most = min(served, request.tokens[1] or served)
    return tuple(choose_form(n, k, m, count, target, size) for m in range(1, most + 1))


def _tokens_to_try(forms: tuple[StreamForm, ...]) -> list[int]:
    """One token, and the most of each compiled form."""
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
