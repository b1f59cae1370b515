"""Host memory of a load to a GPU: a few slots, and no page of the file stays in the system's cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from tiny_models import modelopt_layers, nvfp4, plain_tensors, quantised, write_model

import vtensors
from tiny_decoders import tiny_config
from vtensors_engine.read_ahead import SLOT_BYTES, SLOTS

pytestmark = pytest.mark.gpu
HIDDEN, WIDE, LAYERS = 2048, 16384, 4
# Python's and torch's own growth, and the buffers of the small tensors.
SLACK = 192 << 20


def _most_resident() -> int:
    """The most memory that this process ever had, pages of mapped files among it, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _cached(path: Path) -> int:
    """Bytes of the file in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages
        )
        del first
        if failed:
            pytest.skip(f"mincore cannot be asked: {os.strerror(ctypes.get_errno())}")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checkpoint(folder: Path) -> Path:
    """670 MB: the down projections in NVFP4, all else in BF16."""
    config = tiny_config("llama", hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS)
    tensors = plain_tensors(config)
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)]
    own = {name: nvfp4(name, tensors[f"{name}.weight"]) for name in names}
    block = modelopt_layers(dict.fromkeys(names, "W4A16_NVFP4"))
    return write_model(folder, config, quantised(tensors, own), quantization=block)


@pytest.mark.fault("B89")
def test_a_load_takes_slots_of_host_memory_and_leaves_nothing_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_CACHE_DIR", str(tmp_path / "cache"))
    folder = _checkpoint(tmp_path / "m")
    file = folder / "model.safetensors"
    # The first load compiles and tests the kernels.
    vtensors.load_model(folder, device="cuda")
    _forget(file)
    if _cached(file):
        pytest.skip("the file system of temporary files keeps every page in memory")
    before = _most_resident()
    model = vtensors.load_model(folder, device="cuda")
    cached, grown, size = _cached(file), _most_resident() - before, file.stat().st_size
    print(f"file {size >> 20} MiB, {cached >> 20} MiB cached, at most {grown >> 20} MiB more of host memory")
    assert size > 1.5 * (SLOTS * SLOT_BYTES)
    assert cached <= size // 8
    assert grown <= SLOTS * SLOT_BYTES + SLACK
    assert torch.isfinite(model.logits(torch.tensor([[3, 1, 4]], device="cuda"))).all()
