"""All experts of a layer as two packed matrices, whatever the format of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight, e8m0
from vtensors_formats.weight import Weight
from vtensors_kernels.nvfp4.repack import multiplier
from vtensors_kernels.packed_matrix import PackedFormat, PackedMatrix
from vtensors_kernels.packed_tiles import TILE_ROWS

NVFP4_LAYOUT, FP8_LAYOUT = "nvfp4-packed-experts", "fp8-packed-experts"
# Rows of gate or up in a row tile: an expert must fill its tiles.
PAIR_ROWS = TILE_ROWS // 2


@attrs.frozen(kw_only=True, eq=False)
class PackedExperts:
    """Experts on one device, one behind the other; the shared one, where it is among them, is the last.

    gate_up: [E * 2 F, K] with paired rows, F a multiple of 8. down: [E * K, F], K a multiple of 16.
    experts: without the shared one. shared: whether it is there.
    """

    gate_up: PackedMatrix
    down: PackedMatrix
    experts: int
    shared: bool

    @property
    def hidden(self) -> int:
        """K: features of x and of the output."""
        return self.gate_up.shape[1]

    @property
    def width(self) -> int:
        """F: features between gate_up and down."""
        return self.down.shape[1]

    @property
    def format(self) -> PackedFormat:
        """The layout of both matrices."""
        return self.gate_up.format

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        matrices = self.gate_up, self.down
        return sum(matrix.blocks.nbytes + matrix.row_scale.nbytes for matrix in matrices)


def pack_experts(weights: Sequence[Weight], experts: int) -> PackedExperts:
    """The experts of one layer, packed on their CUDA device.

    weights: gate [F, K], up [F, K], down [K, F] of each expert in turn, those of the shared expert last where there is
    one; all of one class. experts: without the shared one. Errors: RequestError where they do not fit together or off
    a CUDA device; CompileError, LaunchError.
    """
    from vtensors_kernels.fp8.repack import pack_fp8
    from vtensors_kernels.nvfp4.repack import pack

    check_experts(weights, experts)
    gate, up, down = (stacked(weights[i::3]) for i in range(3))
    gate_up: PackedMatrix
    if isinstance(gate, NVFP4Weight) and isinstance(up, NVFP4Weight) and isinstance(down, NVFP4Weight):
        gate_up = pack([gate, up], paired=True)
        del gate, up
        return _packed(gate_up, pack([down]), weights, experts)
    if isinstance(gate, NVFP4Weight) or isinstance(up, NVFP4Weight) or isinstance(down, NVFP4Weight):
        raise RequestError("the matrices of an expert have different schemes", seen="nvfp4 and others")
    gate_up = pack_fp8([gate, up], paired=True)
    del gate, up
    return _packed(gate_up, pack_fp8([down]), weights, experts)


def check_experts(weights: Sequence[Weight], experts: int) -> None:
    """Raises RequestError unless they are gate, up and down of that many experts, or one more, alike in shape."""
    if experts < 1 or len(weights) not in (3 * experts, 3 * experts + 3):
        raise RequestError(
            "these are not the weights of the experts",
            seen=f"{len(weights)} weights",
            accepted=f"{3 * experts}, or {3 * experts + 3} with a shared expert",
        )
    width, hidden = weights[0].shape[0], weights[0].shape[1]
    wanted = ((width, hidden), (width, hidden), (hidden, width))
    for index, weight in enumerate(weights):
        if tuple(weight.shape) != wanted[index % 3]:
            seen = f"{('gate', 'up', 'down')[index % 3]} of expert {index // 3}: {weight.shape}"
            raise RequestError(
                "the experts differ in shape", seen=seen, accepted=f"{wanted[index % 3]}, as expert 0"
            )
        if weight.bias is not None or weight.pre_scale is not None:
            raise RequestError(
                "experts with a bias or a pre-scale are not packed", seen=f"expert {index // 3}"
            )
    if width % PAIR_ROWS or hidden % TILE_ROWS:
        raise RequestError(
            "an expert does not fill its row tiles",
            seen=f"F = {width}, K = {hidden}",
            accepted=f"F a multiple of {PAIR_ROWS}, K of {TILE_ROWS}",
        )


def stacked(weights: Sequence[Weight]) -> NVFP4Weight | FP8Weight | MXFP8Weight:
    """One weight of all rows in order, each with the scale that it had; float32 scales per row.

    weights: of one class and shape, without bias and pre-scale. Errors: RequestError for other classes, scales of
    blocks that span two of them.
    """
    first = weights[0]
    if any(type(weight) is not type(first) for weight in weights):
        names = ", ".join(dict.fromkeys(weight.scheme for weight in weights))
        raise RequestError("matrices of different schemes are not stacked", seen=names)
    if isinstance(first, NVFP4Weight):
        alike = [weight for weight in weights if isinstance(weight, NVFP4Weight)]
        return NVFP4Weight(
            codes=torch.cat([weight.codes for weight in alike]),
            block_scale=_cat([weight.block_scale for weight in alike]),
            global_scale=_per_row([multiplier(weight) for weight in alike], first.shape[0]),
        )
    if isinstance(first, MXFP8Weight):
        own = [weight for weight in weights if isinstance(weight, MXFP8Weight)]
        return MXFP8Weight(
            codes=_cat([weight.codes for weight in own]),
            scale=torch.cat([e8m0.as_bytes(weight.scale) for weight in own]),
        )
    if not isinstance(first, FP8Weight):
        raise RequestError("no such weights are stacked", seen=first.scheme)
    fp8 = [weight for weight in weights if isinstance(weight, FP8Weight)]
    codes = _cat([weight.codes for weight in fp8])
    if first.block is None:
        scales = [weight.scale_float32() for weight in fp8]
        return FP8Weight(codes=codes, scale=_per_row(scales, first.shape[0]))
    if any(w.block != first.block or w.row_offset for w in fp8) or first.shape[0] % first.block[0]:
        raise RequestError(
            "a scale's block spans two experts",
            seen=f"{first.shape[0]} rows, blocks of {first.block}",
            accepted="rows a multiple of the block's",
        )
    return FP8Weight(codes=codes, scale=torch.cat([w.scale_float32() for w in fp8]), block=first.block)


def _packed(
    gate_up: PackedMatrix, down: PackedMatrix, weights: Sequence[Weight], experts: int
) -> PackedExperts:
    return PackedExperts(gate_up=gate_up, down=down, experts=experts, shared=len(weights) > 3 * experts)


def _per_row(scales: Sequence[Tensor], rows: int) -> Tensor:
    """[all rows, 1] float32 of scales [] or [rows, 1]."""
    if len({scale.numel() for scale in scales}) > 1:
        scales = [scale.reshape(-1).expand(rows) for scale in scales]
    return torch.stack([scale.reshape(-1) for scale in scales]).expand(len(scales), rows).reshape(-1, 1)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one byte an element, one behind the other."""
    dtype = tensors[0].dtype
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
