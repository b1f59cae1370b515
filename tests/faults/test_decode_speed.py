"""What was measured of decoding: four bits a weight are faster than eight and than sixteen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORD, FP8_RECORD = RESULTS / "linear-h200.json", RESULTS / "linear-fp8-h200.json"
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
@pytest.mark.parametrize("shape", ["gate_up", "in_qkvz", "o_out"])
@pytest.mark.parametrize("m", [1, 8])
def test_fp8_weights_with_16_bit_activations_lie_between(
    rows: dict[tuple[str, int, str], dict[str, Any]], shape: str, m: int
) -> None:
    if not FP8_RECORD.is_file():
        pytest.skip(f"no {FP8_RECORD.name} yet: the benchmark was not run on a device")
    (eight,) = (
        row["us"]
        for row in json.loads(FP8_RECORD.read_text(encoding="utf-8"))["rows"]
        if (row["shape"], row["m"], row["impl"]) == (shape, m, "vtensors_fp8")
    )
    assert rows[shape, m, NVFP4]["us"] < eight < rows[shape, m, BF16]["us"]


@pytest.mark.fault("B94")
def test_bytes_per_second_stand_beside_every_measured_time(
    rows: dict[tuple[str, int, str], dict[str, Any]],
) -> None:
    for (shape, m, impl), row in rows.items():
        if impl in (NVFP4, FP8, BF16):
            assert row["gb_s"] > 0, (shape, m, impl)
