"""The largest logit of each row becomes its next token, and its position moves on; `reference/next_token.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.next_token import next_token
from vtensors_kernels.steps.rows import check_rows, check_vector, device_of, row_stride

SOURCE, FUNCTION = "common/next_token.cu", "next_token"
THREADS = 256
# Rows that one launch advances; columns that a block should have at least, and most blocks of a row.
MAX_ROWS, _COLUMNS_OF_BLOCK, MAX_BLOCKS = 512, THREADS * 8 * 4, 64

INSTANTIATIONS = tuple(
    Instantiation(source=SOURCE, function=FUNCTION, defines={"VT_F16": f16}, hot=True) for f16 in (0, 1)
)


def blocks_of(columns: int) -> int:
    """Blocks that read one row of so many columns."""
    return min(MAX_BLOCKS, -(-columns // _COLUMNS_OF_BLOCK))


class NextToken:
    """call(logits, tokens, positions, steps, largest): what greedy decoding does behind the head.

    dtype: of the logits, bfloat16 or float16. device: CUDA. The object's own counters make two calls on two streams
    at a time wrong. Errors: RequestError; CompileError, LaunchError.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device_of(device), dtype
        self._function = compiled_function(SOURCE, FUNCTION, self._device.index or 0, dtype_defines(dtype))
        self._partial = torch.empty(MAX_ROWS, MAX_BLOCKS, dtype=torch.int64, device=self._device)
        self._counters = torch.zeros(MAX_ROWS, dtype=torch.int32, device=self._device)
        self._launches: dict[tuple[int, int], Launch] = {}
        torch.cuda.current_stream(self._device).synchronize()

    def __call__(
        self, logits: Tensor, tokens: Tensor, positions: Tensor, steps: Tensor, largest: Tensor
    ) -> None:
        """Takes the index of the largest logit of every row, the lowest among equal ones.

        logits: [B, V] of the dtype, rows any distance apart. steps: [B] int32; where it is not 0 tokens [B] int64
        becomes the index. positions: [B] int32, steps are added. largest: [B] float32 becomes the logit.
        NaN ranks above every number: a row with one gives the first one's index and NaN.
        """
        check_rows(logits, None, self._dtype, self._device, "logits")
        rows, columns = logits.shape
        check_vector(tokens, rows, torch.int64, self._device, "tokens")
        check_vector(positions, rows, torch.int32, self._device, "positions")
        check_vector(steps, rows, torch.int32, self._device, "steps")
        check_vector(largest, rows, torch.float32, self._device, "largest logits")
        stream = current_stream(self._device)
        for first in range(0, rows, MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            self._launch(min(MAX_ROWS, rows - first), blocks_of(columns)).call(
                stream,
                logits[part].data_ptr(),
                tokens[part].data_ptr(),
                positions[part].data_ptr(),
                steps[part].data_ptr(),
                largest[part].data_ptr(),
                self._partial.data_ptr(),
                self._counters.data_ptr(),
                row_stride(logits),
                columns,
            )

    def _launch(self, rows: int, blocks: int) -> Launch:
        if (rows, blocks) not in self._launches:
            self._launches[rows, blocks] = _made(self._function, rows, blocks)
        return self._launches[rows, blocks]


def _made(function: DeviceFunction, rows: int, blocks: int) -> Launch:
    return Launch(
        function=function,
        grid=(blocks, rows, 1),
        block=(THREADS, 1, 1),
        arguments=9,
        dependent=may_depend(function),
    )


def probe_next_token(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises VtensorsError where the kernel differs from the reference on rows of that length, twice in a row."""
    angles = torch.linspace(-3, 3, 6 * columns, dtype=torch.float64) * 1e4
    logits = angles.cos().reshape(6, columns).to(dtype)
    logits[1] = float("nan")
    logits[2, columns // 3] = float("nan")
    logits[3, columns // 2 :] = logits[3].max()
    logits[4] = float("-inf")
    steps = torch.tensor([1, 1, 1, 0, 1, 0], dtype=torch.int32)

    def state() -> tuple[Tensor, Tensor, Tensor]:
        return torch.arange(6) - 9, torch.arange(6, dtype=torch.int32), torch.full((6,), 5.0)

    wanted = state()
    next_token(logits, wanted[0], wanted[1], steps, wanted[2])
    kernel, on_device = NextToken(device, dtype), logits.to(device)
    for _ in range(2):
        tokens, positions, largest = (part.to(device) for part in state())
        kernel(on_device, tokens, positions, steps.to(device), largest)
        found = (tokens.cpu(), positions.cpu(), largest.cpu())
        for ours, theirs, what in zip(found, wanted, ("token", "position", "logit"), strict=True):
            if not torch.equal(ours.nan_to_num(nan=-7), theirs.nan_to_num(nan=-7)):
                raise VtensorsError(f"the self-test failed: next_token gives another {what}")
