"""Selection: who may serve, who is cheapest, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vtensors.errors import VtensorsError
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import bind, rank, select

CPU = KernelRequest(op="linear", scheme="nvfp4", activations="16bit", device="cpu")
HOPPER = KernelRequest(op="linear", scheme="nvfp4", activations="16bit", device="cuda:0", capability=(9, 0))


def _kernel(
    name: str,
    *,
    op: str = "linear",
    schemes: tuple[str, ...] = ("*",),
    targets: tuple[str, ...] = ("portable",),
    cost: float = 0.0,
    refuse: Callable[[KernelRequest], str | None] = lambda request: None,
    bind: Callable[[Any, KernelRequest], Callable[..., Any]] = lambda weight, request: lambda x: (weight, x),
) -> KernelSpec:
    return KernelSpec(
        name=name,
        op=op,
        schemes=schemes,
        targets=targets,
        numerics="reference",
        refuse=refuse,
        bind=bind,
        cost=cost,
    )


def _raise(*_: object) -> Any:
    raise RuntimeError("no such device")


def test_the_cheapest_wins_and_names_break_ties() -> None:
    kernels = [_kernel("Slow", cost=2.0), _kernel("b", cost=1.0), _kernel("a", cost=1.0)]
    assert select(CPU, kernels)[0].name == "a"
    assert [kernel.name for kernel in rank(CPU, kernels[::-1]).candidates] == ["a", "b", "Slow"]


def test_each_rejected_kernel_keeps_its_reason_and_other_ops_are_not_listed() -> None:
    kernels = [
        _kernel("embedding", op="embedding"),
        _kernel("fp8", schemes=("fp8-row", "fp8-tensor")),
        _kernel("hopper", targets=("sm_90a",)),
        _kernel("small", refuse=lambda request: "K is not a multiple of 64"),
        _kernel("last", cost=9.0),
    ]
    chosen, rejected = select(CPU, kernels)
    assert chosen.name == "last"
    assert dict(rejected) == {
        "fp8": "computes fp8-row, fp8-tensor, not nvfp4",
        "hopper": "made for sm_90a, not cpu",
        "small": "K is not a multiple of 64",
    }


@pytest.mark.parametrize(
    ("target", "request_", "serves"),
    [
        ("cpu", CPU, True),
        ("portable", CPU, True),
        ("cuda", CPU, False),
        ("sm_90a", CPU, False),
        ("cpu", HOPPER, False),
        ("portable", HOPPER, True),
        ("cuda", HOPPER, True),
        ("sm_90a", HOPPER, True),
        ("sm_90", HOPPER, True),
        ("sm_100a", HOPPER, False),
    ],
)
def test_a_target_serves_its_own_devices(target: str, request_: KernelRequest, serves: bool) -> None:
    assert bool(rank(request_, [_kernel("k", targets=(target,))]).candidates) is serves


def test_a_kernel_that_raises_when_asked_loses_with_its_reason() -> None:
    chosen, rejected = select(CPU, [_kernel("broken", refuse=_raise), _kernel("good", cost=1.0)])
    assert chosen.name == "good"
    assert rejected == (("broken", "failed to say whether it can: RuntimeError: no such device"),)


def test_a_kernel_that_raises_when_bound_loses_to_the_next() -> None:
    ranking = rank(CPU, [_kernel("broken", bind=_raise), _kernel("good", cost=1.0)])
    bound = bind(ranking, "weight")
    assert bound.kernel.name == "good"
    assert bound.call("x") == ("weight", "x")
    assert bound.rejected == (("broken", "failed to bind: RuntimeError: no such device"),)


def test_without_a_kernel_every_candidate_is_listed_with_its_reason() -> None:
    kernels = [_kernel("broken", bind=_raise), _kernel("hopper", targets=("sm_90a",))]
    with pytest.raises(VtensorsError, match="no kernel computes 'linear' on nvfp4") as caught:
        bind(rank(CPU, kernels), None)
    assert "broken: failed to bind" in str(caught.value)
    assert "hopper: made for sm_90a" in str(caught.value)
    with pytest.raises(VtensorsError, match="no kernel is registered"):
        select(CPU, [])
