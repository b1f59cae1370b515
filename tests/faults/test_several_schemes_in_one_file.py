"""Checkpoints of several schemes: each module gets its own, from its tensors and the entry that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_builders import NAME, NVFP4, SPELLINGS, Spelling, by_formula, compressed, write_module
from tiny_models import IDS, load, logits, plain_tensors, quantised, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config
from vtensors.errors import DeclarationError, VtensorsError
from vtensors.inspection import inspection

CONFIG = tiny_config("qwen3_5")
TENSORS = plain_tensors(CONFIG)
GATE, UP, DOWN = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))
MTP = {"mtp.fc.weight": torch.ones(32, 64, dtype=torch.bfloat16)}
VISION = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(48, 16, dtype=torch.bfloat16)}


def check_model(
    tmp_path: Path, schemes: dict[str, Spelling], block: dict[str, Any] | None, **options: Any
) -> vtensors.Checkpoint:
    """Modules stored in these spellings load as declared and give what their values by formula give."""
    own = {m: s.stored(m, TENSORS[f"{m}.weight"].float()) for m, s in schemes.items()}
    values = {
        m: {f"{m}.weight": by_formula({n.rpartition(".")[2]: t for n, t in own[m].items()})} for m in schemes
    }
    extra = {**MTP, **VISION}
    folder = write_model(
        tmp_path / "q", CONFIG, quantised({**TENSORS, **extra}, own), quantization=block, **options
    )
    plain = write_model(tmp_path / "p", CONFIG, quantised(TENSORS, values))
    model = load(folder)
    assert torch.equal(model.logits(IDS), logits(plain))
    checkpoint: vtensors.Checkpoint = model.checkpoint
    assert checkpoint.conflicts == ()
    assert {m: checkpoint.modules[m].scheme for m in schemes} == {m: s.scheme for m, s in schemes.items()}
    return checkpoint


def mixed(layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """ModelOpt's block of several algorithms."""
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


LAYERS = {
    GATE: {"quant_algo": "NVFP4", "group_size": 16},
    UP: {"quant_algo": "NVFP4", "group_size": 16},
    DOWN: {"quant_algo": "FP8"},
}


@pytest.mark.fault("B34")
@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json", "both"])
@pytest.mark.parametrize("listed", ["each", "fused"])
def test_mixed_precision_loads_layer_by_layer(tmp_path: Path, where: str, listed: str) -> None:
    layers = dict(LAYERS)
    if listed == "fused":
        layers = {"model.layers.0.mlp.gate_up_proj": LAYERS[GATE], DOWN: LAYERS[DOWN]}
    block = {"quant_method": "modelopt", **mixed(layers)} if where != "hf_quant_config.json" else None
    legacy = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": mixed(layers)}
    nvfp4, fp8 = SPELLINGS["modelopt-nvfp4"], SPELLINGS["modelopt-fp8-tensor"]
    checkpoint = check_model(
        tmp_path,
        {GATE: nvfp4, UP: nvfp4, DOWN: fp8},
        block,
        hf_quant=legacy if where != "config.json" else None,
    )
    assert [checkpoint.modules[m].algorithm for m in (GATE, UP, DOWN)] == ["NVFP4", "NVFP4", "FP8"]


@pytest.mark.fault("B34")
@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["NVFP9", "FP4_MAGIC", "nvfp4_svd"])
def test_an_unknown_algorithm_names_its_layer_and_the_accepted_ones(
    tmp_path: Path, algorithm: str, where: str
) -> None:
    block = mixed({**LAYERS, DOWN: {"quant_algo": algorithm}})
    files = (
        {"quantization": {"quant_method": "modelopt", **block}}
        if where == "config.json"
        else {"hf_quant": {"quantization": block}}
    )
    with pytest.raises(DeclarationError) as caught:
        vtensors.open_checkpoint(write_model(tmp_path, CONFIG, TENSORS, **files))
    message = str(caught.value)
    assert all(part in message for part in (repr(algorithm), DOWN, where))
    assert all(word in message for word in ("NVFP4", "W4A16_NVFP4", "FP8_PB_WO", "MXFP8", "MIXED_PRECISION"))


@pytest.mark.fault("B35")
@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
def test_a_packed_layer_of_a_mixed_config_has_its_full_width(tmp_path: Path, algorithm: str) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    tensors = SPELLINGS["modelopt-nvfp4"].encode(weight)
    assert tuple(tensors["weight"].shape) == (64, 32)
    block = {"quant_method": "modelopt", **mixed({NAME: {"quant_algo": algorithm}})}
    checkpoint = write_module(tmp_path, tensors, block)
    checkpoint.check()
    assert checkpoint.modules[NAME].shape == (64, 64)


@pytest.mark.fault("B35")
@pytest.mark.parametrize(
    "left",
    [
        ("weight",),
        ("weight", "weight_scale"),
        ("weight", "weight_scale_2"),
        ("weight", "weight_scale", "other"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("block", [None, {"quant_method": "modelopt", **mixed({GATE: LAYERS[GATE]})}])
def test_a_half_width_byte_matrix_that_no_rule_matches_is_said_to_look_packed(
    tmp_path: Path, left: tuple[str, ...], block: dict[str, Any] | None
) -> None:
    stored = SPELLINGS["modelopt-nvfp4"].encode(TENSORS[f"{DOWN}.weight"])
    own = {f"{DOWN}.{suffix}": stored.get(suffix, torch.ones(3)) for suffix in left}
    if block is not None:
        gate = SPELLINGS["modelopt-nvfp4"].stored(GATE, TENSORS[f"{GATE}.weight"])
        folder = write_model(
            tmp_path, CONFIG, quantised(TENSORS, {DOWN: own, GATE: gate}), quantization=block
        )
    else:
        folder = write_model(tmp_path, CONFIG, quantised(TENSORS, {DOWN: own}))
    with pytest.raises(VtensorsError, match=f"looks NVFP4-packed but no NVFP4 rule matched {DOWN}"):
        load(folder)


def _bf16_scales(spelling: Spelling) -> Spelling:
    def encode(weight: Tensor) -> dict[str, Tensor]:
        stored = spelling.encode(weight)
        return {"weight": stored["weight"], "weight_scale": stored["weight_scale"].bfloat16()}

    return Spelling(name="bf16-scales", scheme=spelling.scheme, convention=spelling.convention, encode=encode)


@pytest.mark.fault("B36")
@pytest.mark.parametrize("formats", ["in-groups", "inferred"])
@pytest.mark.parametrize("targets", ["names", "regex"])
def test_two_compressed_tensors_groups_give_each_module_its_own_scheme(
    tmp_path: Path, targets: str, formats: str
) -> None:
    row, nvfp4 = SPELLINGS["compressed-fp8-row"], SPELLINGS["compressed-nvfp4"]
    attention = [f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"]
    fp8 = [*attention, "lm_head", "model.layers.1.mlp.down_proj"]
    packed = [GATE, UP, DOWN]
    groups = {
        "group_0": {"targets": fp8, **row.group},
        "group_1": {"targets": packed, **nvfp4.group},
    }
    if targets == "regex":
        groups["group_0"]["targets"] = ["re:.*self_attn.*_proj", "re:.*lm_head", r"re:.*layers\.1\.mlp\.down"]
        groups["group_1"]["targets"] = [r"re:.*layers\.0\.mlp\.(gate|up|down)_proj$"]
    if formats == "inferred":
        for group in groups.values():
            del group["format"]
    schemes = dict.fromkeys(fp8, _bf16_scales(row)) | dict.fromkeys(packed, nvfp4)
    checkpoint = check_model(tmp_path, schemes, compressed(ignore=["re:.*visual.*", "re:mtp.*"], **groups))
    rows = {row["scheme"]: row for row in inspection(checkpoint)["schemes"]}
    assert (rows["fp8-row"]["modules"], rows["nvfp4"]["modules"]) == (6, 3)
    assert rows["fp8-row"]["parts"] == {"attention": 4, "mlp": 1, "lm_head": 1}
    waived = {reason: len(names) for reason, names in checkpoint.accounting.waived.items()}
    assert waived == {"vision tower: text path only": 1, "multi-token prediction: not used": 1}


@pytest.mark.fault("B37")
@pytest.mark.parametrize("publisher", ["modelopt", "compressed"])
@pytest.mark.parametrize("size", ["tensor", "row", "block"])
def test_weight_scale_means_what_its_own_module_is(tmp_path: Path, publisher: str, size: str) -> None:
    fp8, nvfp4 = SPELLINGS[f"{publisher}-fp8-{size}"], SPELLINGS[f"{publisher}-nvfp4"]
    first, second = fp8.declaration([UP]), nvfp4.declaration([DOWN])
    if publisher == "modelopt":
        first["quantized_layers"] |= second["quantized_layers"]
    else:
        first["config_groups"]["group_1"] = second["config_groups"]["group_0"]
    check_model(tmp_path, {UP: fp8, DOWN: nvfp4}, first)


@pytest.mark.fault("B38")
@pytest.mark.parametrize("style", ["nvfp4-pack-quantized", None])
def test_float_4_bit_weights_without_activations_are_weight_only_nvfp4(
    tmp_path: Path, style: str | None
) -> None:
    spelling = SPELLINGS["compressed-nvfp4"]
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    block = {**compressed(group_0=group), "format": style}
    tensors = spelling.encode(torch.randn(32, 64, generator=torch.Generator().manual_seed(4)))
    checkpoint = write_module(tmp_path, tensors, block)
    checkpoint.check()
    module = checkpoint.modules[NAME]
    assert (module.scheme, module.declared, module.algorithm) == ("nvfp4", "16bit", "nvfp4-pack-quantized")


@pytest.mark.fault("B38")
def test_integer_4_bit_weights_are_refused_by_their_own_name(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 16}}
    with pytest.raises(DeclarationError, match="recognized but not supported") as caught:
        write_module(tmp_path, {"weight": torch.ones(32, 64)}, compressed(group_0=group))
    assert "'pack-quantized'" in str(caught.value)


@pytest.mark.fault("B39")
@pytest.mark.parametrize("scaled", [False, True], ids=["weight-only", "input-scale"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_quantised_head_stays_quantised_and_gives_its_own_logits(
    tmp_path: Path, spelling: str, scaled: bool
) -> None:
    found = SPELLINGS[spelling]
    stored = found.encode(TENSORS["lm_head.weight"].float())
    suffix = "input_global_scale" if spelling == "compressed-nvfp4" else "input_scale"
    extra = {f"lm_head.{suffix}": torch.tensor(64.0 if spelling in NVFP4 else 0.5)} if scaled else {}
    own = {"lm_head": {**found.stored("lm_head", TENSORS["lm_head.weight"].float()), **extra}}
    others = {name.removesuffix(".weight") for name in TENSORS} - {"lm_head"}
    block = found.declaration(["lm_head"], sorted(others))
    model = load(write_model(tmp_path / "q", CONFIG, quantised(TENSORS, own), quantization=block))
    module = model.checkpoint.modules["lm_head"]
    assert (module.scheme, module.convention) == (found.scheme, found.convention)
    assert [r.scheme for r in model.selected if r.module == "lm_head"] == [found.scheme]
    values = {"lm_head": {"lm_head.weight": by_formula(stored)}}
    assert torch.equal(
        model.logits(IDS), logits(write_model(tmp_path / "p", CONFIG, quantised(TENSORS, values)))
    )


_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("weight_only", "static"),
    [
        ([NAME], ["re:.*"]),
        (["re:.*_proj"], ["re:model.*"]),
        (["re:model.*"], ["Linear"]),
        ([NAME], [NAME]),
        (["Linear"], ["Linear"]),
    ],
    ids=["exact-regex", "regex-regex", "regex-class", "exact-exact", "class-class"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_overlapping_groups_are_ranked_as_their_writer_ranks_them(
    tmp_path: Path, weight_only: list[str], static: list[str], turned: bool
) -> None:
    groups = [
        {"targets": weight_only, "weights": _ROWS, "input_activations": None, "format": "naive-quantized"},
        {"targets": static, "weights": _ROWS, "input_activations": _STATIC, "format": "float-quantized"},
    ]
    if turned:
        groups.reverse()
    block = {**compressed(group_0=groups[0], group_1=groups[1]), "format": "mixed-precision"}
    tensors = {"weight": torch.ones(32, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(32, 1)}
    module = write_module(tmp_path, tensors, block).modules[NAME]
    # Where both groups have the very same target, the later one counts.
    later = weight_only == static and not turned
    assert module.declared == ("fp8-static" if later else "16bit")
