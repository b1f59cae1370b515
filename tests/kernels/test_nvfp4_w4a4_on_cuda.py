"""NVFP4 weights with NVFP4 activations on a CUDA device: codes bit for bit, every op against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

import vtensors
from linears_in_place import check_calls, watch
from nvfp4_cuda_cases import HALVES, TOLERANCE, make_weight, make_x, relative, replayed
from vtensors.kernel_binding import BoundKernel, bind_plan
from vtensors.records import KernelRequest
from vtensors.selection import plan_kernels
from vtensors_formats import NVFP4Weight, e4m3
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.nvfp4.quantize_activations import NVFP4Quantizer
from vtensors_kernels.nvfp4.w4a4_probes import reference_w4a4
from vtensors_kernels.reference.nvfp4_activations import fragments, tiled_scales, widened
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.swiglu import swiglu
from vtensors_plugins.backends import cuda, reference
from vtensors_plugins.backends.cuda_w4a4 import W4A4_OPS

pytestmark = pytest.mark.gpu
EPS = 1e-6
ROWS = [1, 3, 17, 40, 70]
OUTPUTS = ["codes", "tiled", "fragments", "widened"]
CHECKPOINT = Path(__file__).parents[1] / "data" / "llamazero-modelopt-nvfp4"


def activation_for(x: Tensor, *, divisor: bool) -> FP4Activation:
    """Calibrated on x, as a writer of that convention stores it."""
    amax = x.float()[x.isfinite()].abs().max().cpu()
    made = FP4Activation(global_divisor=2688 / amax) if divisor else FP4Activation(global_scale=amax / 2688)
    return made.to("cuda")


def weight_for(n: int, k: int, x: Tensor, *, divisor: bool = False, seed: int = 0) -> NVFP4Weight:
    return attrs.evolve(
        make_weight(n, k, seed=seed, divisor=divisor), activation=activation_for(x, divisor=divisor)
    )


def edges(dtype: torch.dtype, k: int) -> Tensor:
    """[40, K] on the CPU: sizes over many binades, zeros of either sign, ties of E2M1, infinities, tiny groups."""
    x = torch.randn(40, k, generator=torch.Generator().manual_seed(k))
    x *= torch.logspace(-4, 3, 40).reshape(-1, 1)
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x[0, :16], x[1, :16] = 0.0, -0.0
    x[2, :16] = torch.cat([ties, -ties])
    x[3, 5] = float("inf")
    x[4, :16] = 2.0**-20
    return x.to(dtype)


def same_bits(ours: Tensor, wanted: Tensor, accepted: float = 0.0) -> None:
    """Fails, with the first places, where more than that share of elements differ."""
    ours = ours.cpu()
    if ours.dtype in HALVES:
        ours, wanted = ours.view(torch.int16), wanted.view(torch.int16)
    different = (ours != wanted).nonzero()
    told = [(i.tolist(), int(ours[tuple(i)]), int(wanted[tuple(i)])) for i in different[:8]]
    assert len(different) <= accepted * ours.numel(), f"{len(different)} of {ours.numel()} differ: {told}"


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("divisor", [False, True])
@pytest.mark.parametrize("k", [16, 272, 5120, 17408])
def test_codes_and_scales_are_the_references(k: int, divisor: bool, dtype: torch.dtype, output: str) -> None:
    x = edges(dtype, k)
    for activation in (activation_for(x, divisor=divisor), activation_for(x * 0 + 448, divisor=divisor)):
        quantizer = NVFP4Quantizer(activation, k, dtype, output=output)
        wanted = activation.to("cpu").codes(x)
        for m in (1, 17, 40):
            out, scales = quantizer(x[:m].cuda())
            codes, scale = wanted.codes[:m], wanted.scale[:m]
            whole = {
                "codes": codes,
                "tiled": codes,
                "fragments": fragments(codes, scale),
                "widened": widened(codes, scale, dtype),
            }
            same_bits(out, whole[output])
            if output in ("codes", "tiled"):
                laid = tiled_scales(scale) if output == "tiled" else scale
                same_bits(e4m3.as_bytes(scales.cpu()), e4m3.as_bytes(laid))


def test_every_block_scale_and_every_code_comes_out_as_the_references() -> None:
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().reshape(127, 1)
    grid = torch.tensor([6.0, 0, 0.5, 1, 1.5, 2, 3, 4, -6, -0.0, -0.5, -1, -1.5, -2, -3, -4])
    x = (scale * grid).to(torch.float16)
    for activation in (
        FP4Activation(global_scale=torch.ones(())),
        FP4Activation(global_divisor=torch.ones(())),
    ):
        codes, scales = NVFP4Quantizer(activation.to("cuda"), 16, torch.float16, output="codes")(x.cuda())
        wanted = activation.codes(x)
        same_bits(codes, wanted.codes)
        same_bits(e4m3.as_bytes(scales.cpu()), e4m3.as_bytes(wanted.scale))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [16, 2064, 5120])
def test_a_norm_a_pre_scale_and_a_gate_come_before_the_quantizer(k: int, dtype: torch.dtype) -> None:
    x, gain = make_x(17, 2 * k, dtype), torch.rand(k, device="cuda") + 0.5
    plain = x[:, :k]  # strided rows
    activation = activation_for(torch.full((1,), 8.0), divisor=False)
    cases = {
        "norm": (plain, rms_norm(plain, gain, EPS, zero_centered=False)),
        "pre_scale": (plain, (plain.float() * gain).to(dtype)),
        "swiglu": (x, swiglu(x[:, :k], x[:, k:])),
    }
    for source, (given, changed) in cases.items():
        pre_scale = gain if source == "pre_scale" else None
        quantizer = NVFP4Quantizer(activation, k, dtype, source=source, output="codes", pre_scale=pre_scale)
        codes, _ = quantizer(given, gain, EPS) if source == "norm" else quantizer(given)
        # Roots and exponentials may be a float32 step off, which rarely shows in 16 bits.
        accepted = 0.0 if source == "pre_scale" else 2e-3
        same_bits(codes, activation.to("cpu").codes(changed.cpu()).codes, accepted)


def bound_for(
    op: str,
    weights: Sequence[NVFP4Weight],
    dtype: torch.dtype,
    traits: Sequence[str] = (),
    *,
    probed: bool = False,
) -> BoundKernel:
    """The op as a layer gets it; probed: every kernel passes its self-test first, as in a load."""
    request = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="fp4",
        device="cuda:0",
        capability=torch.cuda.get_device_capability(),
        dtype=str(dtype).removeprefix("torch."),
        shape=(sum(weight.shape[0] for weight in weights), weights[0].shape[1]),
        parts=tuple(weight.shape[0] for weight in weights),
        traits=frozenset(traits),
    )
    kernels = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]
    if not probed:
        kernels = [attrs.evolve(kernel, probe=None, fingerprint=None) for kernel in kernels]
    bound = bind_plan(plan_kernels(request, kernels), weights)
    failed = [entry for entry in bound.rejected if "self-test" in entry[1] or "Error" in entry[1]]
    print(op, [(segment.tokens, segment.kernel.name) for segment in bound.segments], failed)
    assert bound.segments
    assert not failed
    assert all("_w4a4_" in segment.kernel.name for segment in bound.segments), bound.rejected
    return bound


def wanted_of(op: str, x: Tensor, weights: Sequence[NVFP4Weight], gain: Tensor, residual: Tensor) -> Tensor:
    normed = rms_norm(x, gain, EPS, zero_centered=False) if op.startswith("norm_") else x
    sums = [reference_w4a4(normed, weight) for weight in weights]
    if op.endswith("swiglu"):
        return swiglu(*sums)
    return torch.cat(sums, dim=-1) + (residual.float() if op == "linear_add" else 0)


@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_swiglu", "norm_linears"])
def test_every_kernel_passes_its_self_test(op: str) -> None:
    x = make_x(8, 1040, torch.bfloat16)
    count = 2 if op.endswith(("swiglu", "linears")) else 1
    weights = [weight_for(200, 1040, x, seed=i) for i in range(count)]
    bound_for(op, weights, x.dtype, ("row_scale",) if count > 1 else (), probed=True)


@pytest.mark.parametrize(
    ("k", "dtype", "divisor"),
    [(272, torch.bfloat16, False), (272, torch.float16, True), (5120, torch.bfloat16, True)],
)
@pytest.mark.parametrize("op", W4A4_OPS)
def test_every_op_at_every_number_of_rows_is_the_references(
    op: str, k: int, dtype: torch.dtype, divisor: bool
) -> None:
    x, gain = make_x(70, k, dtype), torch.rand(k, device="cuda") + 0.5
    normed = rms_norm(x, gain, EPS, zero_centered=False) if op.startswith("norm_") else x
    widths = [200, 200] if op.endswith("swiglu") else [333, 64] if op.endswith("linears") else [333]
    weights = [weight_for(n, k, normed, divisor=divisor, seed=i) for i, n in enumerate(widths)]
    call = bound_for(op, weights, dtype, ("row_scale",) if len(widths) > 1 else ()).call
    residual = make_x(70, widths[0], dtype, seed=5)
    rest = (gain, EPS) if op.startswith("norm_") else ()
    roundings = 4 if rest or op.endswith("swiglu") else 1
    for m in ROWS:
        added = (residual[:m],) if op == "linear_add" else ()
        y = call(x[:m], *added, *rest)
        error = relative(y, wanted_of(op, x[:m], weights, gain, residual[:m]))
        print(op, k, dtype, m, f"{error:.1e}")
        assert error < TOLERANCE[dtype] * roundings, m


@pytest.mark.parametrize("op", ["linear", "norm_linear_swiglu"])
def test_a_row_is_the_same_bits_at_1_to_32_rows(op: str) -> None:
    k = 2048
    x, gain = make_x(32, k, torch.bfloat16), torch.rand(k, device="cuda") + 0.5
    weights = [weight_for(600, k, x, seed=i) for i in range(2 if op.endswith("swiglu") else 1)]
    call = bound_for(op, weights, x.dtype, ("row_scale",) if len(weights) > 1 else ()).call
    rest = (gain, EPS) if op.startswith("norm_") else ()
    whole = call(x, *rest)
    for m in (1, 2, 7, 8, 16, 17, 31):
        assert torch.equal(call(x[:m], *rest), whole[:m]), m
        assert torch.equal(call(x[32 - m :], *rest), whole[32 - m :]), m


def test_bias_and_pre_scale() -> None:
    n, k = 333, 1040
    x = make_x(40, k, torch.bfloat16)
    pre_scale = torch.rand(k, device="cuda") + 0.5
    weight = attrs.evolve(weight_for(n, k, x), bias=torch.randn(n, device="cuda"), pre_scale=pre_scale)
    call = bound_for("linear", [weight], x.dtype, ("bias", "pre_scale")).call
    for m in ROWS[:4]:
        assert relative(call(x[:m]), reference_w4a4(x[:m], weight)) < TOLERANCE[x.dtype]


def test_a_chain_of_calls_in_a_graph_repeats_its_result() -> None:
    k = 2048
    x, gain = make_x(3, k, torch.bfloat16), torch.ones(k, device="cuda")
    weights = [weight_for(k, k, x, seed=i) for i in range(2)]
    first = bound_for("norm_linears", weights[:1], x.dtype).call
    second = bound_for("linear_add", weights[1:], x.dtype).call

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = second(first(y, gain, EPS), y)
        return y

    wanted = chain().clone()
    torch.cuda.synchronize()
    for y in replayed(chain):
        assert torch.equal(y, wanted)
    assert wanted.isfinite().all()


def test_a_nan_of_one_token_stays_with_it() -> None:
    x = make_x(9, 512, torch.bfloat16)
    call = bound_for("linear", [weight_for(200, 512, x)], x.dtype).call
    alone = call(x)
    x[4, 100] = float("nan")
    y = call(x)
    others = torch.arange(9) != 4
    assert y[4].isnan().all()
    assert torch.equal(y[others], alone[others])


@pytest.mark.fault("B32")
@pytest.mark.parametrize("activations", ["declared", "fp4", None])
def test_a_checkpoint_with_4_bit_activations_runs_them_on_the_device(
    activations: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None: the switch asks for them.
    monkeypatch.setenv("VT_MODELOPT_W4A4", str(int(activations is None)))
    calls = watch(monkeypatch)
    model = vtensors.load_model(CHECKPOINT, device="cuda", dtype="bfloat16", activations=activations)
    used = {record.kernel for record in model.selected if record.executed == "fp4"}
    print(sorted(used))
    assert used
    assert all("_w4a4_" in name for name in used), used
    model.logits((torch.arange(40).reshape(1, -1) * 7 % 500).cuda())
    # Of whole logits nothing can be asked: a code that rounds the other way is amplified from layer to layer.
    assert {call.kernel for call in calls if call.request.activations == "fp4"}
    check_calls(calls)
