"""What the exams of whole checkpoints on a CUDA device share: checkpoints, references, and what must have run.

Import as `from cuda_exam import checkpoints, forced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from exam_checkpoints import Exam, groups_of
from torch import Tensor

import vtensors
from forced_kernels import Profile
from linears_in_place import Call
from vtensors.verdicts import Verdicts

# Rows of one call beside those of the input: few, and more than the kernels for up to 32 take.
FEW, MANY = 3, 48


class Checkpoints:
    """Paths of exams, made when asked for; inputs and what the reference gives in float32 on the CPU."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._wanted: dict[tuple[str, str], tuple[tuple[Tensor, Tensor], ...]] = {}

    def path(self, exam: Exam) -> Path:
        """The checkpoint, made once."""
        if exam.name not in self._paths:
            self._paths[exam.name] = exam.make(self._folder(exam.name))
        return self._paths[exam.name]

    def wanted(self, exam: Exam, activations: str) -> tuple[tuple[Tensor, Tensor], ...]:
        """(ids, logits) of calls with 3, 24 or 32, and 48 rows. The switches must not be set yet."""
        key = (exam.name, activations)
        if key not in self._wanted:
            model = vtensors.load_model(
                self.path(exam), device="cpu", dtype="float32", activations=activations
            )
            ids = exam.ids()
            flat = ids.reshape(1, -1)
            inputs = (ids[:1, :FEW], ids, flat.repeat(1, -(-MANY // flat.shape[1]))[:, :MANY])
            self._wanted[key] = tuple((given, model.logits(given)) for given in inputs)
        return self._wanted[key]


def force(path: Path, activations: str, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set VT_KERNELS; skips where the profile has nothing for the checkpoint, or this card no such kernel.

    Self-tests are left out: what they would turn away is to fail here.
    """
    monkeypatch.delenv("VT_KERNELS", raising=False)
    if profile.hopper and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")
    switch = profile.switch(group.request for group in groups_of(path, activations))
    if not switch:
        pytest.skip(f"nothing of {profile.name} is for this checkpoint")
    monkeypatch.setenv("VT_KERNELS", switch)
    monkeypatch.setattr(Verdicts, "failure", lambda *_: None)


def check_forced(calls: Sequence[Call], profile: Profile) -> None:
    """Fails unless every kernel that the profile forces was bound wherever it can serve, and ran.

    Each in some layer of the same scheme and op: an expert gets too few tokens for the kernels of many rows.
    """
    wanted: set[tuple[str, str]] = set()
    for call in calls:
        forced = profile.expected(call.request)
        assert set(forced) <= set(call.kernels), f"{call.request}: forced {forced}, bound {call.kernels}"
        wanted |= {(call.request.scheme, name) for name in forced}
    missing = wanted - {(call.request.scheme, call.kernel) for call in calls}
    print(f"{profile.name}: {', '.join(sorted(name for _, name in wanted))}")
    assert wanted
    assert not missing
