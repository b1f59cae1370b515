"""Local checkpoints: which files are read, and what contradicts between index, headers and directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builders import write_index, write_json, write_safetensors
from vtensors.errors import CheckpointError, DeclarationError
from vtensors.provenance import local_provenance
from vtensors.snapshot import Snapshot, open_snapshot

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BYTE = ("U8", (1,), b"\x00")


def opened(path: Path, *, refuse_stray: bool = False) -> Snapshot:
    return open_snapshot(path, local_provenance(str(path), path), refuse_stray=refuse_stray)


def refusal(path: Path, **options: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(path, **options)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path):
    write_safetensors(tmp_path / ONE, {"a": BYTE})
    write_safetensors(tmp_path / TWO, {"b": BYTE, "c": BYTE})
    write_index(tmp_path, {"a": ONE, "b": TWO, "c": TWO})
    return tmp_path


def test_an_indexed_checkpoint_gives_all_tensors_and_its_provenance(sharded):
    snapshot = opened(sharded)
    assert {name: info.file for name, info in snapshot.tensors.items()} == {"a": ONE, "b": TWO, "c": TWO}
    assert snapshot.warnings == ()
    record = snapshot.provenance.to_json()
    assert record["source"] == str(sharded)
    assert (record["repo"], record["revision"], record["commit"]) == (None, None, None)
    header = snapshot.shards[ONE]
    assert record["shards"][0] == {
        "file": ONE,
        "size": header.file_size,
        "header_bytes": header.header_bytes,
        "header_sha256": header.sha256,
    }


@pytest.mark.fault("B56")
def test_an_indexed_file_that_is_missing_is_an_incomplete_download(sharded):
    (sharded / TWO).unlink()
    message = refusal(sharded)
    assert TWO in message
    assert ONE not in message
    assert "incomplete download" in message


@pytest.mark.fault("B58")
def test_stray_weight_files_beside_the_indexed_shards_are_listed_and_not_read(sharded):
    write_safetensors(sharded / "model.safetensors", {"a": ("F32", (1,), bytes(4))})
    (sharded / "consolidated.safetensors").write_bytes(b"not even a header")
    snapshot = opened(sharded)
    assert snapshot.tensors["a"].dtype == "U8"
    assert list(snapshot.shards) == [ONE, TWO]
    (warning,) = snapshot.warnings
    assert "consolidated.safetensors, model.safetensors" in warning
    assert "model.safetensors" in refusal(sharded, refuse_stray=True)


@pytest.mark.fault("B58")
def test_several_files_without_an_index_are_refused_naming_them(tmp_path):
    write_safetensors(tmp_path / ONE, {"a": BYTE})
    write_safetensors(tmp_path / TWO, {"b": BYTE})
    message = refusal(tmp_path)
    assert ONE in message
    assert TWO in message
    assert "model.safetensors.index.json" in message


def test_without_an_index_model_safetensors_is_read_and_others_are_strays(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": BYTE})
    write_safetensors(tmp_path / "adapter.safetensors", {"b": BYTE})
    snapshot = opened(tmp_path)
    assert list(snapshot.tensors) == ["a"]
    assert "adapter.safetensors" in snapshot.warnings[0]


def test_without_an_index_the_only_file_is_read_whatever_its_name(tmp_path):
    write_safetensors(tmp_path / "weights.safetensors", {"a": BYTE})
    (tmp_path / "._weights.safetensors").write_bytes(b"resource fork")
    assert list(opened(tmp_path).shards) == ["weights.safetensors"]


def test_a_safetensors_file_is_a_checkpoint_with_the_configs_beside_it(sharded):
    write_json(sharded / "config.json", {"model_type": "llama"})
    snapshot = opened(sharded / TWO)
    assert set(snapshot.tensors) == {"b", "c"}
    assert snapshot.read_json("config.json") == {"model_type": "llama"}
    assert snapshot.shard_path(TWO) == sharded / TWO
    assert "not a checkpoint" in refusal(sharded / "config.json")


def test_an_index_key_that_no_header_has_is_refused_by_name(sharded):
    write_index(sharded, {"a": ONE, "b": TWO, "c": TWO, "ghost": TWO})
    message = refusal(sharded)
    assert "ghost" in message
    assert TWO in message


def test_an_index_that_names_the_wrong_file_is_refused(sharded):
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO})
    message = refusal(sharded)
    assert ": b: " in message
    assert ONE in message
    assert TWO in message


def test_a_tensor_that_the_index_does_not_name_is_refused(sharded):
    write_index(sharded, {"a": ONE, "b": TWO})
    message = refusal(sharded)
    assert f"{TWO}: c: " in message


def test_one_tensor_in_two_indexed_files_is_refused_naming_both(sharded):
    write_safetensors(sharded / ONE, {"a": BYTE, "b": ("U8", (2,), bytes(2))})
    message = refusal(sharded)
    assert f"{ONE} and {TWO}: b" in message
    assert "U8 [2] and U8 [1]" in message


@pytest.mark.parametrize(
    "file",
    [
        "../m.safetensors",
        "/etc/m.safetensors",
        "sub/m.safetensors",
        "..",
        "sub\\m.safetensors",
        "C:m.safetensors",
        "",
    ],
)
def test_an_index_that_leaves_the_directory_is_refused(sharded, file):
    write_index(sharded, {"a": file})
    assert "outside of the checkpoint's directory" in refusal(sharded) or not file


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ([], "no weight_map"),
        ({"weight_map": {"a": 1}}, "not a file name"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "not a .safetensors file"),
    ],
)
def test_a_malformed_index_is_refused(sharded, content, says):
    write_json(sharded / "model.safetensors.index.json", content)
    assert says in refusal(sharded)


def test_an_index_with_a_key_twice_is_refused(sharded):
    (sharded / "model.safetensors.index.json").write_text(f'{{"weight_map":{{"a":"{ONE}","a":"{TWO}"}}}}')
    assert "'a' twice" in refusal(sharded)


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    write_safetensors(tmp_path / "elsewhere" / "secret.safetensors", {"a": BYTE})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../elsewhere/secret.safetensors")
    message = refusal(tmp_path / "model")
    assert "leaves the checkpoint's directory" in message
    assert "cp -L" in message


def cached(cache: Path, target: str) -> Path:
    snapshot = cache / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(target)
    return snapshot


def test_links_of_the_hub_cache_into_its_blobs_are_followed(tmp_path):
    write_safetensors(tmp_path / "models--org--name" / "blobs" / "abc", {"a": BYTE})
    snapshot = opened(cached(tmp_path, "../../blobs/abc"))
    assert list(snapshot.tensors) == ["a"]
    assert snapshot.tensors["a"].file == "model.safetensors"
    assert (snapshot.provenance.repo, snapshot.provenance.commit) == ("org/name", "0" * 40)


def test_blobs_that_link_on_to_the_caches_shared_store_are_followed(tmp_path):
    write_safetensors(tmp_path / "blobs" / "ab" / "abcd", {"a": BYTE})
    (tmp_path / "models--org--name" / "blobs").mkdir(parents=True)
    (tmp_path / "models--org--name" / "blobs" / "etag").symlink_to("../../blobs/ab/abcd")
    assert list(opened(cached(tmp_path, "../../blobs/etag")).tensors) == ["a"]


def test_links_into_the_blobs_of_another_repository_are_refused(tmp_path):
    write_safetensors(tmp_path / "models--org--other" / "blobs" / "abc", {"a": BYTE})
    assert "leaves the checkpoint's directory" in refusal(
        cached(tmp_path, "../../../models--org--other/blobs/abc")
    )


@pytest.mark.fault("B71")
def test_a_broken_link_names_its_target_and_the_way_out(tmp_path):
    folder = cached(tmp_path, "../../blobs/abc")
    message = refusal(folder)
    assert "model.safetensors is a broken link to ../../blobs/abc" in message
    assert "mount or copy the blobs folder too (cp -L)" in message
    for name in ("model.safetensors.index.json", "config.json"):
        (folder / name).symlink_to("../../blobs/def")
    assert "model.safetensors.index.json is a broken link" in refusal(folder)


@pytest.mark.fault("B71")
def test_a_broken_config_link_is_not_taken_for_a_missing_config(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": BYTE})
    (tmp_path / "config.json").symlink_to("../../blobs/def")
    snapshot = opened(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json is a broken link to"):
        snapshot.read_json("config.json")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["pytorch_model.bin"], "pytorch_model.bin (PyTorch pickle)"),
        (["model-q4.gguf", "README.md"], "model-q4.gguf (GGUF)"),
        (["README.md"], "README.md"),
        ([], "nothing"),
    ],
)
def test_a_directory_without_safetensors_files_is_refused_naming_what_is_there(tmp_path, names, says):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path)
    assert "no .safetensors file" in message
    assert says in message


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "absent")


def test_side_files_are_read_strictly(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": BYTE})
    snapshot = opened(tmp_path)
    assert snapshot.read_json("config.json") is None
    (tmp_path / "config.json").write_text('{"limit": [0.0, Infinity]}')
    assert snapshot.read_json("config.json") == {"limit": [0.0, float("inf")]}
    assert snapshot.read_bytes("config.json") == b'{"limit": [0.0, Infinity]}'
    for content in ('{"a": 1, "a": 2}', "[]", "null", ""):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DeclarationError, match=r"config\.json"):
            snapshot.read_json("config.json")


def test_a_damaged_shard_is_named(sharded):
    os.truncate(sharded / TWO, (sharded / TWO).stat().st_size - 1)
    message = refusal(sharded)
    assert message.startswith(TWO)
    assert "1 byte is missing" in message


@pytest.mark.parametrize("as_file", [False, True])
def test_a_relative_path_stays_what_it_was_when_the_process_moves(tmp_path, monkeypatch, as_file):
    write_safetensors(tmp_path / "here" / "model.safetensors", {"a": BYTE})
    write_json(tmp_path / "here" / "chat.json", {"found": True})
    monkeypatch.chdir(tmp_path)
    snapshot = opened(Path("here/model.safetensors" if as_file else "here"))
    monkeypatch.chdir("/")
    assert snapshot.read_json("chat.json") == {"found": True}
    assert snapshot.shard_path("model.safetensors").read_bytes().endswith(BYTE[2])


def test_a_directory_in_the_place_of_a_configuration_is_refused(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": BYTE})
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: not a regular file") as caught:
        opened(tmp_path).read_json("config.json")
    assert caught.value.fix
