"""Memory of a conversion: one tensor at a time, however many experts there are and however they are stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import modelopt_layers, nvfp4, plain_tensors, quantised, write_model

from tiny_decoders import tiny_config

EXPERTS, WIDE, HIDDEN = 8, 4096, 1024
PEAK = r"""
import re, sys
from vtensors.cli import main
import torch, safetensors.torch, vtensors_formats.nvfp4
torch.zeros(8).bfloat16().aminmax()
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
status = main(["convert", sys.argv[1], sys.argv[3], "--to", "compressed-tensors", "--json"])
before = peak()
status = status or main(["convert", sys.argv[2], sys.argv[4], "--to", "compressed-tensors", "--json"])
print(status, peak() - before, file=sys.stderr)
"""


def _checkpoint(folder: Path, width: int) -> tuple[Path, int]:
    """A model of two layers with 8 experts each, stored one by one, and the bytes of its file."""
    config = tiny_config("qwen3_5_moe", num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=width)
    tensors = plain_tensors(config)
    names = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    own = {name: nvfp4(name, tensors[f"{name}.weight"]) for name in names}
    block = modelopt_layers(dict.fromkeys(names, "NVFP4"))
    path = write_model(folder, config, quantised(tensors, own), quantization=block)
    return path, (path / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.fault("B92")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_converting_experts_takes_the_memory_of_a_few_of_them(tmp_path: Path) -> None:
    small, _ = _checkpoint(tmp_path / "small", 64)
    large, size = _checkpoint(tmp_path / "large", WIDE)
    places = [small, large, tmp_path / "out" / "small", tmp_path / "out" / "large"]
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, places)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status, grown = done.stderr.split()[-2:]
    assert status == "0", done.stdout
    expert = 3 * WIDE * HIDDEN * 9 // 16
    assert size > 2 * EXPERTS * expert
    print(f"file {size}, expert {expert}, grown {grown}")
    assert int(grown) < 4 * expert
