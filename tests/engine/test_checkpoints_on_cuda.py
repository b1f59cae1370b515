"""Whole checkpoints on a CUDA device in bfloat16, with every kernel that can serve NVFP4 forced in turn."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from oracle_cases import DATA, Case, all_cases
from safetensors.torch import load_file
from torch import Tensor

import vtensors
from vtensors_plugins.architectures.outline import outline

pytestmark = pytest.mark.gpu

KERNELS = ["stream", "wgmma", "packed_widening", "stored", "widening"]
# Of the largest logit of the float32 reference. The checkpoints have random weights, which amplify the rounding of
# 16-bit activations: the reference kernels in bfloat16 on a CPU are off by at most 0.103 (mean 0.0056). A wrong
# scale, row or order moves logits by as much as they are.
MOST, MEAN = 0.15, 0.012
# Rows of one call: those of the oracle (24 or 32), and more than the kernels for few rows take.
MANY = 48


@lru_cache(maxsize=1)
def _cases() -> tuple[Case, ...]:
    """The checkpoints of tests/data with NVFP4 weights."""
    found = [case for case in all_cases() if DATA in case.oracle_folder.parents]
    return tuple(
        case
        for case in found
        if any(group.request.scheme == "nvfp4" for group in outline(vtensors.open_checkpoint(case.path)))
    )


@lru_cache(maxsize=32)
def _reference(path: Path) -> tuple[Tensor, Tensor]:
    """ids [1, 48] made of the oracle's, and their logits by the reference in float32 on the CPU."""
    ids = load_file(path / "tensors.safetensors")["input_ids"].reshape(1, -1)
    ids = ids.repeat(1, -(-MANY // ids.shape[1]))[:, :MANY]
    (case,) = [case for case in _cases() if case.oracle_folder == path]
    return ids, vtensors.load_model(case.path, device="cpu", dtype="float32").logits(ids)


def _compare(ours: Tensor, wanted: Tensor, what: str) -> None:
    error, largest = (ours.float().cpu() - wanted).abs(), wanted.abs().max()
    most, mean = float(error.max() / largest), float(error.mean() / largest)
    print(f"{what}: error at most {most:.4f}, mean {mean:.4f} of the largest logit")
    assert most <= MOST
    assert mean <= MEAN


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_each_nvfp4_kernel_forced_in_turn_gives_the_oracles_logits(
    case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")
    monkeypatch.delenv("VT_KERNELS", raising=False)
    ids, wanted = _reference(case.oracle_folder)
    monkeypatch.setenv("VT_KERNELS", f"nvfp4:*_nvfp4_{kernel}")
    model = vtensors.load_model(case.path, device="cuda", dtype="bfloat16")
    records = [
        record for record in model.selected if record.scheme == "nvfp4" and record.asked != "embedding"
    ]
    assert records
    for record in records:
        names = [name for _, _, name in record.kernels]
        assert f"{record.op}_nvfp4_{kernel}" in names, f"{record.module}: {record.kernels}, {record.rejected}"
        if kernel in ("packed_widening", "widening"):
            assert len(names) == 1
    tensors = load_file(case.oracle_folder / "tensors.safetensors")
    _compare(model.logits(tensors["input_ids"].cuda()), tensors["logits"], f"{case.name} {kernel}")
    _compare(model.logits(ids.cuda()), wanted, f"{case.name} {kernel}, {MANY} rows")


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_the_kernels_that_are_selected_give_the_oracles_logits_without_a_fallback(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_STRICT", "fallbacks")
    monkeypatch.delenv("VT_KERNELS", raising=False)
    model = vtensors.load_model(case.path, device="cuda", dtype="bfloat16")
    for record in model.selected:
        if record.scheme == "nvfp4":
            assert not any(name.endswith("_reference") for _, _, name in record.kernels), record
    tensors = load_file(case.oracle_folder / "tensors.safetensors")
    _compare(model.logits(tensors["input_ids"].cuda()), tensors["logits"], case.name)
