"""Weights with the kernels behind them, and the router that takes their place in one launch, or does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import vtensors
from vtensors.errors import RequestError, VtensorsError
from vtensors.kernel_binding import BoundKernel
from vtensors.records import KernelSpec
from vtensors.self_test_runs import run_directly
from vtensors_engine.fallbacks import report_fallbacks
from vtensors_formats import PlainWeight
from vtensors_kernels.layouts import PLAIN_ROWS
from vtensors_kernels.plain.matrix import PlainMatrix, stack_rows
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.steps import norm_router
from vtensors_kernels.steps.router import RouterTopk
from vtensors_plugins.architectures.build import BuildOptions, Parts
from vtensors_plugins.architectures.decoder_config import MoeConfig
from vtensors_plugins.architectures.groups import DryRun
from vtensors_plugins.architectures.models import router_kernels
from vtensors_plugins.architectures.models.moe import Moe
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.models.router_kernels import router_for
from vtensors_plugins.architectures.outline import outline
from vtensors_plugins.backends import reference
from vtensors_plugins.backends.cuda_plain_small import SUMS
from vtensors_plugins.commands.explain_probes import probed

MIXTURE = Path(__file__).parents[2] / "data" / "qwen35moe-modelopt-moe-mixed-w4a16"
NAMES = ("gate", "shared_expert_gate")
CONFIG = MoeConfig(experts=8, chosen=2, width=16, shared_width=16)


def _product(matrix: PlainMatrix, x: Tensor) -> Tensor:
    return linear(x, PlainWeight(tensor=matrix.rows))


def _kernel(tokens: tuple[int, int | None] = (1, 32), sums: str = SUMS) -> KernelSpec:
    return KernelSpec(
        name=f"linears_mine_{tokens[0]}",
        op="linears",
        schemes=("bf16",),
        targets=("cpu",),
        numerics="16-bit outputs",
        refuse=lambda request: None,
        bind=lambda matrix, request: lambda x: _product(matrix, x),
        cost=0.5,
        sums=sums,
        layout=PLAIN_ROWS,
        prepare=lambda weights, request: stack_rows(weights),
        tokens=tokens,
    )


ALIKE = (_kernel(), _kernel((33, 48)), _kernel((49, None), ""))


def _parts(kernels: Sequence[KernelSpec], dry_run: DryRun | None = None) -> Parts:
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: PlainWeight(tensor=torch.randn(rows, 64, generator=generator).bfloat16())
        for name, rows in zip(NAMES, (8, 1), strict=True)
    }
    own = [*reference.vtensors_kernels(), *kernels]
    options = BuildOptions(dtype=torch.bfloat16, device="cpu", kernels=own, dry_run=dry_run)
    return Parts(weights, options)


def _on_hopper(bound: BoundKernel | None, **changes: Any) -> BoundKernel:
    """As if it had been bound there."""
    assert bound is not None
    request = attrs.evolve(bound.plan.request, device="cuda:0", capability=(9, 0))
    return attrs.evolve(bound, plan=attrs.evolve(bound.plan, request=attrs.evolve(request, **changes)))


@attrs.define
class Made:
    """Stands for `NormRouter`."""

    matrix: PlainMatrix
    experts: int
    top: int
    most_tokens: int


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The self-tests of the router that were run; one fails where the list has begun with ("broken",)."""
    seen: list[tuple[Any, ...]] = []

    def probe(*asked: Any) -> None:
        seen.append(asked)
        if seen[0] == ("broken",):
            raise VtensorsError("other bits than those of norm, product and choice")

    monkeypatch.setattr(norm_router, "probe_norm_router", probe)
    monkeypatch.setattr(norm_router, "NormRouter", Made)
    monkeypatch.setattr(router_kernels, "norm_binder", lambda columns, options: print)
    router_kernels._why_no_router.cache_clear()
    return seen


TOPK = RouterTopk.__new__(RouterTopk)


def test_weights_come_with_the_kernel_that_computes_all_of_them() -> None:
    parts = _parts(ALIKE)
    call, bound = parts.bound_linears(NAMES)
    assert bound is not None
    assert [segment.tokens for segment in bound.segments] == [(1, 32), (33, 48), (49, None)]
    matrix, x = bound.prepared[PLAIN_ROWS], torch.randn(3, 64).bfloat16()
    assert list(bound.prepared) == [PLAIN_ROWS]
    stored = [parts.weight(name).dequantize(torch.float32) for name in NAMES]
    assert torch.equal(matrix.rows.float(), torch.cat(stored))
    logits, gate = call(x)
    assert torch.equal(torch.cat((logits, gate), -1), _product(matrix, x))
    assert (logits.shape, gate.shape) == ((3, 8), (3, 1))


def test_weights_that_each_have_a_kernel_come_without() -> None:
    parts, x = _parts([]), torch.randn(3, 64).bfloat16()
    call, bound = parts.bound_linears(NAMES)
    assert bound is None
    for name, y in zip(NAMES, call(x), strict=True):
        assert torch.equal(y, linear(x, parts.weight(name)))
    assert [record.kernel for record in parts.selected] == ["linear_reference"] * 2
    assert router_for(None, TOPK, CONFIG, parts) is None


def test_the_router_serves_the_rows_whose_sums_are_its_own(tested: list[tuple[Any, ...]]) -> None:
    parts = _parts(ALIKE)
    parts.linear("gate")
    bound = _on_hopper(parts.bound_linears(NAMES)[1])
    made = router_for(bound, TOPK, CONFIG, parts)
    assert isinstance(made, Made)
    assert made == Made(bound.prepared[PLAIN_ROWS], 8, 2, 48)
    assert tested == [((9, 64), 8, 2, torch.bfloat16, torch.device("cuda:0"))]
    assert [record.merged for record in parts.selected] == [None, *[(1, 48, "norm_router")] * 2]
    again = _parts(ALIKE)
    assert router_for(_on_hopper(again.bound_linears(NAMES)[1]), TOPK, CONFIG, again) is not None
    assert len(tested) == 1


def test_a_router_that_fails_leaves_three_launches_and_is_counted(
    tested: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    tested.append(("broken",))
    parts = _parts(ALIKE)
    bound = _on_hopper(parts.bound_linears(NAMES)[1])
    assert router_for(bound, TOPK, CONFIG, parts) is None
    assert [record.merged for record in parts.selected] == [None, None]
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks(parts.selected, parts.options.kernels, "cuda", refuse=False) == 2
    assert caplog.messages == [
        "fallback: norm_router failed its self-test: VtensorsError: other bits than those of norm, product and "
        "choice; 2 weights run on linears_mine_1"
    ]
    with pytest.raises(RequestError, match="norm_router failed its self-test"):
        report_fallbacks(parts.selected, parts.options.kernels, "cuda", refuse=True)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"capability": (8, 9)}, CONFIG),
        ({"capability": (12, 1)}, CONFIG),
        ({"device": "cpu", "capability": None}, CONFIG),
        ({"shape": (9, 2056)}, CONFIG),
        ({"shape": (321, 64)}, CONFIG),
        ({"shape": (300, 64)}, attrs.evolve(CONFIG, experts=257)),
        ({"shape": (64, 64)}, attrs.evolve(CONFIG, experts=64, chosen=33)),
    ],
    ids=str,
)
def test_what_it_does_not_take_has_three_launches_and_is_no_fallback(
    changes: dict[str, Any], config: MoeConfig, tested: list[tuple[Any, ...]]
) -> None:
    parts = _parts(ALIKE)
    bound = _on_hopper(parts.bound_linears(NAMES)[1], **changes)
    assert router_for(bound, TOPK, config, parts) is None
    assert not tested
    assert report_fallbacks(parts.selected, parts.options.kernels, "cuda", refuse=True) == 0


def test_nor_is_it_one_where_others_compute_the_gates_the_choice_or_the_norm(
    tested: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = _parts([_kernel((1, None), "other")])
    bound = _on_hopper(others.bound_linears(NAMES)[1])
    assert router_for(bound, TOPK, CONFIG, others) is None
    parts = _parts(ALIKE)
    bound = _on_hopper(parts.bound_linears(NAMES)[1])
    assert router_for(bound, lambda logits: (logits, logits), CONFIG, parts) is None
    monkeypatch.setattr(router_kernels, "norm_binder", lambda columns, options: None)
    assert router_for(bound, TOPK, CONFIG, parts) is None
    assert not tested
    assert all(record.merged is None and not record.not_fused for record in parts.selected)


def test_a_plan_notes_it_and_binds_nothing(tested: list[tuple[Any, ...]]) -> None:
    dry_run = DryRun(device="cuda:0", capability=(9, 0), assumed=True)
    alike = [attrs.evolve(kernel, targets=("cuda",)) for kernel in ALIKE]
    parts = _parts(alike, dry_run)
    bound = parts.bound_linears(NAMES)[1]
    assert router_for(bound, lambda logits: (logits, logits), CONFIG, parts) is None
    (group,) = dry_run.planned
    assert group.merged is not None
    assert (group.merged.kernel, group.merged.tokens) == ("norm_router", (1, 48))
    assert not tested
    assert group.merged.failure(run_directly) is None
    assert len(tested) == 1


@attrs.define
class Few:
    """Stands for a router that serves four rows, and remembers what it was given."""

    seen: list[tuple[Any, ...]] = attrs.field(factory=list)

    def serves(self, h: Tensor) -> bool:
        return h.shape[0] <= 4

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.seen.append((h, gain, eps))
        return h + 1, h + 2, h + 3, h + 4


def test_the_layer_gives_few_rows_to_the_router_and_more_to_three_launches() -> None:
    few, norm = Few(), RMSNorm(torch.linspace(0.5, 1.5, 8), 1e-6, False)
    moe = Moe(
        expert_count=8,
        chosen=2,
        gates=lambda x: (x * 2, x * 3),
        topk=lambda logits: (logits * 5, logits * 7),
        router=few,
        experts=lambda *given: torch.stack([part for part in given if part is not None]),
    )
    h = torch.randn(5, 8)
    assert torch.equal(moe(h[:4], norm), torch.stack([h[:4] + 1, h[:4] + 2, h[:4] + 3, h[:4] + 4, h[:4]]))
    ((given, gain, eps),) = few.seen
    assert torch.equal(given, h[:4])
    assert (gain is norm.gain, eps) == (True, 1e-6)
    x = norm(h)
    assert torch.equal(moe(h, norm), torch.stack([x, x * 10, x * 14, x * 3, h]))
    assert len(few.seen) == 1


@pytest.mark.gpu
def test_a_load_on_hopper_takes_it_with_the_same_bits_and_explain_tells_so() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("norm_router is made for sm_90a")
    checkpoint = vtensors.open_checkpoint(MIXTURE)
    decoder = vtensors.load_model(MIXTURE, device="cuda", dtype="bfloat16").decoder
    told = {record.module: record.merged for record in decoder.selected}
    assert told["layers.0.mlp.gate"] == told["layers.1.mlp.shared_expert_gate"] == (1, 64, "norm_router")
    groups = probed(checkpoint, outline(checkpoint, device="cuda:0", capability=(9, 0), dtype="bfloat16"))
    merged = [group.merged for group in groups if group.modules[0].endswith("mlp.gate")]
    assert merged
    assert all(one is not None and (*one.tokens, one.kernel) == (1, 64, "norm_router") for one in merged)
    layers = [attrs.evolve(one, mlp=attrs.evolve(one.mlp, router=None)) for one in decoder.layers]
    apart = attrs.evolve(decoder, layers=tuple(layers))
    for count in (1, 9, 64, 65):
        ids = torch.arange(count, device="cuda")[None] * 7 % 50
        assert torch.equal(decoder.logits(ids), apart.logits(ids))
