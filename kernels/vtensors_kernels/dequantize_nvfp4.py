"""The `dequantize_nvfp4` kernel: NVFP4 codes and block scales to an exact 16-bit matrix on a CUDA device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors.plugin_candidates import own_version
from vtensors_kernels.compiling.architectures import target_of
from vtensors_kernels.compiling.cubin_cache import CubinCache, cache_key, default_cache_folder
from vtensors_kernels.compiling.launch import DeviceFunction, Launch, load_function
from vtensors_kernels.compiling.nvrtc import CompileError, compile_source, find_toolkit, options_of
from vtensors_kernels.compiling.sources import load_source

SOURCE = "common/dequantize_nvfp4.cu"
THREADS = 256


class DequantizeNVFP4:
    """Writes e2m1(codes) * block_scale, without the global scale, into a matrix given by the caller.

    codes: [N, K // 2] uint8; block_scale: [N, K // 16] float8_e4m3fn; both contiguous, 16-byte aligned, on one
    CUDA device. dtype: bfloat16 or float16; every product is exact in either.
    Errors: CompileError without NVRTC, LaunchError from the driver, RequestError for another layout.
    """

    def __init__(self, codes: Tensor, block_scale: Tensor, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise RequestError("no such output", seen=str(dtype), accepted="torch.bfloat16 or torch.float16")
        if not (codes.is_contiguous() and block_scale.is_contiguous() and codes.data_ptr() % 8 == 0):
            raise RequestError(
                "codes and block scales must be contiguous and aligned to 8 bytes",
                seen=f"strides {codes.stride()} and {block_scale.stride()}, address {codes.data_ptr():#x}",
            )
        self.codes, self.block_scale, self.dtype = codes, block_scale, dtype
        self.shape = (codes.shape[0], codes.shape[1] * 2)
        self._blocks = block_scale.numel()
        self._launch = Launch(
            function=_function(codes.device.index or 0, dtype == torch.float16),
            grid=(-(-self._blocks // THREADS), 1, 1),
            block=(THREADS, 1, 1),
            arguments=4,
        )

    def __call__(self, out: Tensor) -> Tensor:
        """out: [N, K] contiguous, of the dtype; filled on torch's current stream and returned."""
        self._launch.call(
            torch.cuda.current_stream(out.device).cuda_stream,
            self.codes.data_ptr(),
            self.block_scale.data_ptr(),
            out.data_ptr(),
            self._blocks,
        )
        return out


@lru_cache(maxsize=32)
def _function(device: int, as_float16: bool) -> DeviceFunction:
    """The kernel on that device, compiled for its target or taken from the cubin cache."""
    toolkit = find_toolkit()
    if isinstance(toolkit, str):
        raise CompileError(toolkit)
    target = target_of(torch.cuda.get_device_capability(device))
    source, defines = load_source(SOURCE), {"VT_OUT_F16": int(as_float16)}
    key = cache_key(source.text, options_of(target, defines), toolkit.name, own_version())
    image, _ = CubinCache(folder=default_cache_folder() / "cubin").get(
        key, lambda: compile_source(source, target, defines, toolkit)
    )
    with torch.cuda.device(device):
        return load_function(image, "dequantize_nvfp4", target)
