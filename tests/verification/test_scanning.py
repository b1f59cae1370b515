"""The scan: whatever the chunks and threads, the same counts and the same first places; bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_checkpoints import Tiny
from verify_tools import DOWN, found, run
from vtensors.verification import open_tolerantly
from vtensors.verification.shard_bytes import ShardBytes
from vtensors_formats import FP8Weight
from vtensors_plugins.verification.kinds import Kind, subjects
from vtensors_plugins.verification.scanning import scan
from vtensors_plugins.verification.tallies import tally_chunk
from vtensors_plugins.verification.zero_scales import _lost


def _opened(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "of-nobody"}')
    return folder


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [8, 64, 1 << 20])
def test_chunks_and_threads_change_nothing(chunk: int, threads: int, tmp_path: Path) -> None:
    values = torch.randn(31, 7)
    for row, column in ((3, 2), (3, 3), (30, 6)):
        values[row, column] = float("nan")
    folder = _opened(
        tmp_path / "model", {"a.weight": values, "b.weight": values.bfloat16(), "c.weight": values.half()}
    )
    checkpoint = open_tolerantly(folder).checkpoint
    assert checkpoint is not None
    with ShardBytes(checkpoint.snapshot) as source:
        seen: list[int] = []
        result = scan(subjects(checkpoint), source, threads=threads, chunk_bytes=chunk, progress=seen.append)
    assert result.read == sum(seen) == 31 * 7 * 8
    for name in ("a.weight", "b.weight", "c.weight"):
        fault = result.tallies[name].faults["not-finite"]
        assert (fault.count, fault.first) == (3, 3 * 7 + 2)


def test_a_mistake_in_a_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, look_for_nonzero: bool) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("vtensors_plugins.verification.scanning.tally_chunk", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        run(Tiny.plain_model().save(tmp_path / "model"))


def test_a_file_that_changed_after_its_header_was_read_is_unreadable(tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model")
    opened = open_tolerantly(folder)
    checkpoint = opened.checkpoint
    assert checkpoint is not None
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with ShardBytes(checkpoint.snapshot) as source:
        result = scan(subjects(checkpoint), source)
    assert {f.code for f in result.findings} == {"unreadable-tensor"}
    assert len(result.findings) == len(checkpoint.snapshot.tensors)
    assert "changed" in result.findings[0].seen


@pytest.mark.parametrize("byte", range(256))
def test_every_e4m3_byte_is_judged_as_code_and_as_scale(byte: int) -> None:
    data = torch.full((5,), 0x38, dtype=torch.uint8)
    data[3] = byte
    value = float(data.view(torch.float8_e4m3fn)[3].float())
    codes = tally_chunk(Kind.E4M3_CODES, "F8_E4M3", data, 10, look_for_nonzero=False)
    assert set(codes.faults) == ({"nan-code"} if value != value else set())
    scales = tally_chunk(Kind.E4M3_SCALE, "F8_E4M3", data, 10, look_for_nonzero=False)
    wanted = "scale-not-finite" if value != value else "scale-negative" if value < 0 else "scale-zero"
    assert set(scales.faults) == (set() if value > 0 else {wanted})
    for tally in (codes, scales):
        assert all((fault.count, fault.first) == (1, 13) for fault in tally.faults.values())


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_float_that_is_not_finite_is_found(dtype: torch.dtype, name: str, value: float) -> None:
    largest = torch.finfo(dtype).max
    data = torch.tensor([0.0, -0.0, largest, -largest, 1e-8], dtype=dtype)
    assert not tally_chunk(Kind.PLAIN, name, data.view(torch.uint8), 0, look_for_nonzero=False).faults
    data[1] = value
    tally = tally_chunk(Kind.PLAIN, name, data.view(torch.uint8), 0, look_for_nonzero=False)
    assert tally.faults["not-finite"].first == 1


def test_an_e8m0_nan_is_found() -> None:
    data = torch.tensor([0, 254, 255], dtype=torch.uint8)
    tally = tally_chunk(Kind.E8M0_SCALE, "U8", data, 0, look_for_nonzero=False)
    assert tally.faults["scale-not-finite"].first == 2


def test_a_zero_block_scale_over_zero_codes_is_legal(tmp_path: Path) -> None:
    tiny = Tiny.modelopt()
    scale = tiny.tensors[f"{DOWN}.weight_scale"].clone()
    scale.view(torch.uint8)[1, 2] = 0
    tiny.tensors[f"{DOWN}.weight_scale"] = scale
    tiny.tensors[f"{DOWN}.weight"][1, 16:24] = 0x80  # zeros and zeros with a sign
    assert run(tiny.save(tmp_path / "legal")).findings == ()
    tiny.tensors[f"{DOWN}.weight"][1, 23] = 0x10
    (finding,) = run(tiny.save(tmp_path / "not")).findings
    assert (finding.code, finding.tensor) == ("scale-zero", f"{DOWN}.weight_scale")
    assert finding.seen == "1 zero scale over codes that are not; the first at [1, 2]"


def test_zero_scales_are_counted_over_windows_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtensors_plugins.row_windows.WINDOW_ELEMENTS", 48 * 8)
    tiny = Tiny.modelopt()
    scale = tiny.tensors[f"{DOWN}.weight_scale"].clone()
    scale.view(torch.uint8)[17:30, 1] = 0
    tiny.tensors[f"{DOWN}.weight_scale"] = scale
    tiny.tensors[f"{DOWN}.weight"][17:30, 8:16] = 0x11
    (finding,) = run(tiny.save(tmp_path / "model")).findings
    assert finding.seen == "13 zero scales over codes that are not; the first at [17, 1]"


def test_zero_scales_of_rows_and_partial_blocks_are_held_against_their_own_codes() -> None:
    codes = torch.zeros(5, 7).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[4, 6] = 0x80
    block = FP8Weight(codes=codes, scale=torch.zeros(3, 2), block=(2, 4))
    row = FP8Weight(codes=codes, scale=torch.zeros(5, 1))
    assert not bool(_lost(block).any())  # type: ignore[union-attr]
    assert not bool(_lost(row).any())  # type: ignore[union-attr]
    codes.view(torch.uint8)[4, 6] = 0x38
    assert _lost(block).nonzero().tolist() == [[2, 1]]  # type: ignore[union-attr]
    assert _lost(row).nonzero().tolist() == [[4, 0]]  # type: ignore[union-attr]


PEAK = r"""
import re, sys
from vtensors.verification import open_tolerantly
from vtensors_plugins.commands.progress_bar import progress_bar
from vtensors_plugins.verification.report import verify
import torch
torch.zeros(8).bfloat16().aminmax()
peak = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1024
before = peak()
report = verify(open_tolerantly(sys.argv[1]), progress_bar)
print(report.checked_bytes, peak() - before, *{f.code for f in report.findings})
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    head = torch.ones(1, 1).bfloat16().expand(32768, 4096).contiguous()
    folder = _opened(tmp_path / "model", {"lm_head.weight": head, "model.embed_tokens.weight": head.clone()})
    (folder / "config.json").write_text('{"model_type": "of-nobody", "tie_word_embeddings": true}')
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True
    )
    read, grown, *codes = done.stdout.split()
    assert int(read) == 2 * head.nbytes == 1 << 29
    assert codes == ["unknown-architecture"]  # the two were compared in full and are equal
    assert float(grown) < 250


def test_a_single_file_is_verified_by_its_own_path(tmp_path: Path) -> None:
    folder = Tiny.plain_model().save(tmp_path / "model")
    assert run(folder / "model.safetensors").findings == ()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    assert found(run(folder / "model.safetensors"), "truncated-file")
