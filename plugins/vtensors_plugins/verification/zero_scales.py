"""Zero scales held against the codes below them: legal where all of these are zero."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from vtensors_formats import FP8Weight, NVFP4Weight, e4m3
from vtensors_formats.groups import split_groups
from vtensors_plugins.row_windows import RowWindows, common_windows


@attrs.frozen(kw_only=True)
class ZeroScales:
    """count: scales of zero over codes that are not. first: index of the first, in the module's own scale."""

    count: int
    first: tuple[int, ...]


def zero_scales(windows: RowWindows) -> ZeroScales | None:
    """The zero scales of a weight that lose values; None where there are none."""
    count = 0
    first: tuple[int, ...] = ()
    for start, stop in common_windows(windows, windows):
        mask = _lost(windows.read(start, stop))
        found = int(mask.sum()) if mask is not None else 0
        if mask is not None and found and not count:
            index = [int(place) for place in mask.nonzero()[0]]
            # A block's rows share a row of the scale.
            index[0] += start // windows.align
            first = tuple(index)
        count += found
    return ZeroScales(count=count, first=first) if count else None


def _lost(weight: object) -> Tensor | None:
    """bool, the scale's shape: zero over codes that are not zero. None for a scheme without such scales."""
    if isinstance(weight, NVFP4Weight):
        used = (split_groups(weight.codes, weight.group // 2) & 0x77).any(-1)
        return e4m3.is_zero(weight.block_scale) & used
    if not isinstance(weight, FP8Weight) or weight.scale.ndim == 0:
        return None
    zero = weight.scale_float32() == 0
    if not bool(zero.any()):
        return zero
    codes = ~e4m3.is_zero(weight.codes)
    if weight.block is None:
        return zero & codes.any(1, keepdim=True)
    height, width = weight.block
    n, k = codes.shape
    above = weight.row_offset
    padded = torch.nn.functional.pad(codes, (0, -k % width, above, -(n + above) % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return zero & blocks.any(3).any(1)
