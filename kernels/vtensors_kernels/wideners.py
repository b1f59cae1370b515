"""The kernels that write a quantized matrix in 16 bits, exactly, on a CUDA device; reference: the codecs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_kernels.compiling.functions import compiled_function
from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.launch import Launch, current_stream

THREADS = 256
HALVES = (torch.bfloat16, torch.float16)
# Weights per scale; those of 32 are rare and compiled when asked for.
NVFP4_GROUPS = (16, 32)
INSTANTIATIONS = tuple(
    Instantiation(source=f"common/{name}.cu", function=name, defines={"VT_OUT_F16": as_float16})
    for name in ("dequantize_nvfp4", "widen_fp8")
    for as_float16 in (0, 1)
)


class NVFP4Widener:
    """Writes e2m1(codes) * block_scale, without the global scale, into a matrix given by the caller.

    codes: [N, K // 2] uint8, K a multiple of 16; block_scale: [N, K // 16] or [N, K // 32] float8_e4m3fn; both
    contiguous, on one CUDA device.
    dtype: bfloat16 or float16; every product is exact in either.
    Errors: CompileError without NVRTC, LaunchError from the driver, RequestError for another layout.
    """

    def __init__(self, codes: Tensor, block_scale: Tensor, dtype: torch.dtype) -> None:
        _require(codes, alignment=8, dtype=dtype)
        _require(block_scale, alignment=1, dtype=dtype)
        k, groups = codes.shape[1] * 2, block_scale.shape[1]
        group = next((size for size in NVFP4_GROUPS if size * groups == k), None)
        if group is None or k % 16:
            raise RequestError(
                "the kernel is made for groups of 16 or 32", seen=f"{groups} groups of K = {k}"
            )
        self.codes, self.block_scale = codes, block_scale
        self._blocks = codes.shape[0] * k // 16
        defines = {} if group == 16 else {"VT_GROUP": group}
        self._launch = _launch("dequantize_nvfp4", codes.device, dtype, self._blocks, 4, defines)

    def __call__(self, out: Tensor) -> Tensor:
        """out: [N, K] contiguous, of the dtype; filled on torch's current stream and returned."""
        stream = current_stream(out.device)
        codes, scales = self.codes.data_ptr(), self.block_scale.data_ptr()
        self._launch.call(stream, codes, scales, out.data_ptr(), self._blocks)
        return out


class FP8Widener:
    """Writes e4m3(codes), without any scale, into a matrix given by the caller.

    codes: [N, K] float8_e4m3fn, contiguous, N * K a multiple of 16. dtype and errors as in `NVFP4Widener`.
    """

    def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
        _require(codes, alignment=16, dtype=dtype)
        if codes.numel() % 16:
            raise RequestError("the kernel writes 16 elements at a time", seen=f"{codes.numel()} elements")
        self.codes = codes
        self._vectors = codes.numel() // 16
        self._launch = _launch("widen_fp8", codes.device, dtype, self._vectors, 3)

    def __call__(self, out: Tensor) -> Tensor:
        """out: [N, K] contiguous, of the dtype; filled on torch's current stream and returned."""
        stream = current_stream(out.device)
        self._launch.call(stream, self.codes.data_ptr(), out.data_ptr(), self._vectors)
        return out


def _require(tensor: Tensor, *, alignment: int, dtype: torch.dtype) -> None:
    if dtype not in HALVES:
        raise RequestError("no such output", seen=str(dtype), accepted="torch.bfloat16 or torch.float16")
    if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
        raise RequestError(
            f"codes and scales must be contiguous and aligned to {alignment} bytes",
            seen=f"strides {tensor.stride()}, address {tensor.data_ptr():#x}",
        )


def _launch(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    work: int,
    arguments: int,
    extra: Mapping[str, int] = MappingProxyType({}),
) -> Launch:
    defines = {"VT_OUT_F16": int(dtype == torch.float16), **extra}
    return Launch(
        function=compiled_function(f"common/{name}.cu", name, device.index or 0, defines),
        grid=(-(-work // THREADS), 1, 1),
        block=(THREADS, 1, 1),
        arguments=arguments,
    )
