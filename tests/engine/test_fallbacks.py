"""Weights on the reference kernel of a device that could have had better: told once per scheme, or refused."""

from __future__ import annotations

import logging

import attrs
import pytest

from vtensors.errors import RequestError
from vtensors.kernel_rules import KernelRules
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


def test_the_reference_for_some_rows_only_is_told_with_these_rows(caplog: pytest.LogCaptureFixture) -> None:
    kernels = ((1, 64, "linear_nvfp4_widening"), (65, None, "linear_reference"))
    partly = attrs.evolve(record("a", "linear_nvfp4_widening"), kernels=kernels)
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks([partly], KERNELS, "cuda", refuse=False) == 1
    assert "1 nvfp4 weight with 16bit activations runs on linear_reference at M >= 65" in caplog.text


def test_a_kernel_that_failed_is_told_on_any_device_with_what_took_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = (("linears_fast", "failed to bind: RuntimeError: no image"),)
    records = [attrs.evolve(r, not_fused=why, rejected=()) for r in RECORDS[:3]]
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks(records, KERNELS, "cpu", refuse=False) == 3
    assert caplog.messages == [
        "fallback: linears_fast failed to bind: RuntimeError: no image; "
        "3 weights run on linear_nvfp4_widening and linear_reference"
    ]
    with pytest.raises(RequestError, match="linears_fast failed to bind"):
        report_fallbacks(records, KERNELS, "cpu", refuse=True)


def test_a_kernel_that_the_user_asks_for_in_vain_is_told_and_refused() -> None:
    rules = KernelRules.parse("*:linear_nvfp4_widening", KERNELS, ["nvfp4", "bf16"])
    with pytest.raises(RequestError, match=r"'\*:linear_nvfp4_widening' has no kernel for bf16 weights"):
        report_fallbacks(RECORDS, KERNELS, "cpu", refuse=True, rules=rules)


@pytest.mark.parametrize("rule", ["fp8-row:!linear_reference", "fp8-row:linear_reference"])
def test_a_rule_for_a_scheme_that_is_not_there_is_told_and_no_fallback(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = KernelRules.parse(rule, KERNELS, ["fp8-row"])
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks(RECORDS, KERNELS, "cpu", refuse=True, rules=rules) == 0
    assert caplog.messages == [f"VT_KERNELS: '{rule}' matches no scheme of this model"]
