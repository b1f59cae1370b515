"""Plausible random values for the tensors of a synthetic checkpoint: cheap to make, finite through every layer.

A linear's weights have a standard deviation of gain / sqrt(K). The gain is 1 inside of a layer, so that what a norm
has brought to unit size stays at unit size, and small where a result joins the residual stream: about 0.09 each, so
that 128 of them leave a stream of about 1. The head's is 2, so that logits are of ordinary size.

Large tensors are cut out of a few pools of random bytes, each at a place of its own. A pool's length is a prime number
of elements, so that no two rows of a matrix, however large, begin at the same place. Small ones have their own values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import blake2b

import torch
from synthetic_models import Stored
from torch import Tensor

POOL_ELEMENTS = 67_108_859  # the largest prime below 2 ** 26
_SMALL = 1 << 20
_BF16_STD = 0.02
# Magnitudes of the eight E2M1 codes, all as likely: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_RMS = math.sqrt(68.5 / 8)
# Block scales are drawn from the E4M3 bytes 0x60 to 0x6F: 32 to 60 in steps of 4, 64 to 120 in steps of 8.
_SCALE_BYTES = (0x60, 0x70)
_SCALE_RMS = math.sqrt(sum(v * v for v in (*range(32, 64, 4), *range(64, 128, 8))) / 16)
_E4M3_STD = 448 / 6
_GAINS = {
    "lm_head": 2.0,
    "mlp.down_proj": 0.15,
    "experts.down_proj": 0.4,  # eight of them, each weighted about 1/8
    "shared_expert.down_proj": 0.2,
    "linear_attn.out_proj": 0.15,
    "self_attn.o_proj": 0.3,
    "linear_attn.in_proj_a": 0.5,
}
_OUTPUTS = ("down_proj", "out_proj", "o_proj", "lm_head")


class Values:
    """What each tensor is filled with. seed: another one gives another checkpoint of the same sizes."""

    def __init__(self, seed: int = 0, pool_elements: int = POOL_ELEMENTS) -> None:
        self._seed = seed
        self._cuts = 0
        generator = torch.Generator().manual_seed(seed)
        codes = torch.empty(pool_elements, dtype=torch.uint8).random_(0, 256, generator=generator)
        scales = torch.empty(pool_elements, dtype=torch.uint8).random_(*_SCALE_BYTES, generator=generator)
        normal = torch.empty(pool_elements).normal_(generator=generator)
        self._pools = {
            ("nvfp4", "U8"): _bytes_of(codes),
            ("nvfp4", "F8_E4M3"): _bytes_of(scales),
            ("fp8", "F8_E4M3"): _bytes_of((normal * _E4M3_STD).clamp_(-448, 448).to(torch.float8_e4m3fn)),
            ("bf16", "BF16"): _bytes_of((normal * _BF16_STD).bfloat16()),
        }

    def pieces(self, stored: Stored) -> Iterator[memoryview]:
        """The stored bytes of a tensor, in order. Which they are depends on how many were asked for before."""
        if stored.dtype == "F32":
            yield memoryview(struct.pack("<f", self._scalar(stored)))
        elif stored.dtype == "BF16" and stored.nbytes < 2 * _SMALL:
            yield _bytes_of(self._own_values(stored).bfloat16())
        else:
            yield from self._cut(self._pools[(stored.scheme, stored.dtype)], stored)

    def _cut(self, pool: memoryview, stored: Stored) -> Iterator[memoryview]:
        # Steps of the golden ratio of a prime: no two tensors begin at the same place.
        self._cuts += 1
        width = 2 if stored.dtype == "BF16" else 1
        elements = len(pool) // width
        place = self._cuts * int(elements * 0.618_034) % elements * width
        left = stored.nbytes
        while left:
            piece = pool[place : place + left]
            yield piece
            left -= len(piece)
            place = 0

    def _number(self, text: str) -> int:
        """63 bits that the seed and the text decide."""
        digest = blake2b(f"{self._seed}:{text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _scalar(self, stored: Stored) -> float:
        """Scales differ between modules; parts that are fused into one matrix share theirs, as their writer has it."""
        owner, _, last = stored.module.rpartition(".")
        group = stored.module if last in _OUTPUTS else owner
        varied = 0.9 + 0.2 * (self._number(f"{group}.{stored.part}") % 1000) / 1000
        if stored.part == "input_scale":
            largest = 448.0 if stored.scheme == "fp8" else 448.0 * 6
            return varied * 6 / largest
        unit = _E4M3_STD if stored.scheme == "fp8" else _E2M1_RMS * _SCALE_RMS
        return varied * standard_deviation(stored) / unit

    def _own_values(self, stored: Stored) -> Tensor:
        generator = torch.Generator().manual_seed(self._number(stored.name))
        if stored.part == "A_log":
            return torch.empty(stored.shape).uniform_(1, 16, generator=generator).log()
        if stored.part == "dt_bias":
            # The inverse of softplus over steps between 0.001 and 0.1.
            logs = torch.empty(stored.shape).uniform_(math.log(1e-3), math.log(0.1), generator=generator)
            steps = logs.exp()
            return steps + torch.log(-torch.expm1(-steps))
        normal = torch.empty(stored.shape).normal_(generator=generator)
        if stored.name.endswith("linear_attn.norm.weight"):
            return 1 + 0.1 * normal
        if len(stored.shape) == 1:
            ones = stored.name.startswith("model.visual") and stored.part == "weight"
            return 0.05 * normal + (1 if ones else 0)
        if stored.part == "weight" and stored.module.endswith("conv1d"):
            return 0.5 * normal
        return standard_deviation(stored) * normal


def standard_deviation(stored: Stored) -> float:
    """Of the values of a linear's weight, dequantized."""
    kept = [part for part in stored.module.split(".") if not part.isdigit()]
    gain = _GAINS.get(".".join(kept[-2:]), _GAINS.get(kept[-1], 1.0))
    return gain / math.sqrt(stored.k)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
