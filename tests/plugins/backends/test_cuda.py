"""The CUDA backend without a GPU: which kernel a device gets for each op and number of rows, and why not others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from vtensors.cli import main
from vtensors.record_checks import check_record
from vtensors.records import KernelRequest, KernelSpec
from vtensors.selection import KernelPlan, decomposer, plan_kernels
from vtensors_formats.nvfp4 import quantize_nvfp4
from vtensors_kernels.fp8 import packed as fp8
from vtensors_kernels.nvfp4.packed import LAYOUT, PAIRED_LAYOUT
from vtensors_kernels.ops import OPS
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.linears import norm_linears
from vtensors_plugins.backends import cuda, reference
from vtensors_plugins.backends.cuda_calls import for_op, over_rows

KERNELS = [*reference.vtensors_kernels(), *cuda.vtensors_kernels()]
DECOMPOSE = decomposer({op.name: op.decomposition for op in OPS})
GATE_UP, DOWN, HEAD = (34816, 5120), (5120, 17408), (248320, 5120)
HOPPER, BLACKWELL, SPARK, ADA, UNKNOWN = (9, 0), (10, 3), (12, 1), (8, 9), (13, 0)


def _request(
    op: str = "linear",
    shape: tuple[int, int] = DOWN,
    *,
    capability: tuple[int, int] | None = HOPPER,
    traits: tuple[str, ...] = (),
    **changes: Any,
) -> KernelRequest:
    halves = op.endswith(("swiglu", "linears"))
    parts = (shape[0] // 2, shape[0] // 2) if halves else (shape[0],)
    plain = KernelRequest(
        op=op,
        scheme="nvfp4",
        activations="16bit",
        device="cuda:0",
        capability=capability,
        dtype="bfloat16",
        shape=shape,
        parts=parts,
        traits=frozenset(traits),
        assumed=True,
    )
    return attrs.evolve(plain, **changes)


def _served_activations(kernel: KernelSpec) -> str:
    """The first of the modes that the kernel computes with."""
    for scheme in kernel.schemes:
        for mode in ("16bit", "fp4", "fp8-static", "fp8-dynamic"):
            if kernel.refuse(_request(kernel.op, GATE_UP, scheme=scheme, activations=mode)) is None:
                return mode
    return "none"


def _plan(request: KernelRequest) -> KernelPlan:
    return plan_kernels(request, KERNELS, decompose=DECOMPOSE)


def _chosen(plan: KernelPlan) -> dict[tuple[int, int | None], str]:
    return {segment.tokens: segment.kernel.name for segment in plan.segments}


def _kernel(name: str) -> KernelSpec:
    return next(kernel for kernel in KERNELS if kernel.name == name)


@pytest.mark.parametrize("kernel", cuda.vtensors_kernels(), ids=lambda kernel: kernel.name)
def test_each_record_is_sound_named_after_its_op_and_tested_before_use(kernel: KernelSpec) -> None:
    assert check_record(kernel) is None
    assert kernel.op in {op.name for op in OPS}
    assert kernel.name.startswith(f"{kernel.op}_")
    assert kernel.probe is not None
    assert kernel.fingerprint is not None


def test_paired_rows_are_a_layout_of_their_own() -> None:
    layouts: dict[tuple[str, str], set[str]] = {}
    for kernel in cuda.vtensors_kernels():
        if _served_activations(kernel) != "16bit":
            continue
        for scheme in kernel.schemes:
            layouts.setdefault((kernel.op, scheme), set()).add(kernel.layout)
    for scheme, one, paired in (
        ("nvfp4", LAYOUT, PAIRED_LAYOUT),
        *((scheme, fp8.LAYOUT, fp8.PAIRED_LAYOUT) for scheme in fp8.SCALES_OF),
    ):
        assert layouts["linear_swiglu", scheme] == layouts["norm_linear_swiglu", scheme] == {paired}
        for op in ("linear_add", "norm_linears", "linears"):
            assert layouts[op, scheme] == {one}
    assert layouts["linear", "nvfp4"] == layouts["linear_argmax", "nvfp4"] == {LAYOUT, "stored"}
    assert layouts["linear", "fp8-row"] == {fp8.LAYOUT, "stored"}
    assert layouts["linear", "mxfp8"] == {fp8.LAYOUT}
    assert layouts["embedding", "nvfp4"] == {"stored"}


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("linear", DOWN),
        ("linear", HEAD),
        ("linears", (14336, 5120)),
        ("linear_add", DOWN),
        ("linear_swiglu", GATE_UP),
        ("linear_argmax", HEAD),
        ("norm_linears", (16384, 5120)),
        ("norm_linear_swiglu", GATE_UP),
    ],
)
def test_a_hopper_streams_few_rows_multiplies_more_by_warpgroups_and_widens_beyond(
    op: str, shape: tuple[int, int]
) -> None:
    assert _chosen(_plan(_request(op, shape))) == {
        (1, 16): f"{op}_nvfp4_stream",
        (17, 32): f"{op}_nvfp4_wgmma_segments",
        (33, 64): f"{op}_nvfp4_wgmma",
        (65, None): f"{op}_nvfp4_packed_widening",
    }


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("norm_linears", (1024, 2048)),
        ("linear_swiglu", (1024, 2048)),
        ("linear_add", (2048, 512)),
        ("linear_add", (5120, 6144)),
    ],
)
def test_small_weights_are_streamed_up_to_32_rows(op: str, shape: tuple[int, int]) -> None:
    assert _chosen(_plan(_request(op, shape))) == {
        (1, 32): f"{op}_nvfp4_stream",
        (33, 64): f"{op}_nvfp4_wgmma",
        (65, None): f"{op}_nvfp4_packed_widening",
    }


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), ADA, (10, 0), BLACKWELL, (11, 0), (12, 0), SPARK, UNKNOWN]
)
@pytest.mark.parametrize(("op", "shape"), [("linear", DOWN), ("norm_linear_swiglu", GATE_UP)])
def test_other_devices_stream_few_rows_and_widen_beyond(
    op: str, shape: tuple[int, int], capability: tuple[int, int]
) -> None:
    plan = _plan(_request(op, shape, capability=capability))
    assert _chosen(plan) == {
        (1, 32): f"{op}_nvfp4_stream",
        (33, None): f"{op}_nvfp4_packed_widening",
    }
    assert "made for sm_90a" in dict(plan.rejected)[f"{op}_nvfp4_wgmma"]


@pytest.mark.parametrize("op", ["linear", "linear_argmax"])
@pytest.mark.parametrize("capability", [HOPPER, SPARK])
@pytest.mark.parametrize(
    ("shape", "traits"),
    [((1024, 2048), ()), ((128, 128), ()), (HEAD, ("shared",))],
    ids=["1MB", "tiny", "tied"],
)
def test_small_and_shared_weights_are_read_as_stored(
    shape: tuple[int, int], traits: tuple[str, ...], capability: tuple[int, int], op: str
) -> None:
    plan = _plan(_request(op, shape, capability=capability, traits=traits))
    assert _chosen(plan) == {(1, 64): f"{op}_nvfp4_stored", (65, None): f"{op}_nvfp4_widening"}


def test_rows_of_a_quantised_embedding_are_gathered_by_a_kernel() -> None:
    request = _request("embedding", HEAD, traits=("shared",))
    assert _chosen(_plan(request)) == {(1, None): "embedding_nvfp4"}
    assert _chosen(_plan(attrs.evolve(request, dtype="float32"))) == {(1, None): "embedding_reference"}


def test_a_norm_before_a_pre_scale_is_left_to_two_ops() -> None:
    plan = _plan(_request("norm_linears", (14336, 5120), traits=("pre_scale",)))
    assert plan.decomposed
    assert plan.steps == ("rms_norm", "linears")
    assert "round x twice" in dict(plan.rejected)["norm_linears_nvfp4_stream"]
    assert _chosen(plan.parts[0])[1, 16] == "linears_nvfp4_stream"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activations": "fp4"}, "computes with 16-bit activations, not fp4"),
        ({"dtype": "float32"}, "computes in bfloat16 or float16, not float32"),
        ({"traits": frozenset({"group64"})}, "knows groups of 16 or 32, not of 64"),
        ({"shape": (64, 40)}, "needs K to be a multiple of 16, not 40"),
        ({"shape": (16, 1 << 21)}, "does not fit into shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_told(changes: dict[str, Any], reason: str) -> None:
    told = _kernel("linear_nvfp4_stream").refuse(_request(**changes))
    assert told is not None
    assert reason in told


def test_other_reasons_of_the_other_kernels() -> None:
    huge = _request(shape=(1 << 24, 1 << 11))
    assert "spans fewer than" in str(_kernel("linear_nvfp4_wgmma").refuse(huge))
    wide = _request(shape=(16, 1 << 28))
    assert "takes fewer than" in str(_kernel("linear_nvfp4_stored").refuse(wide))
    for name in ("stream", "wgmma", "packed_widening", "stored"):
        assert (
            _kernel(f"linear_nvfp4_{name}").refuse(_request(traits=("group32", "bias", "row_scale"))) is None
        )


def test_a_missing_compiler_counts_against_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtensors_kernels.compiling import nvrtc

    monkeypatch.setattr(
        nvrtc, "find_toolkit", lambda: nvrtc.Toolkit(version=(12, 4), targets=(80, 86, 89, 90))
    )
    for kernel in cuda.vtensors_kernels():
        if kernel.schemes == ("nvfp4",):
            shape = GATE_UP if kernel.op.startswith("norm_") else DOWN
            mode = _served_activations(kernel)
            request = _request(kernel.op, shape, capability=SPARK, assumed=False, activations=mode)
            request = attrs.evolve(request, activations=_served_activations(kernel))
            assert "NVRTC 12.4 does not know sm_121a" in str(kernel.refuse(request)), kernel.name
            assert kernel.refuse(attrs.evolve(request, capability=HOPPER)) is None
            assert kernel.refuse(attrs.evolve(request, assumed=True)) is None


@pytest.mark.parametrize("scheme", ["bf16", "f16", "f32"])
def test_plain_embeddings_are_gathered_by_their_kernel_where_columns_allow(scheme: str) -> None:
    for columns, kernel in ((5120, "embedding_plain"), (5124, "embedding_reference")):
        for traits in ((), ("shared",)):
            request = _request("embedding", (248320, columns), scheme=scheme, traits=traits)
            assert _chosen(_plan(request)) == {(1, None): kernel}
    wide = _request("embedding", HEAD, scheme=scheme, dtype="float32")
    assert _chosen(_plan(wide)) == {(1, None): "embedding_reference"}


@pytest.mark.parametrize("op", ["norm_linears", "norm_linear_swiglu"])
def test_rows_too_long_for_the_norm_kernel_are_streamed_up_to_32_rows(op: str) -> None:
    long = _request(op, (1024, 16400))
    assert "rows of up to 16384 columns" in str(_kernel(f"{op}_nvfp4_wgmma_segments").refuse(long))
    assert _chosen(_plan(long))[1, 32] == f"{op}_nvfp4_stream"


@pytest.mark.parametrize("name", ["stream", "wgmma", "packed_widening", "stored", "widening"])
def test_a_modelled_cost_grows_with_the_weight_and_with_the_rows(name: str) -> None:
    kernel = _kernel(f"linear_nvfp4_{name}")
    assert callable(kernel.cost)
    last = min(kernel.tokens[1] or 512, 512)
    for capability in (HOPPER, SPARK):
        small, large = (_request(shape=s, capability=capability) for s in ((1024, 2048), (16384, 5120)))
        assert kernel.cost(small) < kernel.cost(large)
        costs = [
            kernel.cost(attrs.evolve(large, tokens=(m, last))) for m in range(kernel.tokens[0], last + 1)
        ]
        assert costs == sorted(costs)
        assert kernel.cost(attrs.evolve(small, traits=frozenset({"shared"}))) >= kernel.cost(small)


def test_a_call_takes_any_leading_shape() -> None:
    weight = quantize_nvfp4(torch.randn(24, 32))

    def rows_only(x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dim() == 2
        assert residual is None or residual.dim() == 2
        y = linear(x, weight)
        return y if residual is None else y + residual

    x, residual = torch.randn(2, 3, 32), torch.randn(2, 3, 24)
    call = over_rows(rows_only)
    assert torch.equal(call(x), linear(x, weight))
    assert torch.equal(call(x[0]), linear(x[0], weight))
    assert torch.equal(call(x[0, 0]), linear(x[:1, 0], weight)[0])
    assert torch.equal(call(x, residual), linear(x, weight) + residual)


def test_what_a_kernel_does_not_compute_is_computed_around_it() -> None:
    weight = quantize_nvfp4(torch.randn(24, 32))
    x, gain = torch.randn(5, 32), torch.rand(32)
    call = for_op("norm_linears", lambda x: linear(x, weight))
    assert torch.equal(call(x, gain, 1e-6), norm_linears(x, gain, 1e-6, [weight]))
    ids = for_op("linear_argmax", lambda x: linear(x, weight))(x.reshape(5, 1, 32))
    assert torch.equal(ids, linear(x, weight).argmax(-1).reshape(5, 1))


def test_the_27b_gets_the_same_kernels_in_explain(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VT_PLUGINS", "VT_PREFER", "VT_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    command = [
        sys.executable,
        str(shared / "tools" / "phantom.py"),
        "nvidia/Qwen3.6-27B-NVFP4",
        str(tmp_path / "m"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    few, more = ("stream", (1, 32)), ("packed_widening", (33, None))
    hopper = [("wgmma", (33, 64)), ("packed_widening", (65, None))]
    split = [("stream", (1, 16)), ("wgmma_segments", (17, 32)), *hopper]
    for target, accepted in (
        ("sm_90a", ([few, *hopper], split)),
        ("sm_121a", ([few, more],)),
        ("sm_89", ([few, more],)),
    ):
        assert main(["explain", str(tmp_path / "m"), "--assume", target, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        groups = [group for group in report["groups"] if group["scheme"] == "nvfp4"]
        assert groups
        for group in groups:
            found = [
                (kernel["kernel"].partition("_nvfp4_")[2], tuple(kernel["tokens"]))
                for kernel in group["kernels"]
            ]
            assert found in accepted, group["name"]
            if target != "sm_90a":
                lost = json.dumps(group["kernels"])
                assert "made for sm_90a" in lost, group["name"]
