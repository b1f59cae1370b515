"""What the step kernels ask of rows: their shape, dtype and where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from vtensors.errors import RequestError


def check_rows(x: Tensor, width: int | None, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raises RequestError unless x is [rows, width] of the dtype on the device, a row's values side by side.

    Rows may lie any distance apart (columns of a wider matrix). width: None for any from 1.
    """
    fits = x.dim() == 2 and x.dtype == dtype and x.device == device and x.shape[1] == (width or x.shape[1])
    if not fits or not x.shape[1] or (x.shape[1] > 1 and x.stride(1) != 1):
        raise RequestError(
            f"{what} do not fit",
            seen=f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}",
            accepted=f"{dtype} [rows, {width or 'columns'}] on {device}, columns side by side",
        )


def check_vector(x: Tensor, rows: int, dtype: torch.dtype, device: torch.device, what: str) -> None:
    """Raises RequestError unless x is [rows] of the dtype on the device, contiguous."""
    if tuple(x.shape) != (rows,) or x.dtype != dtype or x.device != device or not x.is_contiguous():
        raise RequestError(
            f"{what} do not fit",
            seen=f"{x.dtype} {list(x.shape)} on {x.device}",
            accepted=f"{dtype} [{rows}] on {device}, contiguous",
        )


def device_of(device: torch.device | str) -> torch.device:
    """The CUDA device with its index. Raises RequestError for another kind of device."""
    found = torch.device(device)
    if found.type != "cuda":
        raise RequestError(
            "this kernel runs on a CUDA device", seen=str(found), accepted="cuda, cuda:<index>"
        )
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def row_stride(x: Tensor) -> int:
    """Values between the starts of neighbouring rows."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
