"""What every test has: the hypothesis profile, the skip of GPU tests and the folder beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where torch sees no CUDA device; torch is imported only for such tests."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, torch sees none")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints, configs and manifests beside the checkout; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "checkpoints").is_dir():
        pytest.skip(f"needs the checkpoints in {folder}, which is absent")
    return folder
