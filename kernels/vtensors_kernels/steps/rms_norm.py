"""RMSNorm of rows by one kernel; reference: `reference/rms_norm.py`.

Bit for bit the norm that `linear_nvfp4_stream` and `linear_fp8_stream` compute in front of a linear, so that a norm
may be computed either way and results stay the same.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import attrs
import torch
from torch import Tensor

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.arguments import output_for
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream, float_bits, may_depend
from vtensors_kernels.dtypes import dtype_defines
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.steps.rows import device_of

SOURCE, FUNCTION = "common/rms_norm.cu", "rms_norm"
MAX_COLUMNS = 16384
# Chunks of eight columns of a thread, and the most columns that are cut in such.
NORM_CHUNKS = ((1, 2048), (2, 8192), (4, MAX_COLUMNS))
_READY = 4096
# An output rounds to 8 or 11 bits; the sums differ by far less.
TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

INSTANTIATIONS = tuple(
    Instantiation(
        source=SOURCE,
        function=FUNCTION,
        defines={"VT_F16": f16, "VT_CHUNKS": chunks},
        hot=True,
        shared_bytes=2 * most,
    )
    for f16, (chunks, most) in product((0, 1), NORM_CHUNKS)
)


@attrs.frozen(kw_only=True)
class NormForm:
    """How rows of so many columns are cut. chunks: of eight columns, of a thread. threads: of a block."""

    chunks: int
    threads: int
    shared_bytes: int

    @staticmethod
    def serves(columns: int) -> bool:
        """Whether there is a form for rows of so many columns."""
        return 8 <= columns <= MAX_COLUMNS and columns % 8 == 0

    @classmethod
    def of(cls, columns: int) -> NormForm:
        """Raises RequestError unless columns is a multiple of 8 up to 16384."""
        if not cls.serves(columns):
            raise RequestError(
                "there is no norm kernel for rows of that length",
                seen=str(columns),
                accepted=f"a multiple of 8, 8 .. {MAX_COLUMNS}",
            )
        chunks = next(chunks for chunks, most in NORM_CHUNKS if columns <= most)
        threads = -(-columns // (8 * chunks))
        return cls(chunks=chunks, threads=-(-threads // 32) * 32, shared_bytes=2 * columns)


class RMSNormKernel:
    """x / rms(x) * gain in float32, rounded once.

    gain: [D] float32 on a CUDA device, D a multiple of 8 up to 16384. dtype: bfloat16 or float16.
    Errors: RequestError for others; CompileError, LaunchError.
    """

    def __init__(self, gain: Tensor, eps: float, dtype: torch.dtype) -> None:
        if gain.dim() != 1 or gain.dtype != torch.float32:
            raise RequestError("a norm's gain is float32 [D]", seen=f"{gain.dtype} {list(gain.shape)}")
        self._f16, self._dtype, self._columns = dtype_defines(dtype)["VT_F16"], dtype, gain.shape[0]
        self._form = NormForm.of(self._columns)
        self._device = device_of(gain.device)
        self._gain = gain.contiguous() if gain.data_ptr() % 16 == 0 else gain.clone()
        self._eps = float_bits(eps)
        self._launch(1)
        # The kernel reads the gain before it waits for its predecessor, so it must be there for good.
        torch.cuda.current_stream(self._device).synchronize()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The shape of x [..., D], which is of the dtype; out: contiguous, to write into.

        A row's bits depend on the row alone. Errors: RequestError for another x or out.
        """
        if not x.dim() or x.shape[-1] != self._columns or x.dtype != self._dtype or x.device != self._device:
            raise RequestError(
                "the input does not fit the norm",
                seen=f"{x.dtype} {list(x.shape)} on {x.device}",
                accepted=f"{self._dtype} [..., {self._columns}] on {self._device}",
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self._columns)
        count = rows.shape[0]
        out = output_for(x, tuple(x.shape), self._dtype, out)
        if not count:
            return out
        stride = rows.stride(0) if count > 1 else self._columns
        if rows.stride(1) != 1 or stride % 8 or rows.data_ptr() % 16:
            rows, stride = rows.clone(memory_format=torch.contiguous_format), self._columns
        self._launch(count).call(
            current_stream(self._device),
            rows.data_ptr(),
            self._gain.data_ptr(),
            out.data_ptr(),
            stride,
            self._columns,
            self._eps,
        )
        return out

    def _launch(self, rows: int) -> Launch:
        return _launch(self._device.index or 0, self._f16, self._columns, rows)


def norm_rows(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain, in x's dtype and shape: by the kernel where it serves x, else as the reference does.

    x: [..., D]. gain: [D] float32. For calls that bring their gain, which has lain there for longer than a kernel.
    The first call for a length and dtype runs the self-test, which a graph capture does not allow.
    """
    columns = x.shape[-1]
    whole = x.is_cuda and x.is_contiguous() and x.numel() > 0 and x.data_ptr() % 16 == 0
    fits = whole and gain.is_contiguous() and gain.data_ptr() % 16 == 0 and gain.dtype == torch.float32
    if not fits or why_no_norm_kernel(columns, x.dtype, x.device) is not None:
        return rms_norm(x, gain, eps, zero_centered=False)
    out = torch.empty_like(x)
    f16, rows = int(x.dtype == torch.float16), x.numel() // columns
    _launch(x.device.index or 0, f16, columns, rows).call(
        current_stream(x.device),
        x.data_ptr(),
        gain.data_ptr(),
        out.data_ptr(),
        columns,
        columns,
        float_bits(eps),
    )
    return out


@lru_cache(maxsize=256)
def why_no_norm_kernel(columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel does not serve rows of so many columns on the device, None where its self-test passes.

    Tested once in a process.
    """
    try:
        probe_rms_norm(columns, 1e-6, dtype, device)
    except PLUGIN_FAILURES as problem:  # without CuPy or cuda-bindings there are errors of theirs
        return str(problem).partition("\n")[0]
    return None


@lru_cache(maxsize=_READY)
def _launch(device_index: int, f16: int, columns: int, rows: int) -> Launch:
    """Shared by all norms of a model: what differs between them comes with each call."""
    form = NormForm.of(columns)
    defines = {"VT_F16": f16, "VT_CHUNKS": form.chunks}
    function = compiled_function(SOURCE, FUNCTION, device_index, defines, form.shared_bytes)
    return Launch(
        function=function,
        grid=(rows, 1, 1),
        block=(form.threads, 1, 1),
        arguments=6,
        shared_bytes=form.shared_bytes,
        dependent=may_depend(function),
    )


def probe_rms_norm(columns: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
    """Raises VtensorsError where the kernel differs from the reference, or a row from itself in a batch."""
    angles = torch.linspace(-3, 3, 5 * columns, dtype=torch.float64) * 1e4
    # Rows of different sizes; some outputs are small.
    x = (
        (angles.cos().reshape(5, columns) * torch.tensor([[1.0], [30.0], [1e-3], [1.0], [7.0]]))
        .to(dtype)
        .to(device)
    )
    gain = torch.linspace(-0.5, 1.5, columns).to(device)
    kernel = RMSNormKernel(gain, eps, dtype)
    ours = kernel(x, out=torch.full_like(x, float("nan")))
    wanted = rms_norm(x.float(), gain, eps, zero_centered=False)
    error = float(((ours.float() - wanted).abs() / (wanted.abs() + 2.0**-14)).max())
    if not error <= TOLERANCES[dtype]:
        raise VtensorsError(
            "the self-test failed: rms_norm",
            seen=f"relative error {error:.1e}",
            accepted=f"{TOLERANCES[dtype]:.1e}",
        )
    alone = torch.cat([kernel(row.unsqueeze(0)) for row in x])
    if not torch.equal(alone, ours):
        raise VtensorsError("the self-test failed: a normed row differs from itself in a batch")
