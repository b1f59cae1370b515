"""The next token of each row drawn from its logits at a given point; `reference/sample_token.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.sample_token import SETTINGS, kept_masses, sample_token
from vtensors_kernels.steps.rows import check_rows, check_vector, device_of, row_stride

SOURCE, FUNCTION = "common/sample_token.cu", "sample_token"
THREADS, SHARED_BYTES = 1024, 4 * 16384
# Beyond it the sum of all masses would not fit into 63 bits.
MAX_COLUMNS = 1 << 18

INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE, function=FUNCTION, defines={"VT_F16": f16}, hot=True, shared_bytes=SHARED_BYTES
    )
    for f16 in (0, 1)
)


class SampleToken:
    """call(logits, settings, largest, steps, tokens): what follows `NextToken` for the rows that are sampled.

    dtype: of the logits, bfloat16 or float16. device: CUDA. Errors: RequestError; CompileError, LaunchError.
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device_of(device), dtype
        self._function = compiled_function(
            SOURCE, FUNCTION, self._device.index or 0, dtype_defines(dtype), SHARED_BYTES
        )
        self._launches: dict[int, Launch] = {}

    def __call__(
        self, logits: Tensor, settings: Tensor, largest: Tensor, steps: Tensor, tokens: Tensor
    ) -> None:
        """Draws tokens[b] where settings[b] has a temperature above 0, steps[b] is not 0 and largest[b] is finite.

        logits: [B, V] of the dtype, V at most 262,144, rows any distance apart. settings: [B, 5] float64, contiguous:
        temperature, top_k (0 is off), top_p (1 is off), min_p, point in [0, 1). largest: [B] float32, the largest
        logit of each row, as `NextToken` leaves it. steps: [B] int32. tokens: [B] int64.
        A row's token is the same whatever B, its place and its neighbours are: sums are of integers.
        """
        check_rows(logits, None, self._dtype, self._device, "logits")
        rows, columns = logits.shape
        if columns > MAX_COLUMNS:
            raise RequestError(
                "the vocabulary is too large to be drawn from",
                seen=f"{columns} logits",
                accepted=f"at most {MAX_COLUMNS}",
            )
        check_rows(settings, len(SETTINGS), torch.float64, self._device, "settings")
        if settings.shape[0] != rows or not settings.is_contiguous():
            raise RequestError(
                "settings do not fit",
                seen=f"{list(settings.shape)}, strides {settings.stride()}",
                accepted=f"[{rows}, {len(SETTINGS)}], contiguous",
            )
        check_vector(largest, rows, torch.float32, self._device, "largest logits")
        check_vector(steps, rows, torch.int32, self._device, "steps")
        check_vector(tokens, rows, torch.int64, self._device, "tokens")
        if rows:
            self._launch(rows).call(
                current_stream(self._device),
                logits.data_ptr(),
                settings.data_ptr(),
                largest.data_ptr(),
                steps.data_ptr(),
                tokens.data_ptr(),
                row_stride(logits),
                columns,
            )

    def _launch(self, rows: int) -> Launch:
        if rows not in self._launches:
            self._launches[rows] = Launch(
                function=self._function,
                grid=(rows, 1, 1),
                block=(THREADS, 1, 1),
                arguments=7,
                shared_bytes=SHARED_BYTES,
                dependent=may_depend(self._function),
            )
        return self._launches[rows]


def probe_sample_token(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises VtensorsError where the kernel differs from the reference on rows of that length, twice in a row.

    Points lie in the midst of what a token has, so that the last bit of an exponential decides nothing.
    """
    settings = torch.tensor(
        [
            [1.0, 0, 1.0, 0.0, 0.0],
            [0.5, 0, 1.0, 0.0, 0.0],
            [1.0, 7, 1.0, 0.0, 0.0],
            [2.0, 0, 0.9, 0.0, 0.0],
            [1.0, 40, 0.8, 0.05, 0.0],
            [0.0, 0, 1.0, 0.0, 0.5],
        ],
        dtype=torch.float64,
    )
    rows = len(settings)
    angles = torch.linspace(-3, 3, rows * columns, dtype=torch.float64) * 1e4
    logits = (angles.cos().reshape(rows, columns) * 8).to(dtype)
    for row in range(rows - 1):
        masses = kept_masses(logits[row], settings[row])
        # The most probable of the second half of the ids, or of all.
        later = masses[columns // 2 :]
        token = int(later.argmax()) + columns // 2 if later.any() else int(masses.argmax())
        middle = int(masses[:token].sum()) + int(masses[token]) // 2
        settings[row, 4] = middle / int(masses.sum())
    largest, steps = logits.amax(-1).float(), torch.ones(rows, dtype=torch.int32)
    wanted = torch.full((rows,), -1)
    sample_token(logits, settings, largest, steps, wanted)
    kernel = SampleToken(device, dtype)
    own = [part.to(device) for part in (logits, settings, largest, steps)]
    for _ in range(2):
        tokens = torch.full((rows,), -1, device=device)
        kernel(own[0], own[1], own[2], own[3], tokens)
        if not torch.equal(tokens.cpu(), wanted):
            raise VtensorsError(
                "the self-test failed: sample_token draws another token",
                seen=str(tokens.tolist()),
                accepted=str(wanted.tolist()),
            )
