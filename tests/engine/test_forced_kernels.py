"""What the exam of forced kernels asks for is what a Hopper card would run, for every scheme and checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from exam_checkpoints import EXAMS, groups_of

from forced_kernels import DECLARED, PROFILES, Profile
from vtensors_plugins.backends.cuda import vtensors_kernels

ASKED = (("16bit", PROFILES), ("declared", DECLARED))


def test_together_the_checkpoints_run_every_kernel_that_multiplies_on_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    for exam in EXAMS:
        path = exam.make(tmp_path / exam.name)
        for activations, profiles in ASKED:
            for profile in profiles:
                monkeypatch.delenv("VT_KERNELS", raising=False)
                switch = profile.switch(group.request for group in groups_of(path, activations))
                if switch:
                    monkeypatch.setenv("VT_KERNELS", switch)
                    found |= _served(path, activations, profile)
    every = {
        kernel.name.removeprefix(f"{kernel.op}_")
        for kernel in vtensors_kernels()
        if kernel.op not in ("embedding", "experts") and not {"cuda", "sm_90a"}.isdisjoint(kernel.targets)
    }
    assert {kernel for kernel in every if not any(name.endswith(f"_{kernel}") for name in found)} == set()


def _served(path: Path, activations: str, profile: Profile) -> set[str]:
    """Kernels that the profile forces, all of which must serve."""
    found: set[str] = set()
    for group in groups_of(path, activations):
        names, wanted = {s.kernel.name for s in group.plan.segments}, set(profile.expected(group.request))
        assert wanted <= names, f"{path} {profile.name}: {group.request}: {names} {group.plan.rejected}"
        found |= wanted
    return found
