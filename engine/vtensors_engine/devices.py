"""Device and dtype of a model: what the user said, or the default."""

from __future__ import annotations

import torch

from vtensors.errors import RequestError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device to run on. None: `cuda` where torch has one, else `cpu`.

    Raises RequestError for a word that is no device and for CUDA where there is none.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise RequestError(
            "there is no such device",
            seen=f"device={device!r}",
            accepted="cpu, cuda or cuda:<index>",
            fix="name one of these",
        ) from cause
    if found.type not in ("cpu", "cuda"):
        raise RequestError(
            "models do not run on this device",
            seen=f"device={device!r}",
            accepted="cpu, cuda or cuda:<index>",
            fix="name one of these",
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            "torch finds no CUDA device",
            seen=f"device={device!r}, torch {torch.__version__}",
            accepted="cpu",
            fix="install a CUDA build of torch and a driver that fits it",
        )
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise RequestError(
            "there is no such CUDA device",
            seen=f"device={device!r}",
            accepted=f"an index below {torch.cuda.device_count()}",
            fix="name one of these",
        )
    return found


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """The dtype to compute in. None: float32 on a CPU; on CUDA None stays, the checkpoint's own dtype.

    A name such as `bfloat16` (or `torch.bfloat16`) will do. Raises RequestError for any other.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise RequestError(
            "models do not compute in this dtype",
            seen=f"dtype={dtype!r}",
            accepted=", ".join(DTYPES),
            fix="name one of these",
        )
    return found
