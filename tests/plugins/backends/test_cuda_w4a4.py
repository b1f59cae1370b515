"""Kernels with NVFP4 activations on devices that are not here: who serves, who refuses, and what `explain` shows."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from faults.test_cuda_selection import EVERY, KERNELS, SHAPES, asked, kernels_of, planned
from project.source_tree import REPOSITORY
from vtensors_formats import NVFP4Weight
from vtensors_formats.activations import FP4Activation
from vtensors_kernels.layouts import prepared_bytes
from vtensors_kernels.nvfp4 import block_scaled, emulated_w4a4, w4a4_cublas
from vtensors_kernels.nvfp4.block_scaled_packing import pack_block_scaled
from vtensors_kernels.nvfp4.emulated_w4a4 import with_activation
from vtensors_kernels.nvfp4.w4a4_cublas import pack_tiled
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.nvfp4_packing import pack_reference, unpack_reference
from vtensors_plugins.backends import cuda_w4a4, cuda_w4a4_binding
from vtensors_plugins.backends.cuda_w4a4 import EMULATED, W4A4_OPS, w4a4_kernels
from vtensors_plugins.commands.explain import command

NATIVE = {"sm_120a": "block_scaled", "sm_121a": "block_scaled", "sm_100a": "cublas", "sm_103a": "cublas"}
CAPABILITIES = {(12, 0): "block_scaled", (12, 1): "block_scaled", (10, 0): "cublas", (10, 3): "cublas"}


def weight_of(n: int, k: int, *, seed: int = 0, **changes: Any) -> NVFP4Weight:
    source = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 127, (n, k // 16), generator=source, dtype=torch.uint8)
    weight = NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scales.view(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 4096),
        activation=FP4Activation(global_scale=torch.tensor(0.002)),
    )
    return attrs.evolve(weight, **changes)


@pytest.mark.fault("B72")
@pytest.mark.parametrize("capability", EVERY)
@pytest.mark.parametrize("op", W4A4_OPS)
def test_every_card_runs_4_bit_activations_and_none_is_left_to_the_reference(
    op: str, capability: tuple[int, int]
) -> None:
    for shape in SHAPES:
        ranges = kernels_of(planned(asked(shape, capability, op=op, activations="fp4")))
        assert ranges, "taken apart"
        kernels = {name.removeprefix(f"{op}_nvfp4_w4a4_") for name in ranges.values()}
        if capability in CAPABILITIES:
            assert kernels == {CAPABILITIES[capability]}
        else:
            assert kernels <= {f"emulated_{kernel}" for kernel in EMULATED}


@pytest.mark.fault("B73")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (12, 2)])
def test_block_scaled_products_are_chosen_on_their_own_cards_alone(capability: tuple[int, int]) -> None:
    plan = planned(asked(capability=capability, activations="fp4"))
    used, rejected = set(kernels_of(plan).values()), dict(plan.rejected)
    for kernel, cards in (("block_scaled", [(12, 0), (12, 1)]), ("cublas", [(10, 0), (10, 3)])):
        name = f"linear_nvfp4_w4a4_{kernel}"
        assert (name in used) == (capability in cards)
        assert name in used or rejected[name].startswith("made for sm_1")


@pytest.mark.fault("B93")
@pytest.mark.parametrize("capability", list(CAPABILITIES))
def test_few_rows_and_a_prompt_use_4_bit_tensor_cores_where_they_are_and_keep_one_copy(
    capability: tuple[int, int],
) -> None:
    plan = planned(asked(capability=capability, activations="fp4"))
    assert list(kernels_of(plan)) == [(1, None)]
    # The emulated kernels stand in the report with their cost.
    assert "linear_nvfp4_w4a4_emulated_packed_widening" in dict(plan.segments[0].lost)


@pytest.mark.fault("B31")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)])
@pytest.mark.parametrize("op", W4A4_OPS)
def test_rows_1_to_32_keep_their_bits(op: str, capability: tuple[int, int]) -> None:
    for shape in SHAPES:
        plan = planned(asked(shape, capability, op=op, activations="fp4"))
        orders = {segment.kernel.sums for segment in plan.segments if segment.tokens[0] <= 32}
        assert len(orders) == 1
        assert orders != {""}


def test_kernels_for_16_bit_activations_and_these_refuse_each_others_requests() -> None:
    for kernel in KERNELS:
        if kernel.name.startswith("linear_nvfp4"):
            four = kernel.refuse(asked(activations="fp4"))
            sixteen = kernel.refuse(asked())
            own = "_w4a4_" in kernel.name
            assert (four is None) == own
            assert ("fp4" in str(sixteen)) == own


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("block_scaled", {"shape": (64, 40)}, "needs K to be a multiple of 16, not 40"),
        ("cublas", {"shape": (64, 48)}, "needs K to be a multiple of 32, not 48"),
        ("emulated_stream", {"traits": frozenset({"group64"})}, "knows groups of 16 or 32, not of 64"),
        ("emulated_stream", {"dtype": "float32"}, "computes in bfloat16 or float16, not float32"),
    ],
)
def test_what_a_kernel_is_not_made_for_is_refused_with_the_rule(
    kernel: str, changes: dict[str, Any], reason: str
) -> None:
    (spec,) = [k for k in w4a4_kernels() if k.name == f"linear_nvfp4_w4a4_{kernel}"]
    assert spec.refuse(asked(activations="fp4", **{"shape": (64, 64), **changes})) == reason


def test_a_norm_before_a_pre_scale_is_taken_apart() -> None:
    plan = planned(asked(op="norm_linears", activations="fp4", traits=frozenset({"pre_scale"})))
    assert plan.decomposed
    reason = dict(plan.rejected)["norm_linears_nvfp4_w4a4_emulated_stream"]
    assert reason == "a norm and a pre-scale round x twice; the kernel does it once"


def test_the_records_name_what_the_launchers_are() -> None:
    assert cuda_w4a4._NATIVE["block_scaled"][0] == block_scaled.TARGETS
    assert cuda_w4a4._NATIVE["cublas"][0] == w4a4_cublas.TARGETS
    assert cuda_w4a4._CUBLAS_COLUMNS == w4a4_cublas.COLUMNS
    layouts = {kernel.layout for kernel in w4a4_kernels()}
    assert emulated_w4a4.LAYOUT in layouts
    assert emulated_w4a4.PAIRED_LAYOUT in layouts
    assert set(cuda_w4a4_binding.PACKERS) == {"emulated", *cuda_w4a4._NATIVE}
    assert all(kernel.probe is not None and kernel.fingerprint is not None for kernel in w4a4_kernels())


def test_the_global_scale_of_activations_is_folded_into_the_rows_of_an_emulated_weight() -> None:
    parts = [weight_of(16, 64), weight_of(19, 64, seed=1, global_scale=torch.tensor(0.01))]
    pre_scale = torch.linspace(0.5, 1.5, 64)
    packed = attrs.evolve(pack_reference(parts), pre_scale=pre_scale)
    activation = parts[0].activation
    assert isinstance(activation, FP4Activation)
    made = with_activation(packed, parts, activation)
    assert torch.equal(made.packed.blocks, packed.blocks)
    assert torch.allclose(made.packed.row_scale, packed.row_scale * 0.002, rtol=1e-6, atol=0)
    # The pre-scale comes before the quantizer, not behind it.
    assert made.packed.pre_scale is None
    assert made.pre_scale is not None
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes = activation(x.float()) / 0.002
    wanted = torch.cat([linear(x.float(), part, activation) for part in parts], dim=-1)
    ours = codes @ unpack_reference(made.packed)[:35].T
    assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (40, 48), (1, 16), (300, 400)])
def test_layouts_tell_their_size_from_the_shape(n: int, k: int, paired: bool) -> None:
    bias = torch.ones(n)
    parts = [weight_of(n, k, bias=bias, pre_scale=torch.ones(k)) for _ in range(1 + paired)]
    request = asked((n * len(parts), k), activations="fp4", traits=frozenset({"bias", "pre_scale"}))
    suffix = "-pairs" if paired else ""
    native, tiled = pack_block_scaled(parts, paired=paired), pack_tiled(parts, paired=paired)
    assert prepared_bytes(f"nvfp4-block-scaled{suffix}", request, 0) == native.nbytes
    assert prepared_bytes(f"nvfp4-tiled-scales{suffix}", request, 0) == tiled.nbytes


@pytest.mark.parametrize("target", ["sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("activations", ["declared", "fp4"])
def test_explain_shows_the_kernel_of_each_card(target: str, activations: str) -> None:
    path = str(REPOSITORY / "tests" / "data" / "llamazero-modelopt-nvfp4")
    shown = CliRunner().invoke(
        command, [path, "--assume", target, "--activations", activations, "--dtype", "bfloat16", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    rows = [row for row in json.loads(shown.output)["groups"] if row["scheme"] == "nvfp4"]
    assert rows
    for row in rows:
        native = NATIVE.get(target, "emulated")
        # cuBLAS takes no rows of 176 columns.
        wanted = "emulated" if native == "cublas" and row["shape"][1] % 32 else native
        names = [entry["kernel"] for entry in row["kernels"]]
        assert all(f"_w4a4_{wanted}" in name for name in names), names
