"""NVFP4 linears that read the weight as stored, without a second copy of it: a few tokens, any CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.alignment import aligned
from vtensors_kernels.arguments import check_x, output_for, scaled_x
from vtensors_kernels.compiling.functions import Wanted, compile_many, compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.nvfp4.repack import row_scale
from vtensors_kernels.packed_tiles import column_steps, row_tiles

SOURCE = "common/linear_nvfp4_stored.cu"
PICK_SOURCE = "common/pick_largest.cu"
MAX_TOKENS = 64
MAX_COLUMNS = 1 << 28
_PICK_THREADS = 256
_WARPS = (4, 8, 16)


def _form(
    *, f16: int, tiles: int, warps: int, argmax: int = 0, group: int = 16, wide: int = 1
) -> dict[str, int]:
    return {
        "VT_F16": f16,
        "VT_TOKEN_TILES": tiles,
        "VT_WARPS": warps,
        "VT_ARGMAX": argmax,
        "VT_GROUP": group,
        "VT_WIDE": wide,
    }


def token_tiles_of(warps: int) -> tuple[int, ...]:
    """Tiles of 8 tokens that a block of so many warps may hold: what its registers allow."""
    return (1, 2, 4) if warps <= 8 else (1, 2)


# Every size in both formats; the rarer forms (argmax, groups of 32, K of half groups) in one size.
INSTANTIATIONS = (
    *(
        Instantiation(
            source=SOURCE,
            function="linear_nvfp4_stored",
            defines=form,
            hot=True,
            expects=("mma", "e2m1") if form["VT_F16"] else ("mma",),
        )
        for form in (
            *(
                _form(f16=f16, tiles=tiles, warps=warps)
                for f16, warps in product((0, 1), _WARPS)
                for tiles in token_tiles_of(warps)
            ),
            *(
                _form(f16=f16, tiles=1, warps=8, argmax=argmax, group=group, wide=wide)
                for f16, (argmax, group, wide) in product((0, 1), ((1, 16, 1), (0, 32, 1), (0, 16, 0)))
            ),
        )
    ),
    Instantiation(source=PICK_SOURCE, function="pick_largest", hot=True),
)


def bind_linear(
    weight: NVFP4Weight, dtype: torch.dtype, *, max_tokens: int = MAX_TOKENS, warps: int | None = None
) -> Callable[..., Tensor]:
    """call(x [M, K] of the dtype, M <= 64, out=None) -> [M, N] = x * pre_scale @ W.T + bias, rounded once.

    weight: on a CUDA device; any N, K a multiple of 16, groups of 16 or 32, scale or divisor, per tensor or row.
    dtype: bfloat16 or float16. max_tokens: the largest M that will come; forms for more are not compiled.
    warps: as `warps_for` gives for the shape, or another of 4, 8, 16. out: [M, N] contiguous, to write into.
    A row of the result is the same bits at any M, place and neighbours.
    Errors: RequestError for another dtype, device or x; CompileError, LaunchError.
    """
    return _StoredLinear.make(weight, dtype, max_tokens=max_tokens, warps=warps, argmax=False).call


def bind_linear_argmax(
    weight: NVFP4Weight, dtype: torch.dtype, *, max_tokens: int = MAX_TOKENS, warps: int | None = None
) -> Callable[..., Tensor]:
    """call(x [M, K] of the dtype, M <= 64, out=None) -> [M] int64: the row of the largest y.

    After rounding to the dtype; the lowest row among equals, 0 and -0 counting as equal. Otherwise as `bind_linear`.
    """
    return _StoredLinear.make(weight, dtype, max_tokens=max_tokens, warps=warps, argmax=True).call_argmax


def warps_for(n: int, k: int) -> int:
    """Warps that split K: of the shape alone, so that a row's bits depend on nothing else.

    More where rows are few, so that every SM has enough loads under way; no more than there are steps.
    """
    steps = column_steps(k)
    if steps <= 4:
        return 4
    return 16 if steps >= 16 and row_tiles(n) <= 264 else 8


class LargestPicker:
    """Turns the keys of an argmax kernel into rows, for up to max_tokens tokens on one CUDA device."""

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        function = compiled_function(PICK_SOURCE, "pick_largest", device.index or 0, {})
        self._launches = tuple(
            Launch(
                function=function,
                grid=(tokens, 1, 1),
                block=(_PICK_THREADS, 1, 1),
                arguments=3,
                dependent=may_depend(function),
            )
            for tokens in range(1, max_tokens + 1)
        )

    def __call__(self, keys: Tensor, ids: Tensor) -> None:
        """Fills ids [M] int64 from keys [M, count] int64, M >= 1.

        A key, read as unsigned, is the order of a value << 32 | 2^32 - 1 - row.
        """
        stream = current_stream(keys.device)
        launch = self._launches[keys.shape[0] - 1]
        launch.call(stream, keys.data_ptr(), ids.data_ptr(), keys.shape[1])


@attrs.frozen(kw_only=True)
class _StoredLinear:
    """One weight and its launches. forms: (most tokens, launch), ascending; more tokens take the last."""

    weight: NVFP4Weight
    codes: Tensor
    block_scale: Tensor
    row_scale: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    max_tokens: int
    forms: tuple[tuple[int, tuple[Launch, ...]], ...]
    pick: LargestPicker | None

    @classmethod
    def make(
        cls, weight: NVFP4Weight, dtype: torch.dtype, *, max_tokens: int, warps: int | None, argmax: bool
    ) -> _StoredLinear:
        """Compiles the forms that max_tokens asks for, in threads."""
        (n, k), device = weight.shape, weight.device
        if device.type != "cuda" or not n or not 0 < k < MAX_COLUMNS or not 1 <= max_tokens <= MAX_TOKENS:
            raise RequestError(
                "this kernel cannot serve the weight",
                seen=f"{n} x {k} on {device}, up to {max_tokens} tokens",
                accepted=f"rows, K of 1 .. {MAX_COLUMNS - 1} on a CUDA device, 1 .. {MAX_TOKENS} tokens",
            )
        f16, warps = dtype_defines(dtype)["VT_F16"], warps or warps_for(n, k)
        wide = int(k % 32 == 0)
        scale = row_scale(weight)
        forms: list[tuple[int, tuple[Launch, ...]]] = []
        sizes = [t for t in token_tiles_of(warps) if t == 1 or 4 * t < max_tokens]
        wanted = [
            Wanted(
                source=SOURCE,
                name="linear_nvfp4_stored",
                defines=tuple(
                    _form(
                        f16=f16, tiles=t, warps=warps, argmax=int(argmax), group=weight.group, wide=wide
                    ).items()
                ),
            )
            for t in sizes
        ]
        for tiles, function in zip(sizes, compile_many(wanted, device.index or 0), strict=True):
            blocks = -(-row_tiles(n) // (2 if tiles == 4 else 1))
            most = max_tokens if tiles == sizes[-1] else 8 * tiles
            # One launch per number of groups of tokens: the grid is part of it.
            launches = tuple(
                Launch(
                    function=function,
                    grid=(groups * blocks, 1, 1),
                    block=(32 * warps, 1, 1),
                    arguments=11,
                    dependent=may_depend(function),
                )
                for groups in range(1, -(-most // (8 * tiles)) + 1)
            )
            forms.append((8 * tiles, launches))
        made = cls(
            weight=weight,
            codes=aligned(weight.codes, 16 if wide else 8),
            block_scale=aligned(weight.block_scale, 2),
            row_scale=scale[:1].contiguous() if _one_for_all(weight) else scale.contiguous(),
            bias=None if weight.bias is None else weight.bias.float().contiguous(),
            dtype=dtype,
            max_tokens=max_tokens,
            forms=tuple(forms),
            pick=LargestPicker(device, max_tokens) if argmax else None,
        )
        # The kernel reads weights before it waits for its predecessor, so they must be there for good.
        torch.cuda.current_stream(device).synchronize()
        return made

    def call(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[M, N] in the dtype."""
        x = self._checked(x)
        out = output_for(x, (x.shape[0], self.weight.shape[0]), self.dtype, out)
        if x.shape[0]:
            self._launch(x, out.data_ptr(), 0)
        return out

    def call_argmax(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[M] int64."""
        x = self._checked(x)
        tokens, tiles, device = x.shape[0], row_tiles(self.weight.shape[0]), x.device
        ids = output_for(x, (tokens,), torch.int64, out)
        if tokens and self.pick is not None:
            keys = torch.empty(tokens, tiles, dtype=torch.int64, device=device)
            self._launch(x, 0, keys.data_ptr())
            self.pick(keys, ids)
        return ids

    def _checked(self, x: Tensor) -> Tensor:
        check_x(x, k=self.weight.shape[1], dtype=self.dtype)
        if x.shape[0] > self.max_tokens:
            raise RequestError(
                "too many tokens for this kernel", seen=str(x.shape[0]), accepted=f"at most {self.max_tokens}"
            )
        return aligned(scaled_x(x, self.weight.pre_scale), 16)

    def _launch(self, x: Tensor, out: int, keys: int) -> None:
        tokens, (n, k) = x.shape[0], self.weight.shape
        size, launches = next((form for form in self.forms if tokens <= form[0]), self.forms[-1])
        launch = launches[(tokens - 1) // size]
        bias = 0 if self.bias is None else self.bias.data_ptr()
        launch.call(
            current_stream(x.device),
            self.codes.data_ptr(),
            self.block_scale.data_ptr(),
            self.row_scale.data_ptr(),
            bias,
            x.data_ptr(),
            out,
            keys,
            n,
            k,
            tokens,
            int(self.row_scale.numel() > 1),
        )


def _one_for_all(weight: NVFP4Weight) -> bool:
    stored = weight.global_scale if weight.global_scale is not None else weight.global_divisor
    return stored is not None and stored.numel() == 1
