"""Which kernel attends for new tokens, by device and cache: paged_attention_stream or paged_attention_decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import attrs
import torch

from vtensors_kernels.compiling.architectures import COMPILED, target_of
from vtensors_kernels.compiling.instantiations import FEATURES, Instantiation
from vtensors_kernels.nvfp4.stream_form import shared_limit
from vtensors_kernels.reference.paged_attention import PAGE_TOKENS

HEAD_DIMS = (32, 64, 128, 256)
DECODE, STREAM = "common/paged_attention_decode.cu", "sm90/paged_attention_stream.cu"
# A block's warps and query heads, and a row of its scores in shared memory.
WARPS, HEADS, _SCORE_ROW = 4, 8, PAGE_TOKENS + 4
# So many that a device is full several times over: rows differ in length. More would mostly find nothing to do.
BLOCKS = 1024
# As attention_tiles.cuh has it: tokens of a tile, bytes of a slot beyond them with its barrier, slots of a ring.
_TILE_TOKENS, _BEYOND, _SLOTS = 16, 264, 2
# Heads from which the stream was faster on an H200: of 128 it was slower for many long sequences (342 us, 289).
_STREAMED_DIM = 256


@attrs.frozen(kw_only=True)
class DecodeForm:
    """A kernel that attends for one new token of each row. All of them take the same arguments and give the same bits.

    source, function, defines: what is compiled. shared_bytes: dynamic shared memory of a block of 32 * WARPS threads.
    blocks_per_sm: how many of a launch are best for an SM; None where BLOCKS are best, whatever the device has.
    """

    source: str
    function: str
    defines: Mapping[str, int]
    shared_bytes: int
    blocks_per_sm: int | None = None

    def blocks(self, multiprocessors: int) -> int:
        """About so many blocks a launch are best."""
        return BLOCKS if self.blocks_per_sm is None else self.blocks_per_sm * multiprocessors


def choose_form(target: str, half: Mapping[str, int], head_dim: int, fp8: bool) -> DecodeForm:
    """For large heads in 16 bits the stream where the target has one: on an H200 it was faster at any number of rows.

    half: the macro of the dtype. fp8: whether the cache has a byte for each value; its pages are half as long, and the
    stream was no faster for many rows and slower for one. Portable code for an unknown target has no bulk copies.
    """
    if not fp8 and head_dim >= _STREAMED_DIM:
        form = stream_form(target, half, head_dim)
        if form is not None:
            return form
    return decode_form(half, head_dim, fp8)


def decode_form(half: Mapping[str, int], head_dim: int, fp8: bool) -> DecodeForm:
    """paged_attention_decode, which every target and cache has. Arguments as of `choose_form`."""
    row = head_dim * (1 if fp8 else 2)
    # `Shared` there, a page of keys and values most of it.
    beside = 2 * HEADS * head_dim + max(18 * head_dim, 8 * HEADS * _SCORE_ROW)
    return DecodeForm(
        source=DECODE,
        function="paged_attention_decode",
        defines={**half, "VT_HEAD_DIM": head_dim, "VT_FP8": int(fp8)},
        shared_bytes=(2 * PAGE_TOKENS + 2) * row + beside,
    )


def stream_form(target: str, half: Mapping[str, int], head_dim: int) -> DecodeForm | None:
    """paged_attention_stream; None where the target has no bulk copies. Arguments as of `choose_form`.

    Two blocks an SM with rings of two tiles a warp, one where shared memory is small.
    """
    shared = _stream_shared_bytes(head_dim)
    blocks = next((count for count in (2, 1) if shared <= shared_limit(target, count)), None)
    if target not in FEATURES["bulk_copy"] or blocks is None:
        return None
    return DecodeForm(
        source=STREAM,
        function="paged_attention_stream",
        defines={**half, "VT_HEAD_DIM": head_dim, "VT_SLOTS": _SLOTS},
        shared_bytes=shared,
        blocks_per_sm=blocks,
    )


def instantiations() -> Iterator[Instantiation]:
    """Every form of both kernels on every target."""
    for f16, dim in product((0, 1), HEAD_DIMS):
        half = {"VT_F16": f16}
        for fp8 in (False, True):
            yield _instantiation(decode_form(half, dim, fp8), COMPILED, "mma")
        streamed = [target for target in COMPILED if choose_form(target, half, dim, False).source == STREAM]
        if streamed:
            form = choose_form(streamed[0], half, dim, False)
            yield _instantiation(form, tuple(streamed), "mma", "bulk_copy")


def hardware_of(device_index: int) -> tuple[str, int]:
    """The target that a CUDA device is compiled for, and how many multiprocessors it has."""
    count = torch.cuda.get_device_properties(device_index).multi_processor_count
    return target_of(torch.cuda.get_device_capability(device_index)), count


def _stream_shared_bytes(head_dim: int) -> int:
    row = 2 * head_dim
    rings = WARPS * _SLOTS * (_TILE_TOKENS * row + _BEYOND)
    return rings + 2 * HEADS * head_dim + 2 * row + 4 * WARPS * HEADS * _SCORE_ROW


def _instantiation(form: DecodeForm, targets: tuple[str, ...], *expects: str) -> Instantiation:
    return Instantiation(
        source=form.source,
        function=form.function,
        defines=form.defines,
        targets=targets,
        hot=True,
        expects=expects,
        shared_bytes=form.shared_bytes,
    )
