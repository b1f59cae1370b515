"""Safetensors headers: well-formed ones are read exactly, every other file gets its own message."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import header_bytes, safetensors_bytes, write_safetensors
from vtensors.errors import CheckpointError, VtensorsError
from vtensors.header import MAX_HEADER_BYTES, ShardHeader, header_length, parse_header, read_header
from vtensors.tensors import DTYPE_BITS, expected_nbytes

NAME = "model.safetensors"
TWO = {"a": ("F32", (2, 2), bytes(16)), "b": ("U8", (3,), bytes(3))}


def parse(data: bytes) -> ShardHeader:
    return parse_header(NAME, data, len(data))


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def with_header(header, payload=bytes(4)) -> bytes:
    return header_bytes(header) + payload


def test_a_header_is_read_with_absolute_offsets_and_its_hash(tmp_path):
    data = safetensors_bytes(TWO, {"format": "pt"})
    path = write_safetensors(tmp_path / NAME, TWO, {"format": "pt"})
    header = read_header(path, NAME)
    first, second = header.tensors
    assert (first.name, first.dtype, first.shape, first.file) == ("a", "F32", (2, 2), NAME)
    assert (first.begin, first.end, second.end) == (header.header_bytes, second.begin, len(data))
    assert header.metadata == {"format": "pt"}
    assert header.sha256 == hashlib.sha256(data[: header.header_bytes]).hexdigest()
    assert header.file_size == len(data)
    assert header.identity is not None
    assert header.identity.inode == os.stat(path).st_ino
    assert parse(data).identity is None


def test_shapes_and_dtypes_are_shared_between_tensors():
    header = parse(safetensors_bytes({str(n): ("U8", (1000,), bytes(1000)) for n in range(3)}))
    assert header.tensors[0].shape is header.tensors[2].shape
    assert header.tensors[0].dtype is header.tensors[2].dtype


def test_a_checkpoint_without_tensors_and_tensors_without_elements_are_fine():
    assert parse(header_bytes({})).tensors == ()
    header = parse(
        with_header(
            {"z": entry(shape=(0, 5), offsets=(0, 0)), "a": entry(), "y": entry(shape=(0,), offsets=(4, 4))}
        )
    )
    assert [info.nbytes for info in header.tensors] == [0, 4, 0]


def test_tensors_may_stand_in_the_header_in_any_order():
    header = parse(
        with_header({"b": entry(shape=(3,), offsets=(1, 4)), "a": entry(shape=(1,), offsets=(0, 1))})
    )
    assert [info.name for info in header.tensors] == ["b", "a"]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
DAMAGED = {
    "trailing": (safetensors_bytes(TWO) + bytes(16), "16 trailing bytes"),
    "header-too-long": ((10**6).to_bytes(8, "little") + b"{}", "header would be longer than the file"),
    "not-json": (header_bytes("hello, world"), "header is not JSON"),
    "empty": (b"", "file is empty"),
    "git-lfs": (LFS, "git-LFS pointer"),
    "truncated": (
        safetensors_bytes(TWO)[:-5],
        "5 bytes are missing at the end of the file: incomplete download",
    ),
    "short": (b"\x01\x00", "too short"),
}


@pytest.mark.fault("B59")
@pytest.mark.parametrize("kind", DAMAGED)
def test_each_kind_of_damaged_file_has_its_own_message(kind, tmp_path):
    data, says = DAMAGED[kind]
    path = tmp_path / NAME
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as from_bytes:
        parse(data)
    with pytest.raises(CheckpointError) as from_file:
        read_header(path, NAME)
    assert str(from_bytes.value) == str(from_file.value)
    assert says in str(from_file.value)
    assert NAME in str(from_file.value)
    assert str(len(data)) in str(from_file.value) or kind == "not-json"
    others = [text for other, (_, text) in DAMAGED.items() if other != kind]
    assert not any(text in str(from_file.value) for text in others)


@pytest.mark.fault("B59")
def test_a_git_lfs_pointer_says_how_to_fetch_the_file():
    with pytest.raises(CheckpointError, match="git lfs pull"):
        parse(LFS)


def test_a_header_of_more_than_the_format_allows_is_refused(tmp_path):
    path = tmp_path / NAME
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="header is too long"):
        read_header(path, NAME)
    # By its length alone, before the header is read.
    with pytest.raises(CheckpointError, match="header is too long"):
        header_length(NAME, (MAX_HEADER_BYTES + 1).to_bytes(8, "little"), 2**40)


@pytest.mark.fault("B60")
@pytest.mark.parametrize("length", range(99_992, 100_009))
def test_a_header_that_ends_at_a_read_boundary_is_read_whole(length, tmp_path):
    blob = json.dumps({"a": entry()}).encode().ljust(length)
    path = tmp_path / NAME
    path.write_bytes(header_bytes(blob) + bytes(4))
    header = read_header(path, NAME)
    assert header.header_bytes == 8 + length
    assert header.tensors[0].begin == 8 + length


@pytest.mark.fault("B60")
def test_a_header_of_ten_megabytes_and_120000_tensors_is_read(tmp_path):
    names = (f"model.layers.{n}.mlp.experts.0.down_proj.weight" for n in range(120_000))
    path = tmp_path / NAME
    path.write_bytes(
        with_header(
            {name: entry(shape=(1,), offsets=(n, n + 1)) for n, name in enumerate(names)}, bytes(120_000)
        )
    )
    begun = time.process_time()
    header = read_header(path, NAME)
    assert time.process_time() - begun < 4.0  # about 0.8 s on one slow core
    assert header.header_bytes > 10_000_000
    assert len(header.tensors) == 120_000


@pytest.mark.fault("B61")
def test_new_dtypes_are_read_and_an_unknown_one_is_kept_as_written():
    header = parse(
        safetensors_bytes(
            {
                "four": ("F4", (2, 8), bytes(8)),
                "e8": ("F8_E8M0", (3,), bytes(3)),
                "six": ("F6", (5,), bytes(7)),
            }
        )
    )
    assert [info.describe() for info in header.tensors] == ["F4 [2, 8]", "F8_E8M0 [3]", "F6 [5]"]
    with pytest.raises(CheckpointError, match="four"):
        parse(safetensors_bytes({"four": ("F4", (2, 8), bytes(16))}))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": entry(offsets=(0, 3))}, "another number of bytes"),
        ({"a": entry(dtype="F32")}, "another number of bytes"),
        ({"a": entry(shape=(True, 4))}, "non-negative integers"),
        ({"a": entry(shape=(4.0,))}, "non-negative integers"),
        ({"a": entry(shape=(-4,))}, "non-negative integers"),
        ({"a": entry(shape=("4",))}, "non-negative integers"),
        ({"a": {**entry(), "shape": 4}}, "non-negative integers"),
        ({"a": entry(dtype="X", shape=(2**62, 2))}, "too many elements"),
        ({"a": entry(dtype="X", shape=(0, 2**63))}, "too many elements"),
        ({"a": entry(dtype=8)}, "dtype is not a name"),
        ({"a": entry(dtype="")}, "dtype is not a name"),
        ({"a": entry(offsets=(4, 0))}, "range of bytes"),
        ({"a": entry(offsets=(-4, 0))}, "range of bytes"),
        ({"a": entry(offsets=(0, 4, 4))}, "range of bytes"),
        ({"a": entry(offsets=(False, 4))}, "range of bytes"),
        ({"a": entry(dtype="X", offsets=(0, 2**64))}, "range of bytes"),
        ({"a": entry(extra=1)}, "does not describe a tensor"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "does not describe a tensor"),
        ({"a": [1]}, "does not describe a tensor"),
        ({"a": None}, "does not describe a tensor"),
        ({"": entry()}, "empty name"),
        ({"__metadata__": {"n": 1}, "a": entry()}, "not a string"),
        ({"__metadata__": [], "a": entry()}, "not an object"),
        ({"b": entry(), "a": entry(shape=(2,), offsets=(2, 4))}, "overlap"),
        ({"b": entry(), "a": entry()}, "overlap"),
        ({"a": entry(shape=(3,), offsets=(1, 4))}, "belongs to no tensor"),
        (
            {"b": entry(shape=(1,), offsets=(0, 1)), "a": entry(shape=(2,), offsets=(2, 4))},
            "belongs to no tensor",
        ),
        ({"a": entry(offsets=(0, 3), shape=(3,))}, "1 trailing byte follows"),
        ([], "not a JSON object"),
    ],
)
def test_a_malformed_header_is_refused_saying_what_is_wrong(header, says):
    with pytest.raises(CheckpointError) as caught:
        parse(with_header(header))
    assert says in str(caught.value)
    if isinstance(header, dict) and "a" in header and "trailing" not in says and "__metadata__" not in header:
        assert "a" in (caught.value.tensor or caught.value.problem)


def test_a_tensor_named_twice_is_refused_by_name():
    one = json.dumps(entry())
    with pytest.raises(CheckpointError, match="'twin' twice"):
        parse(with_header(f'{{"twin":{one},"twin":{one}}}'))


def test_a_pipe_or_directory_in_a_shards_place_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe.safetensors", "folder.safetensors"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_header(tmp_path / name, name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent", "absent")


DTYPES = st.sampled_from(sorted(DTYPE_BITS))
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SPECS = st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=6)


def built(specs) -> bytes:
    return safetensors_bytes(
        {
            name: (dtype, shape, bytes(expected_nbytes(dtype, shape) or 0))
            for name, (dtype, shape) in specs.items()
        }
    )


@given(SPECS)
def test_every_well_formed_header_comes_back_as_written(specs):
    header = parse(built(specs))
    assert {info.name: (info.dtype, info.shape) for info in header.tensors} == specs
    assert header.header_bytes + sum(info.nbytes for info in header.tensors) == header.file_size


@settings(max_examples=400)
@given(SPECS.filter(bool), st.data())
def test_a_mutated_file_is_read_or_refused_and_never_crashes(specs, data):
    raw = bytearray(built(specs))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "cut":
                del raw[at:]
            case "insert":
                raw[at:at] = data.draw(
                    st.sampled_from([b'"', b"[", b"{", b",", b"0", b"9" * 30, b"\\ud800", b"1e9"])
                )
            case "drop":
                del raw[at : at + data.draw(st.integers(1, 4))]
    try:
        ends = [info.end for info in parse(bytes(raw)).tensors]
    except VtensorsError:
        return
    assert all(end <= len(raw) for end in ends)
