"""What was measured of decoding: four bits a weight are faster than eight and than sixteen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "linear-h200.json"
SHAPES = ("gate_up", "down", "in_qkvz", "attn_qkv", "o_out", "lm_head")
# The kernels that selection picks, cuBLAS on E4M3 operands, cuBLAS on bfloat16 ones.
NVFP4, FP8, BF16 = "vtensors", "scaled_mm_fp8", "cublas_bf16"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int, str], dict[str, Any]]:
    """(shape, M, implementation) -> row of the committed record."""
    if not RECORD.is_file():
        pytest.skip(f"no {RECORD.name} yet: the benchmark was not run on a device")
    found = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    return {(row["shape"], row["m"], row["impl"]): row for row in found}


@pytest.mark.fault("B94")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_nvfp4_decodes_faster_than_fp8_and_than_bfloat16(
    rows: dict[tuple[str, int, str], dict[str, Any]], shape: str, m: int
) -> None:
    four, eight, sixteen = (rows[shape, m, impl]["us"] for impl in (NVFP4, FP8, BF16))
    assert four < eight
    assert four < sixteen


@pytest.mark.fault("B94")
def test_bytes_per_second_stand_beside_every_measured_time(
    rows: dict[tuple[str, int, str], dict[str, Any]],
) -> None:
    for (shape, m, impl), row in rows.items():
        if impl in (NVFP4, FP8, BF16):
            assert row["gb_s"] > 0, (shape, m, impl)
