"""Weights read ahead to a CUDA device: every bit, slots that are not filled too early, host memory that stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from builders import header_bytes, write_json
from read_ahead_cases import bits, modules_of, tensors_of
from tiny_checkpoints import Tiny
from vtensors.checkpoint import open_checkpoint
from vtensors.errors import WeightValueError
from vtensors_engine.read_ahead import SLOT_BYTES, SLOTS, ReadAhead
from vtensors_formats import Weight

pytestmark = pytest.mark.gpu
DATA = Path(__file__).parents[1] / "data"
NAMES = ["qwen35moe-modelopt-moe-mixed-w4a16", "qwen35-llmcompressor-mixed", "qwen3-transformers-fp8block"]


def resident_bytes() -> int:
    """The most memory that this process ever had in the host, its files' pages included."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("slot_bytes", [2048, 16 << 10, SLOT_BYTES])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_are_read_one_by_one(name: str, slot_bytes: int) -> None:
    checkpoint, device = open_checkpoint(DATA / name), torch.device("cuda")
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, device, slot_bytes=slot_bytes, small_bytes=0)
    # Copies wait behind this, so that a slot which is filled again at once would change them.
    torch.cuda._sleep(200_000_000)
    ours = {module: ahead.read(module) for module in modules}
    ahead.close()
    for module, weight in ours.items():
        pairs = zip(tensors_of(weight), tensors_of(checkpoint.read(module)), strict=True)
        for mine, stored in pairs:
            assert mine.device.type == "cuda"
            assert mine.dtype == stored.dtype
            assert torch.equal(bits(mine.cpu()), bits(stored)), module
    assert (ahead.read_ahead, ahead.read_plainly) == (len(modules), 0)


def test_bad_values_of_a_large_weight_are_found_on_the_device(tmp_path: Path) -> None:
    tiny = Tiny.modelopt("FP8")
    name = next(name for name in tiny.tensors if name.endswith("down_proj.weight"))
    tiny.tensors[name].view(torch.uint8)[3, 5] = 0x7F
    checkpoint = open_checkpoint(tiny.save(tmp_path / "bad"))
    module = name.removesuffix(".weight")
    ahead = ReadAhead(checkpoint, [module], torch.device("cuda"), slot_bytes=512, small_bytes=0)
    with pytest.raises(WeightValueError, match="a code is NaN"):
        ahead.read(module)
    ahead.close()


def test_host_memory_is_that_of_the_slots(tmp_path: Path) -> None:
    """4.3 GB of zeros out of a sparse file: matrices of a slot and less, and one of 17 slots."""
    shapes = {f"model.layers.{i}.mlp.down_proj.weight": (4096, 4096) for i in range(96)}
    shapes["lm_head.weight"] = (4096 * 128, 1024)
    header, place = {}, 0
    for name, (n, k) in shapes.items():
        header[name] = {"dtype": "BF16", "shape": [n, k], "data_offsets": [place, place + 2 * n * k]}
        place += 2 * n * k
    blob = header_bytes(header)
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(blob)
        stream.truncate(len(blob) + place)
    write_json(tmp_path / "config.json", {"model_type": "unknown"})
    checkpoint = open_checkpoint(tmp_path)
    modules = [name.removesuffix(".weight") for name in shapes]
    torch.zeros(1, device="cuda")
    torch.empty(1 << 20, pin_memory=True)
    before = resident_bytes()
    ahead = ReadAhead(checkpoint, modules, torch.device("cuda"))
    total = 0
    for module in modules:
        weight = ahead.read(module)
        assert isinstance(weight, Weight)
        total += weight.nbytes
        assert int(weight.stored()[0].count_nonzero()) == 0
    ahead.close()
    assert total == place
    assert (ahead.read_ahead, ahead.read_plainly) == (len(modules), 0)
    grown = resident_bytes() - before
    print(f"{total / 1e9:.2f} GB read, host memory grew by {grown / 1e6:.0f} MB")
    assert grown < SLOTS * SLOT_BYTES + (300 << 20)
