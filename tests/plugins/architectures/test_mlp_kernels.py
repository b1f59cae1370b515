"""Dense feed-forward layers whose products hand on what lies between them, for rows of which they can, or do not."""

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
from vtensors.errors import VtensorsError
from vtensors.kernel_binding import BoundKernel
from vtensors.records import KernelSpec
from vtensors.self_test_runs import run_directly
from vtensors_engine.fallbacks import report_fallbacks
from vtensors_formats import PlainWeight
from vtensors_kernels.nvfp4 import wgmma_mlp, wgmma_mlp_probe
from vtensors_plugins.architectures.build import BuildOptions, Parts
from vtensors_plugins.architectures.groups import DryRun
from vtensors_plugins.architectures.models import mlp_kernels
from vtensors_plugins.architectures.models.mlp import Mlp, build_mlp
from vtensors_plugins.architectures.models.norm import RMSNorm
from vtensors_plugins.architectures.outline import outline
from vtensors_plugins.backends import cuda_calls, reference
from vtensors_plugins.commands.explain_probes import probed

DENSE = Path(__file__).parents[2] / "data" / "llamazero-modelopt-nvfp4"
HIDDEN, WIDTH = 32, 48
GATE_UP, DOWN = "norm_linear_swiglu", "linear_add"
Rows = tuple[int, int | None]


@attrs.frozen
class Matrix:
    """Stands for a packed one."""

    op: str
    blocks: Tensor
    nbytes: int = 8


def _kernel(op: str, tokens: Rows, name: str = "") -> KernelSpec:
    """`<op>_<name>` for so many rows; what it gives is of no matter."""
    return KernelSpec(
        name=f"{op}_{name or f'other_{tokens[0]}'}",
        op=op,
        schemes=("bf16",),
        targets=("cpu", "cuda"),
        numerics="16-bit outputs",
        refuse=lambda request: None,
        bind=lambda matrix, request: lambda x, *rest: x,
        cost=0.5,
        layout=f"{op}-mine",
        prepare=lambda weights, request: Matrix(request.op, torch.zeros(1)),
        tokens=tokens,
    )


SEGMENTS, WGMMA = "nvfp4_wgmma_segments", "nvfp4_wgmma"
FP8, IN_PARTS = "fp8_wgmma_segments", "fp8_wgmma_segments_in_parts"


def _kernels(op: str, *named: tuple[Rows, str]) -> list[KernelSpec]:
    """Those, and others for all rows between 1 and 64 that they leave, and beyond."""
    taken = {m for (first, last), _ in named for m in range(first, (last or 64) + 1)}
    own = [_kernel(op, tokens, name) for tokens, name in named]
    rest = [m for m in range(1, 65) if m not in taken]
    first = [m for m in rest if m - 1 not in rest]
    last = [m for m in rest if m + 1 not in rest]
    return [*own, *(_kernel(op, span) for span in zip(first, last, strict=True)), _kernel(op, (65, None))]


BOTH = ((17, 32), SEGMENTS), ((33, 64), WGMMA)
ALIKE = [*_kernels(GATE_UP, *BOTH), *_kernels(DOWN, *BOTH)]


def _parts(kernels: Sequence[KernelSpec], dry_run: DryRun | None = None) -> Parts:
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    weights = {
        f"mlp.{name}": PlainWeight(tensor=torch.ones(shape).bfloat16()) for name, shape in shapes.items()
    }
    own = [*reference.vtensors_kernels(), *kernels]
    return Parts(weights, BuildOptions(dtype=torch.bfloat16, device="cpu", kernels=own, dry_run=dry_run))


@attrs.define
class Made:
    """Stands for `WgmmaMlp`, and remembers what it computes."""

    gate_up: Matrix
    down: Matrix
    dtype: torch.dtype
    tokens: tuple[int, int] = attrs.field(kw_only=True)
    workspace: str = attrs.field(kw_only=True)
    seen: list[tuple[Any, ...]] = attrs.field(factory=list)

    def serves(self, h: Tensor) -> bool:
        return self.tokens[0] <= h.shape[0] <= self.tokens[1]

    def __call__(self, h: Tensor, gain: Tensor, eps: float) -> Tensor:
        self.seen.append((h, gain, eps))
        return h + 1


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The self-tests that were run; they fail where the list has begun with ("broken",)."""
    seen: list[tuple[Any, ...]] = []

    def probe(*asked: Any) -> None:
        seen.append(asked)
        if seen[0] == ("broken",):
            raise VtensorsError("other bits than its two linears")

    monkeypatch.setattr(wgmma_mlp_probe, "probe_wgmma_mlp", probe)
    monkeypatch.setattr(wgmma_mlp, "WgmmaMlp", Made)
    monkeypatch.setattr(cuda_calls, "workspace_here", lambda device: f"of {device}")
    mlp_kernels._why_not.cache_clear()
    return seen


def _built(parts: Parts) -> Mlp:
    return build_mlp(parts, "mlp", bias=False)


def test_rows_that_both_products_serve_alike_are_handed_on(tested: list[tuple[Any, ...]]) -> None:
    parts = _parts(ALIKE)
    mlp = _built(parts)
    assert isinstance(mlp.merged, Made)
    assert (mlp.merged.tokens, mlp.merged.dtype, mlp.merged.workspace) == ((17, 64), torch.bfloat16, "of cpu")
    assert (mlp.merged.gate_up.op, mlp.merged.down.op) == (GATE_UP, DOWN)
    ((first, second, rows),) = tested
    assert (first.op, first.shape, second.op, second.shape) == (GATE_UP, (96, 32), DOWN, (32, 48))
    assert rows == (17, 64)
    told = {record.module: record.merged for record in parts.selected}
    wanted = (17, 64, "wgmma_mlp")
    assert told == {"mlp.gate_proj": wanted, "mlp.up_proj": wanted, "mlp.down_proj": None}
    _built(_parts(ALIKE))
    assert len(tested) == 1


def test_the_layer_gives_it_those_rows_and_no_others(tested: list[tuple[Any, ...]]) -> None:
    mlp, norm = _built(_parts(ALIKE)), RMSNorm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6, False)
    assert isinstance(mlp.merged, Made)
    h = torch.randn(64, HIDDEN).bfloat16()
    assert torch.equal(mlp(h[:17], norm), h[:17] + 1)
    ((given, gain, eps),) = mlp.merged.seen
    assert torch.equal(given, h[:17])
    assert (gain is norm.gain, eps) == (True, 1e-6)
    assert torch.equal(mlp(h[:16], norm), h[:16])
    assert len(mlp.merged.seen) == 1


@pytest.mark.parametrize(
    ("gate_up", "down", "rows"),
    [
        ((((17, 32), SEGMENTS),), BOTH, (17, 32)),
        (BOTH, (((33, 64), WGMMA),), (33, 64)),
        ((((20, 32), SEGMENTS), ((33, 64), WGMMA)), (((17, 30), SEGMENTS), ((33, 64), WGMMA)), (20, 30)),
        ((((17, 32), FP8), ((33, 64), IN_PARTS)), BOTH, (17, 32)),
        ((((33, 64), IN_PARTS),), BOTH, None),
        ((((17, 32), FP8), ((33, 64), IN_PARTS)), (((17, 32), FP8), ((33, 64), IN_PARTS)), (17, 64)),
        ((((17, 64), SEGMENTS),), (((17, 64), WGMMA),), None),
        ((), BOTH, None),
        ((((17, 64), "nvfp4_w4a8_emulated_wgmma_segments"),), BOTH, None),
    ],
    ids=str,
)
def test_ranges_of_rows_are_those_of_one_kind_of_products_in_both(
    gate_up: Sequence[tuple[Rows, str]],
    down: Sequence[tuple[Rows, str]],
    rows: tuple[int, int] | None,
    tested: list[tuple[Any, ...]],
) -> None:
    parts = _parts([*_kernels(GATE_UP, *gate_up), *_kernels(DOWN, *down)])
    mlp = _built(parts)
    assert (None if mlp.merged is None else mlp.merged.tokens) == rows
    assert bool(tested) == (rows is not None)
    assert report_fallbacks(parts.selected, parts.options.kernels, "cuda", refuse=True) == 0


def test_a_down_with_a_pre_scale_has_its_input_laid_out(tested: list[tuple[Any, ...]]) -> None:
    parts = _parts(ALIKE)
    first = parts.bound_norm_linear_swiglu("mlp.gate_proj", "mlp.up_proj", bias=False)[1]
    second = parts.bound_linear_add("mlp.down_proj", bias=False)[1]
    assert isinstance(second, BoundKernel)
    request = attrs.evolve(second.plan.request, traits=frozenset({"pre_scale"}))
    scaled = attrs.evolve(second, plan=attrs.evolve(second.plan, request=request))
    assert mlp_kernels.mlp_for(first, scaled, parts) is None
    assert mlp_kernels.mlp_for(first, None, parts) is None
    assert mlp_kernels.mlp_for(None, second, parts) is None
    assert mlp_kernels.mlp_for(first, second, parts) is not None


def test_one_that_fails_leaves_both_linears_and_is_counted(
    tested: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    tested.append(("broken",))
    parts = _parts(ALIKE)
    assert _built(parts).merged is None
    assert [record.merged for record in parts.selected] == [None] * 3
    with caplog.at_level(logging.WARNING, logger="vtensors"):
        assert report_fallbacks(parts.selected, parts.options.kernels, "cuda", refuse=False) == 2
    assert caplog.messages == [
        "fallback: wgmma_mlp failed its self-test: VtensorsError: other bits than its two linears; "
        f"2 weights run on {GATE_UP}_other_1"
    ]


def test_a_plan_notes_it_at_gate_and_up(tested: list[tuple[Any, ...]]) -> None:
    dry_run = DryRun(device="cuda:0", capability=(9, 0), assumed=True)
    assert _built(_parts(ALIKE, dry_run)).merged is None
    first, second = dry_run.planned
    assert second.merged is None
    assert first.merged is not None
    assert (first.request.op, first.merged.kernel, first.merged.tokens) == (GATE_UP, "wgmma_mlp", (17, 64))
    assert not tested
    assert first.merged.failure(run_directly) is None
    assert len(tested) == 1


@pytest.mark.parametrize(
    ("gate_up", "down", "rows"),
    [
        (BOTH, BOTH, (17, 64)),
        (BOTH[:1], BOTH, (17, 32)),
        (BOTH, BOTH[1:], (33, 64)),
        (BOTH[:1], BOTH[1:], None),
        (BOTH, (), None),
    ],
    ids=str,
)
def test_what_is_planned_again_is_what_a_load_of_the_kernels_left_would_take(
    gate_up: Sequence[tuple[Rows, str]],
    down: Sequence[tuple[Rows, str]],
    rows: tuple[int, int] | None,
    tested: list[tuple[Any, ...]],
) -> None:
    before, after = DryRun(device="cuda:0", capability=(9, 0)), DryRun(device="cuda:0", capability=(9, 0))
    _built(_parts(ALIKE, before))
    left = [*_kernels(GATE_UP, *gate_up), *_kernels(DOWN, *down)]
    _built(_parts(left, after))
    first = before.planned[0].merged
    assert first is not None
    again = first.again([group.plan for group in after.planned])
    assert (None if again is None else again.tokens) == rows
    assert again == after.planned[0].merged
    loaded: Any = _built(_parts(left)).merged
    assert (None if loaded is None else loaded.tokens) == rows


def test_linears_of_their_own_have_no_kernels_to_hand_on() -> None:
    parts = _parts([])
    mlp = _built(parts)
    assert mlp.merged is None
    norm, h = RMSNorm(torch.ones(HIDDEN), 1e-6, False), torch.randn(3, HIDDEN).bfloat16()
    assert mlp(h, norm).shape == h.shape


FORCED = ",".join(f"nvfp4:{op}_nvfp4_wgmma_segments" for op in (GATE_UP, DOWN))


@pytest.mark.gpu
@pytest.mark.parametrize(("switch", "rows"), [("", (33, 64)), (FORCED, (17, 64))])
def test_a_load_on_hopper_takes_it_with_the_same_bits_and_explain_tells_so(
    switch: str, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")
    monkeypatch.setenv("VT_KERNELS", switch)
    checkpoint = vtensors.open_checkpoint(DENSE)
    decoder = vtensors.load_model(DENSE, device="cuda", dtype="bfloat16").decoder
    told = {record.module: record.merged for record in decoder.selected}
    assert told["layers.0.mlp.gate_proj"] == told["layers.1.mlp.up_proj"] == (*rows, "wgmma_mlp")
    groups = probed(checkpoint, outline(checkpoint, device="cuda:0", capability=(9, 0), dtype="bfloat16"))
    merged = [group.merged for group in groups if group.modules[0].endswith("mlp.gate_proj")]
    assert all(one is not None and (*one.tokens, one.kernel) == (*rows, "wgmma_mlp") for one in merged)
    layers = [attrs.evolve(one, mlp=attrs.evolve(one.mlp, merged=None)) for one in decoder.layers]
    apart = attrs.evolve(decoder, layers=tuple(layers))
    for count in (16, 17, 24, 25, 32, 33, 48, 49, 64, 65):
        ids = torch.arange(count, device="cuda")[None] * 7 % 50
        assert torch.equal(decoder.logits(ids), apart.logits(ids))
