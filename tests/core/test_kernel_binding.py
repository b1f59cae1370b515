"""Binding: one prepared weight per layout, one callable for all rows, and the next kernel where one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from kernel_specs import DECOMPOSE, Prepared, failing, kernel, reference, request
from vtensors.errors import RequestError, VtensorsError
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import plan_kernels
from vtensors.verdicts import Verdicts

WEIGHT = Prepared("as stored", 40)
STREAM = kernel("stream", layout="packed", tokens=(1, 32), cost=5.0)
LATER = kernel("later", layout="packed", cost=80.0)
STORED = kernel("stored", cost=90.0)


def bound(kernels: Sequence[KernelSpec], asked: KernelRequest | None = None, **given: Any) -> BoundKernel:
    return bind_plan(plan_kernels(asked or request(), kernels), [WEIGHT], **given)


def test_one_range_gives_the_kernels_own_callable() -> None:
    def call(x: object) -> object:
        return x

    assert bound([kernel("only", bind=lambda prepared, asked: call)]).call is call


def test_several_ranges_choose_by_the_rows_of_x_whatever_its_shape() -> None:
    call = bound([STREAM, LATER]).call
    for shape, name in [((1, 8), "stream"), ((32, 8), "stream"), ((33, 8), "later"), ((8,), "stream")]:
        assert call(torch.zeros(shape))[0] == name, shape
    for shape, name in [
        ((4, 8, 8), "stream"),
        ((4, 9, 8), "later"),
        ((0, 8), "stream"),
        ((2, 2, 8, 8), "stream"),
    ]:
        assert call(torch.zeros(shape))[0] == name, shape
    assert call(torch.zeros(40, 8), "residual", 1e-6)[2][1:] == ("residual", 1e-6)


def test_the_rows_of_an_embedding_are_its_ids() -> None:
    few, many = (attrs.evolve(k, op="embedding") for k in (STREAM, LATER))
    call = bound([few, many], request("embedding")).call
    assert call(torch.zeros(32, dtype=torch.int64))[0] == "stream"
    assert call(torch.zeros(33, dtype=torch.int64))[0] == "later"
    assert call(torch.zeros(3, 11, dtype=torch.int64))[0] == "later"


def test_more_rows_than_were_asked_for_are_refused() -> None:
    call = bound([STREAM, LATER], request(tokens=(1, 64))).call
    with pytest.raises(RequestError, match="bound for fewer rows"):
        call(torch.zeros(65, 8))


def test_kernels_of_one_layout_share_one_prepared_weight() -> None:
    made: list[Sequence[Any]] = []

    def prepare(weights: Sequence[Any], asked: KernelRequest) -> Prepared:
        made.append(weights)
        return Prepared("packed", 7)

    both = [attrs.evolve(k, prepare=prepare) for k in (STREAM, LATER)]
    found = bound(both)
    assert made == [[WEIGHT]]
    assert found.call(torch.zeros(1, 8))[1] is found.call(torch.zeros(99, 8))[1]
    assert found.prepared_bytes == 7


def test_a_layout_beside_the_stored_one_counts_with_it() -> None:
    assert bound([STREAM, STORED]).prepared_bytes == 100 + 40
    assert bound([STORED]).prepared_bytes == 40


def test_a_kernel_that_reads_the_stored_layout_is_given_the_weight_or_all_of_them() -> None:
    assert bound([STORED]).call("x") == ("stored", WEIGHT, ("x",))
    plan = plan_kernels(request("linears"), [attrs.evolve(STORED, op="linears")])
    other = Prepared("as stored", 2)
    found = bind_plan(plan, [WEIGHT, other])
    assert found.call("x")[1] == (WEIGHT, other)
    assert found.prepared_bytes == 42


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (attrs.evolve(STREAM, bind=failing("no image")), "failed to bind: RuntimeError: no image"),
        (attrs.evolve(STREAM, prepare=failing("no room")), "failed to prepare: RuntimeError: no room"),
        (
            kernel("stream", layout="packed", tokens=(1, 32), cost=5.0, probe=failing("relative error 0.7")),
            "failed its self-test (NVRTC 13.0 sm_90a 3fa4b2): RuntimeError: relative error 0.7",
        ),
        (
            attrs.evolve(STREAM, bind=lambda prepared, asked: None),
            "failed to bind: it gives None, not a function",
        ),
        (
            attrs.evolve(STREAM, bind=lambda prepared, asked: "no image"),
            "failed to bind: it gives 'no image', not a function",
        ),
        (
            attrs.evolve(STREAM, prepare=lambda weights, asked: None),
            "failed to prepare: it gives nothing",
        ),
        (
            attrs.evolve(STREAM, prepare=lambda weights, asked: Prepared("packed", -5)),
            "failed to prepare: it gives a Prepared of -5 bytes",
        ),
        (
            attrs.evolve(STREAM, prepare=lambda weights, asked: Prepared("packed", "5")),  # type: ignore[arg-type]
            "failed to prepare: TypeError: 'str' object cannot be interpreted as an integer",
        ),
    ],
)
def test_a_kernel_that_fails_loses_to_the_next_with_its_reason(broken: KernelSpec, reason: str) -> None:
    found = bound([broken, LATER, STORED])
    assert [segment.kernel.name for segment in found.segments] == ["later"]
    assert ("stream", reason) in found.rejected
    assert found.plan.rejected == found.rejected
    assert found.call("x")[0] == "later"


def test_where_the_first_layout_fails_no_kernel_keeps_to_it() -> None:
    few = kernel("few", tokens=(1, 32), cost=6.0)
    broken = attrs.evolve(STREAM, bind=failing("no image"))
    late = kernel("late", layout="packed", tokens=(33, None), cost=80.0)
    found = bound([broken, few, late, STORED])
    assert [segment.kernel.name for segment in found.segments] == ["few", "stored"]
    assert found.prepared_bytes == 40


def test_without_a_kernel_left_every_reason_is_listed() -> None:
    kernels = [attrs.evolve(STORED, bind=failing("no image")), kernel("blackwell", targets=("sm_100a",))]
    with pytest.raises(VtensorsError, match="no kernel computes 'linear' on nvfp4") as caught:
        bound(kernels)
    assert "stored: failed to bind: RuntimeError: no image" in str(caught.value)
    assert "blackwell: made for sm_100a" in str(caught.value)


def test_a_decomposed_op_is_composed_by_the_caller() -> None:
    plan = plan_kernels(request("linears"), [kernel("plain")], decompose=DECOMPOSE)
    found = bind_plan(plan, [WEIGHT, WEIGHT], compose=lambda: len)
    assert (found.call, found.decomposed, found.kernel, found.prepared_bytes) == (len, True, None, 0)


def test_a_fused_kernel_that_fails_leaves_the_op_to_its_parts() -> None:
    fused = kernel("fused", op="linears", cost=1.0, bind=failing("no image"))
    plan = plan_kernels(
        request("linears"), [fused, kernel("plain"), reference("linears")], decompose=DECOMPOSE
    )
    assert not plan.decomposed
    found = bind_plan(plan, [WEIGHT, WEIGHT], compose=lambda: len)
    assert found.decomposed
    assert ("fused", "failed to bind: RuntimeError: no image") in found.rejected
    with pytest.raises(VtensorsError, match="no kernel computes 'linears'"):
        bind_plan(plan, [WEIGHT, WEIGHT])


def test_bind_prepare_and_probe_are_told_the_rows_that_they_serve() -> None:
    seen: list[tuple[str, tuple[int, int | None]]] = []

    def noted(what: str) -> Any:
        def note(*arguments: Any) -> Any:
            seen.append((what, arguments[-1].tokens))
            return {"probe": None, "prepare": Prepared("packed"), "bind": len}[what]

        return note

    first = kernel(
        "first",
        layout="packed",
        tokens=(1, 16),
        prepare=noted("prepare"),
        bind=noted("bind"),
        probe=noted("probe"),
    )
    bound([first, LATER], request(tokens=(1, 64)), verdicts=Verdicts())
    assert seen == [("probe", (1, 16)), ("prepare", (1, 16)), ("bind", (1, 16))]
