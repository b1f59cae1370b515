"""Marlin's times where its kernels cannot be had: measured earlier, scaled by cuBLAS of the run at hand."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "marlin-published.json"


def scaled_marlin_us(shape: str, m: int, cublas_us: float) -> float | None:
    """Marlin's published microseconds times cublas_us over cuBLAS's published ones; None where none were published."""
    times = _published()["shapes"].get(shape)
    if times is None or str(m) not in times["marlin_nvfp4"]:
        return None
    return float(times["marlin_nvfp4"][str(m)] * cublas_us / times["cublas_bf16"][str(m)])


@lru_cache(maxsize=1)
def _published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
