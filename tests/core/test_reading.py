"""Stored bytes: views without a copy, copies by reading, and files that change meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest

from builders import write_safetensors
from vtensors.errors import CheckpointError, RequestError
from vtensors.provenance import local_provenance
from vtensors.reading import TensorReader, Wanted
from vtensors.snapshot import Snapshot, open_snapshot

BOTH = pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "pread"])
TENSORS = {
    "a": ("U8", (4,), b"\x01\x02\x03\x04"),
    "none": ("F32", (0,), b""),
    "b": ("U8", (3,), b"\x05\x06\x07"),
}


@pytest.fixture
def path(tmp_path):
    return write_safetensors(tmp_path / "model.safetensors", TENSORS)


def opened(path: Path) -> Snapshot:
    return open_snapshot(path, local_provenance(str(path), path))


@BOTH
def test_the_bytes_of_each_tensor_are_those_stored(path, mmap):
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=mmap) as reader:
        for name, (_, _, data) in TENSORS.items():
            assert reader.bytes_view(snapshot.tensors[name]) == data
            assert reader.read_copy(snapshot.tensors[name]) == data


def test_mapped_views_share_one_mapping_and_copies_do_not(path):
    snapshot = opened(path)
    with TensorReader(snapshot) as reader:
        first, second = (reader.bytes_view(snapshot.tensors["a"]) for _ in range(2))
        first[0] = 99
        assert second[0] == 99
        assert first.obj is second.obj
    with TensorReader(snapshot, mmap=False) as reader:
        assert reader.bytes_view(snapshot.tensors["a"])[0] == 1


@BOTH
def test_writing_to_a_view_does_not_reach_the_file(path, mmap):
    before = path.read_bytes()
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=mmap) as reader:
        view = reader.bytes_view(snapshot.tensors["a"])
        assert not view.readonly
        view[:] = b"\xff" * 4
    assert path.read_bytes() == before


@BOTH
def test_views_outlive_the_reader_and_a_closed_reader_refuses(path, mmap):
    snapshot = opened(path)
    reader = TensorReader(snapshot, mmap=mmap)
    view = reader.bytes_view(snapshot.tensors["b"])
    reader.close()
    reader.close()
    assert view == b"\x05\x06\x07"
    with pytest.raises(RequestError, match="closed"):
        reader.bytes_view(snapshot.tensors["b"])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@BOTH
@pytest.mark.parametrize("early", [True, False], ids=["before-first-use", "after-first-use"])
@pytest.mark.parametrize("change", [truncate, rewrite, replace])
def test_a_file_that_changes_after_its_header_was_read_is_refused(path, mmap, early, change):
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=mmap) as reader:
        if not early:
            reader.bytes_view(snapshot.tensors["a"])
        change(path)
        with pytest.raises(CheckpointError, match="file changed while open"):
            reader.bytes_view(snapshot.tensors["a"])


@BOTH
def test_a_file_that_is_replaced_just_before_it_is_opened_is_refused(path, mmap, monkeypatch):
    snapshot, status = opened(path), path.stat()
    replace(path)
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)
    with TensorReader(snapshot, mmap=mmap) as reader:
        with pytest.raises(CheckpointError, match="file changed while open"):
            reader.bytes_view(snapshot.tensors["a"])
        monkeypatch.undo()


@BOTH
@pytest.mark.parametrize("early", [True, False], ids=["before-first-use", "after-first-use"])
def test_a_file_that_vanishes_is_refused(path, mmap, early):
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=mmap) as reader:
        if not early:
            reader.bytes_view(snapshot.tensors["a"])
        path.unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            reader.bytes_view(snapshot.tensors["a"])


def test_a_short_read_is_an_error_and_not_a_crash(path, monkeypatch):
    snapshot = opened(path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with TensorReader(snapshot) as reader, pytest.raises(CheckpointError, match="0 of 4 bytes"):
        reader.read_copy(snapshot.tensors["a"])


def test_reads_that_come_in_parts_are_joined(path, monkeypatch):
    snapshot, whole = opened(path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1]], at))
    with TensorReader(snapshot) as reader:
        assert reader.read_copy(snapshot.tensors["a"]) == b"\x01\x02\x03\x04"


def test_a_record_that_is_not_of_the_snapshot_is_refused(path):
    snapshot = opened(path)
    with TensorReader(snapshot) as reader:
        for other in (
            attrs.evolve(snapshot.tensors["a"], end=10**9),
            attrs.evolve(snapshot.tensors["a"], name="x"),
        ):
            with pytest.raises(RequestError, match="not of this checkpoint"):
                reader.bytes_view(other)


def test_nothing_is_opened_before_the_first_use(path):
    snapshot = opened(path)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    reader = TensorReader(snapshot)
    assert before is None or len(os.listdir("/proc/self/fd")) == before
    reader.close()


def test_a_file_larger_than_memory_can_be_mapped(tmp_path):
    size = 1 << 42
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("U8", (0,), b"")})
    blob = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        try:
            file.truncate(8 + len(blob) + size)
        except OSError:
            pytest.skip("the file system has no files of 4 TiB")
    snapshot = opened(path)
    with TensorReader(snapshot) as reader:
        view = reader.bytes_view(snapshot.tensors["a"])
        assert (len(view), view[-1]) == (size, 0)


@BOTH
def test_a_reader_that_nobody_closes_gives_its_files_back(path, mmap):
    snapshot = opened(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        TensorReader(snapshot, mmap=mmap).read_copy(snapshot.tensors["a"])
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def wanted_of(snapshot: Snapshot, *parts: tuple[str, int, int]) -> tuple[list[Wanted], bytearray]:
    """The parts (name, start, stop), one after the other in one buffer."""
    memory = bytearray(sum(stop - start for _, start, stop in parts))
    view, place, found = memoryview(memory), 0, []
    for name, start, stop in parts:
        into = view[place : place + stop - start]
        found.append(Wanted(info=snapshot.tensors[name], into=into, start=start))
        place += stop - start
    return found, memory


def test_parts_of_several_tensors_are_read_into_given_memory(path):
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=False) as reader:
        wanted, memory = wanted_of(snapshot, ("b", 1, 3), ("a", 0, 4), ("none", 0, 0), ("b", 0, 1))
        reader.read_into(wanted, release=True)
        assert bytes(memory) == b"\x06\x07\x01\x02\x03\x04\x05"


def test_neighbours_in_a_file_are_read_by_one_call(path, monkeypatch):
    snapshot = opened(path)
    calls = []
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *call: calls.append(call) or plain(*call))
    with TensorReader(snapshot, mmap=False) as reader:
        wanted, memory = wanted_of(snapshot, ("b", 0, 3), ("a", 0, 4))
        reader.read_into(wanted)
        assert len(calls) == 1
        assert bytes(memory) == b"\x05\x06\x07\x01\x02\x03\x04"


def test_a_call_that_reads_less_goes_on_where_it_ended(path, monkeypatch):
    snapshot = opened(path)
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: plain(file, [views[0][:2]], at))
    with TensorReader(snapshot, mmap=False) as reader:
        wanted, memory = wanted_of(snapshot, ("a", 0, 4), ("b", 0, 3))
        reader.read_into(wanted)
        assert bytes(memory) == b"\x01\x02\x03\x04\x05\x06\x07"


def test_the_tensor_that_a_file_ends_in_is_named(path, monkeypatch):
    snapshot = opened(path)
    plain = os.preadv
    calls = iter(range(9))
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, views, at: 0 if next(calls) else plain(file, [*views[:1], views[1][:1]], at),
    )
    with TensorReader(snapshot, mmap=False) as reader:
        wanted, _ = wanted_of(snapshot, ("a", 0, 4), ("b", 0, 3))
        with pytest.raises(CheckpointError, match="1 of 3 bytes") as caught:
            reader.read_into(wanted)
        assert caught.value.tensor == "b"


def test_bytes_between_the_wanted_ones_are_left_out(path):
    snapshot = opened(path)
    with TensorReader(snapshot, mmap=False) as reader:
        wanted, memory = wanted_of(snapshot, ("a", 0, 2), ("b", 1, 3))
        reader.read_into(wanted)
        assert bytes(memory) == b"\x01\x02\x06\x07"
