"""Checkpoints with the activations that they declare on a CUDA device, with every kernel forced in turn.

Each linear is held against the reference on the x that it got, in float16, whose outputs are the least rounded. Of
whole logits little can be asked (docs/accuracy.md): on average they are no farther from the reference in float32 than
twice what the reference in float16 is.
"""

from __future__ import annotations

import pytest
from exam_checkpoints import EXAMS, Exam
from torch import Tensor

import vtensors
from cuda_exam import Checkpoints, check_forced, force
from forced_kernels import DECLARED, Profile
from linears_in_place import check_calls, watch

pytestmark = pytest.mark.gpu

DTYPE = "float16"
FACTOR = 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp)


def _mean(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.float().cpu() - wanted).abs().mean() / wanted.abs().max())


@pytest.mark.fault("B32")
@pytest.mark.parametrize("profile", DECLARED, ids=lambda profile: profile.name)
@pytest.mark.parametrize("exam", EXAMS, ids=lambda exam: exam.name)
def test_each_kernel_forced_in_turn_quantizes_as_declared(
    exam: Exam, profile: Profile, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VT_KERNELS", raising=False)
    path, wanted = checkpoints.path(exam), checkpoints.wanted(exam, "declared")
    reference = vtensors.load_model(path, device="cpu", dtype=DTYPE, activations="declared")
    force(path, "declared", profile, monkeypatch)
    calls = watch(monkeypatch)
    model = vtensors.load_model(path, device="cuda", dtype=DTYPE, activations="declared")
    told = []
    for ids, logits in wanted:
        ours = _mean(model.logits(ids.cuda()), logits)
        told.append((ours, _mean(reference.logits(ids), logits)))
    print([f"{ours:.4f}, reference {honest:.4f}" for ours, honest in told])
    check_forced(calls, profile)
    check_calls(calls)
    assert sum(ours for ours, _ in told) <= FACTOR * sum(honest for _, honest in told)
