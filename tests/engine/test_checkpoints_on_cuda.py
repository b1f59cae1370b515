"""Whole checkpoints on a CUDA device in bfloat16, with every kernel of every scheme forced in turn.

Each linear is held against the reference on the x that it got, and the logits against the oracle's.
"""

from __future__ import annotations

import pytest
import torch
from exam_checkpoints import EXAMS, Exam
from safetensors.torch import load_file
from torch import Tensor

import vtensors
from cuda_exam import Checkpoints, check_forced, force
from forced_kernels import PROFILES, Profile
from linears_in_place import check_calls, watch
from vtensors_kernels.nvfp4.wgmma_mlp import WgmmaMlp

pytestmark = pytest.mark.gpu

# Of the largest logit of the float32 reference. The checkpoints have random weights, which amplify the rounding of
# 16-bit activations: the reference kernels in bfloat16 on a CPU are off by at most 0.103 (mean 0.0062). A wrong
# scale, row or order moves logits by as much as they are.
MOST, MEAN = 0.15, 0.012


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp)


def _compare(ours: Tensor, wanted: Tensor, what: str, *, mixture: bool = False) -> None:
    """mixture: where logits of a router are nearly equal, a token may get another expert, and differ by that."""
    error, largest = (ours.float().cpu() - wanted).abs(), wanted.abs().max()
    most, mean = float(error.max() / largest), float(error.mean() / largest)
    print(f"{what}: error at most {most:.4f}, mean {mean:.4f} of the largest logit")
    assert mixture or most <= MOST
    assert mean <= MEAN


@pytest.mark.fault("B18")
@pytest.mark.fault("B14")
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("exam", EXAMS, ids=lambda exam: exam.name)
def test_each_kernel_forced_in_turn_gives_the_oracles_logits(
    exam: Exam, profile: Profile, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VT_KERNELS", raising=False)
    path, wanted = checkpoints.path(exam), checkpoints.wanted(exam, "16bit")
    force(path, "16bit", profile, monkeypatch)
    calls = watch(monkeypatch)
    model = vtensors.load_model(path, device="cuda", dtype="bfloat16", activations="16bit")
    for ids, logits in wanted:
        merged = model.logits(ids.cuda())
        _compare(merged, logits, f"{ids.shape[1]} rows", mixture=exam.mixture)
        with monkeypatch.context() as apart:
            # An MLP's products hand on what lies between them; each by itself is what is watched, with the same bits.
            apart.setattr(WgmmaMlp, "serves", lambda *_: False)
            assert torch.equal(model.logits(ids.cuda()), merged)
    check_forced(calls, profile)
    check_calls(calls)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one-by-one"])
@pytest.mark.parametrize("exam", [exam for exam in EXAMS if exam.mixture], ids=lambda exam: exam.name)
def test_experts_together_and_one_by_one(
    exam: Exam, grouped: bool, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VT_KERNELS", raising=False)
    path, wanted = checkpoints.path(exam), checkpoints.wanted(exam, "16bit")
    if not grouped:
        monkeypatch.setenv("VT_KERNELS", "*:!experts_*_grouped")
    calls = watch(monkeypatch)
    model = vtensors.load_model(path, device="cuda", dtype="bfloat16", activations="16bit")
    for record in model.selected:
        if ".experts." in record.module:
            assert record.asked == "experts"
            assert record.kernel.startswith("experts_") == grouped, record
            assert "reference" not in record.kernel
            assert record.kernel.endswith("_grouped") == grouped, record
    for ids, logits in wanted:
        _compare(model.logits(ids.cuda()), logits, f"{ids.shape[1]} rows", mixture=True)
    assert any(call.request.op == "experts" for call in calls) == grouped
    check_calls(calls)


@pytest.mark.parametrize("activations", ["16bit", "declared"])
@pytest.mark.parametrize("exam", EXAMS, ids=lambda exam: exam.name)
def test_the_kernels_that_are_selected_are_right_without_a_fallback(
    exam: Exam, activations: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_STRICT", "fallbacks")
    monkeypatch.delenv("VT_KERNELS", raising=False)
    calls = watch(monkeypatch)
    path = checkpoints.path(exam)
    model = vtensors.load_model(path, device="cuda", dtype="bfloat16", activations=activations)
    if activations == "declared" and not any(record.executed != "16bit" for record in model.selected):
        pytest.skip("declares 16-bit activations")
    for record in model.selected:
        assert not any(name.endswith("_reference") for _, _, name in record.kernels), record
    logits = model.logits(exam.ids().cuda())
    check_calls(calls)
    if activations == "16bit" and exam.case is not None:
        tensors = load_file(exam.case.oracle_folder / "tensors.safetensors")
        _compare(logits, tensors["logits"], exam.name, mixture=exam.mixture)
