"""Weights on the reference kernel of a device that could have had better: told once per scheme, or refused."""

from __future__ import annotations

import logging

import pytest

from vtensors.errors import RequestError
from vtensors.records import KernelSpec, Selected
from vtensors_engine.fallbacks import report_fallbacks
from vtensors_plugins.backends import cuda, reference

KERNELS: list[KernelSpec] = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]
REASON = ("linear_nvfp4_widening", "computes in bfloat16 or float16, not float32")


def record(module: str, kernel: str, scheme: str = "nvfp4", op: str = "linear") -> Selected:
    rejected = (REASON,) if kernel.endswith("_reference") else ()
    return Selected(
        module=module,
        op=op,
        scheme=scheme,
        declared="16bit",
        executed="16bit",
        kernel=kernel,
        rejected=rejected,
    )


RECORDS = [
    record("a", "linear_reference"),
    record("b", "linear_reference"),
    record("c", "linear_nvfp4_widening"),
    record("d", "embedding_reference", op="embedding"),
    record("e", "linear_reference", scheme="bf16"),
]


def test_fallbacks_are_told_once_per_scheme_with_their_number_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks(RECORDS, KERNELS, "cuda", refuse=False) == 2
    assert len(caplog.records) == 1
    assert "2 nvfp4 weights" in caplog.text
    assert "linear_reference" in caplog.text
    assert REASON[1] in caplog.text


def test_strict_refuses_them_naming_scheme_and_reason() -> None:
    with pytest.raises(RequestError, match="VT_STRICT=fallbacks") as caught:
        report_fallbacks(RECORDS, KERNELS, "cuda", refuse=True)
    assert REASON[1] in str(caught.value)


def test_the_reference_is_no_fallback_on_a_cpu_nor_where_every_weight_has_a_kernel() -> None:
    assert report_fallbacks(RECORDS, KERNELS, "cpu", refuse=True) == 0
    assert report_fallbacks(RECORDS[2:], KERNELS, "cuda", refuse=True) == 0
