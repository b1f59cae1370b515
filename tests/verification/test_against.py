"""The comparison with a reference: what a scheme reaches, worst blocks, names across layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_checkpoints import Tiny
from verify_tools import DOWN, run
from vtensors_plugins.verification.differences import Differences
from vtensors_plugins.verification.reach import reach_db


@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [("nvfp4", 20.4), ("fp8-tensor", 31.5), ("fp8-row", 31.5), ("fp8-block", 31.5), ("mxfp8", 31.5)],
)
def test_a_gaussian_weight_reaches_what_the_page_says(scheme: str, wanted: float) -> None:
    values = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    assert reach_db(scheme, values, (128, 128)) == pytest.approx(wanted, abs=0.4)


def test_bfloat16_reaches_56_db() -> None:
    values = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    found = Differences(columns=1024)
    found.add(0, values.bfloat16().float(), values)
    assert found.snr_db == pytest.approx(56, abs=0.5)


def test_what_is_not_a_matrix_of_a_known_scheme_has_no_limit() -> None:
    assert reach_db("bf16", torch.ones(4, 16), (128, 128)) is None
    assert reach_db("nvfp4", torch.ones(4, 15), (128, 128)) is None
    assert reach_db("nvfp4", torch.full((4, 16), float("nan")), (128, 128)) is None


def _differences(ours: Tensor, theirs: Tensor, window: int) -> Differences:
    found = Differences(columns=theirs.shape[1])
    for start in range(0, theirs.shape[0], window):
        found.add(start, ours[start : start + window], theirs[start : start + window])
    return found


@pytest.mark.parametrize("window", [128, 256, 1024])
def test_the_worst_block_is_named_wherever_windows_begin(window: int) -> None:
    theirs = torch.randn(700, 300, generator=torch.Generator().manual_seed(1))
    ours = theirs.clone()
    ours[650, 290] += 3.0
    ours[10, 10] += 0.5
    found = _differences(ours, theirs, window)
    assert [(b.rows, b.columns) for b in found.worst] == [((640, 700), (256, 300)), ((0, 128), (0, 128))]
    assert found.max_abs == pytest.approx(3.0, abs=1e-5)
    flat = torch.nn.functional.cosine_similarity(ours.flatten().double(), theirs.flatten().double(), dim=0)
    assert found.cosine == pytest.approx(float(flat), abs=1e-9)
    noise = (ours - theirs).double().square().sum()
    assert found.snr_db == pytest.approx(
        float(10 * torch.log10(theirs.double().square().sum() / noise)), abs=1e-6
    )


def test_equal_and_empty_tensors_have_no_ratio() -> None:
    found = Differences(columns=4)
    found.add(0, torch.zeros(2, 4), torch.zeros(2, 4))
    assert (found.snr_db, found.cosine, found.worst) == (None, 1.0, [])
    found.add(2, torch.ones(2, 4), torch.zeros(2, 4))
    assert found.snr_db == float("-inf")
    assert found.cosine == 0.0


def _renamed(tiny: Tiny, before: str, after: str) -> Tiny:
    tiny.tensors = {
        (after + n.removeprefix(before) if n.startswith(before) else n): t for n, t in tiny.tensors.items()
    }
    return tiny


def test_the_same_model_under_another_prefix_is_compared(tmp_path: Path) -> None:
    reference = _renamed(Tiny.plain_model("qwen3_5"), "model.", "model.language_model.").save(
        tmp_path / "reference"
    )
    report = run(Tiny.modelopt("FP8", "qwen3_5").save(tmp_path / "model"), against=reference)
    assert report.findings == ()
    assert len(report.comparisons) == len(Tiny.plain_model("qwen3_5").tensors)


def test_stacked_experts_are_compared_with_single_ones(tmp_path: Path) -> None:
    tiny = Tiny.plain_model("qwen3_5_moe")
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        pieces = {
            part: torch.stack([tiny.tensors.pop(f"{base}.{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        }
        tiny.tensors[f"{base}.gate_up_proj"] = torch.cat([pieces["gate"], pieces["up"]], 1)
        tiny.tensors[f"{base}.down_proj"] = pieces["down"]
    reference = tiny.save(tmp_path / "reference")
    report = run(Tiny.modelopt("NVFP4", "qwen3_5_moe").save(tmp_path / "model"), against=reference)
    assert report.findings == ()
    assert sum(row["verdict"] == "as good as nvfp4" for row in report.comparisons) == 2 * 6 * 3 + 2 * 3 + 7


def _fused(tiny: Tiny) -> Tiny:
    for layer in range(2):
        for owner, fused, parts in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            base = f"model.layers.{layer}.{owner}"
            own = [tiny.tensors.pop(f"{base}.{part}.weight") for part in parts]
            tiny.tensors[f"{base}.{fused}.weight"] = torch.cat(own)
    tiny.config["model_type"] = "of-nobody"
    return tiny


@pytest.mark.parametrize("fused_side", ["reference", "checkpoint"])
def test_fused_matrices_are_cut_by_the_rows_of_their_parts(fused_side: str, tmp_path: Path) -> None:
    fused = _fused(Tiny.plain_model()).save(tmp_path / "fused")
    split = Tiny.plain_model().save(tmp_path / "split")
    folder, reference = (split, fused) if fused_side == "reference" else (fused, split)
    report = run(folder, against=reference)
    assert {f.code for f in report.findings} <= {"unknown-architecture"}
    assert len(report.comparisons) == len(Tiny.plain_model().tensors)
    assert {row["verdict"] for row in report.comparisons} == {"exact"}


def test_a_changed_part_of_a_fused_matrix_is_named(tmp_path: Path) -> None:
    tiny = Tiny.plain_model()
    name = "model.layers.1.self_attn.k_proj.weight"
    tiny.tensors[name] = tiny.tensors[name].flip(0)
    reference = _fused(Tiny.plain_model()).save(tmp_path / "reference")
    (finding,) = run(tiny.save(tmp_path / "model"), against=reference).findings
    assert (finding.code, finding.tensor) == ("different-weight", name)


def test_a_pre_scale_counts_as_part_of_the_weight(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("NVFP4_AWQ")
    reference = Tiny.plain_model()
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        pre_scale = torch.linspace(0.5, 2, 48).bfloat16()
        tiny.tensors[f"{name}.pre_quant_scale"] = pre_scale
        values = reference.tensors[f"{name}.weight"].float() * pre_scale.float()
        reference.tensors[f"{name}.weight"] = values.bfloat16()
    report = run(tiny.save(tmp_path / "model"), against=reference.save(tmp_path / "reference"))
    assert report.findings == ()


def test_a_wrong_constant_factor_is_another_weight_though_the_cosine_is_1(tmp_path: Path) -> None:
    tiny = Tiny.plain_model()
    tiny.tensors[f"{DOWN}.weight"] = tiny.tensors[f"{DOWN}.weight"] * 2
    (finding,) = run(tiny.save(tmp_path / "model"), against=Tiny.plain_model().save(tmp_path / "x")).findings
    assert finding.code == "different-weight"
    assert "cosine 1.000000, 0.00 dB" in finding.seen
