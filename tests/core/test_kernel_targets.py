"""Targets: exactly one capability, a family, every CUDA device, every device."""

from __future__ import annotations

import logging

import pytest

from kernel_specs import chosen, kernel, reference, request
from vtensors.kernel_targets import (
    KNOWN_CAPABILITIES,
    needed_targets,
    problem_with_target,
    specificity,
    tell_unknown,
)
from vtensors.selection import plan_kernels
from vtensors_kernels.compiling.architectures import TARGETS

CPU = request(capability=None)


def test_every_capability_with_a_compile_target_of_its_own_is_known() -> None:
    assert set(KNOWN_CAPABILITIES) <= set(TARGETS)
    assert {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)} <= set(KNOWN_CAPABILITIES)


@pytest.mark.parametrize(
    ("target", "capability", "serves"),
    [
        ("cpu", None, True),
        ("portable", None, True),
        ("cuda", None, False),
        ("sm_90a", None, False),
        ("cpu", (9, 0), False),
        ("portable", (9, 0), True),
        ("cuda", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90", (9, 0), True),
        ("sm_100a", (9, 0), False),
        ("sm_120f", (12, 0), True),
        ("sm_120f", (12, 1), True),
        ("sm_121f", (12, 0), False),
        ("sm_120a", (12, 1), False),
        ("sm_121a", (12, 1), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_103f", (10, 0), False),
        ("sm_100f", (11, 0), False),
        ("sm_110a", (11, 0), True),
        ("sm_120f", (13, 0), False),
        ("cuda", (13, 0), True),
        ("portable", (13, 0), True),
        ("sm_130a", (13, 0), True),
        ("sm_12", (1, 2), True),
        ("sm_1x", (12, 0), False),
    ],
)
def test_a_target_serves_its_own_devices(
    target: str, capability: tuple[int, int] | None, serves: bool
) -> None:
    found = specificity((target,), request(capability=capability))
    assert (found is not None) is serves


def test_closer_targets_come_first_whatever_their_order() -> None:
    closeness = [
        specificity((t,), request(capability=(12, 1))) for t in ("sm_121a", "sm_120f", "cuda", "portable")
    ]
    assert closeness == [0, 1, 2, 3]
    assert specificity(("portable", "sm_120f", "cuda"), request(capability=(12, 1))) == 1


@pytest.mark.parametrize(
    ("capability", "words"),
    [((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a or sm_100f"), ((12, 1), "sm_121a or sm_120f")],
)
def test_what_a_device_needs_is_said_in_words(capability: tuple[int, int], words: str) -> None:
    assert needed_targets(capability) == words


def test_an_unknown_capability_takes_general_kernels_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tell_unknown.cache_clear()
    kernels = [
        kernel("exact", targets=("sm_121a", "sm_90a"), cost=1.0),
        kernel("family", targets=("sm_120f",), cost=1.0),
        kernel("general", targets=("cuda",), cost=5.0),
        reference(),
    ]
    with caplog.at_level(logging.WARNING, "vtensors"):
        plans = [plan_kernels(request(capability=(13, 0)), kernels) for _ in range(3)]
        plan_kernels(request(capability=(12, 1)), kernels)
        plan_kernels(CPU, kernels)
    assert [chosen(plan) for plan in plans] == [{(1, None): "general"}] * 3
    assert len(caplog.records) == 1
    assert "13.0 is not known" in caplog.text


@pytest.mark.parametrize("target", ["sm90a", "sm_9", "sm_90x", "compute_80", "sm_", ""])
def test_a_target_that_is_misspelt_is_a_problem(target: str) -> None:
    assert problem_with_target(target) is not None


@pytest.mark.parametrize(
    "target", ["sm_90a", "sm_121a", "sm_120f", "sm_89", "cuda", "portable", "cpu", "xpu"]
)
def test_a_target_that_is_spelt_right_is_none(target: str) -> None:
    assert problem_with_target(target) is None
