"""Names of checkpoints and the Hub cache: refs decide, snapshots are never mixed, nothing is guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from builders import write_index, write_json, write_safetensors
from vtensors.errors import CheckpointError, HubError, RequestError
from vtensors.hub import open_source, resolve, split_source
from vtensors.hub_cache import cached_commit, repo_folder

A, B, C = "a" * 40, "b" * 40, "c" * 40
BYTE = ("U8", (1,), b"\x00")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def add_snapshot(cache: Path, commit: str, *, weights: bool = True, ref: str | None = None) -> Path:
    folder = repo_folder(cache, "org/name")
    snapshot = folder / "snapshots" / commit
    write_json(snapshot / "config.json", {"commit": commit})
    if weights:
        write_safetensors(folder / "blobs" / commit, {commit[:1]: BYTE})
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{commit}")
    if ref is not None:
        path = folder / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def refusal(source: str, revision: str | None = None) -> str:
    with pytest.raises(HubError) as caught:
        open_source(source, revision)
    return str(caught.value)


def test_a_cached_repository_is_opened_at_the_commit_of_refs_main(cache):
    add_snapshot(cache, A, ref="main")
    newer = add_snapshot(cache, B)
    os.utime(newer, (2e9, 2e9))
    snapshot = open_source("org/name")
    assert list(snapshot.tensors) == ["a"]
    provenance = snapshot.provenance
    assert (provenance.source, provenance.repo, provenance.revision, provenance.commit) == (
        "org/name",
        "org/name",
        None,
        A,
    )


@pytest.mark.parametrize("named", [True, False])
def test_a_branch_a_pull_request_and_a_commit_can_be_asked_for(cache, named):
    add_snapshot(cache, A, ref="main")
    add_snapshot(cache, B, ref="refs/pr/7")
    add_snapshot(cache, C)
    for revision, commit in (("refs/pr/7", B), (C, C), ("main", A)):
        snapshot = open_source(f"org/name@{revision}") if named else open_source("org/name", revision)
        assert snapshot.provenance.commit == commit
        assert snapshot.provenance.revision == revision
        assert snapshot.read_json("config.json") == {"commit": commit}


@pytest.mark.fault("B70")
def test_a_config_only_snapshot_behind_main_is_an_error_that_lists_the_cache(cache):
    add_snapshot(cache, A)
    add_snapshot(cache, B, weights=False, ref="main")
    message = refusal("org/name")
    assert f"cached snapshot {B}" in message
    assert "no .safetensors file" in message
    assert f"snapshot {A}: model.safetensors, config.json (complete)" in message
    assert f"snapshot {B} (refs/main): no .safetensors file, config.json (incomplete)" in message
    assert open_source("org/name", A).provenance.commit == A


@pytest.mark.fault("B70")
def test_a_dangling_ref_is_an_error_that_lists_the_cache(cache):
    add_snapshot(cache, A, ref="main")
    (repo_folder(cache, "org/name") / "refs" / "main").write_text(C)
    message = refusal("org/name")
    assert f"refs/main points to {C}, which is not there" in message
    assert f"snapshot {A}" in message


@pytest.mark.fault("B70")
def test_shards_of_another_snapshot_never_fill_in(cache):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    full, part = add_snapshot(cache, A, weights=False), add_snapshot(cache, B, weights=False, ref="main")
    for folder in (full, part):
        write_index(folder, {"x": first, "y": second})
        write_safetensors(folder / first, {"x": BYTE})
    write_safetensors(full / second, {"y": BYTE})
    message = refusal("org/name")
    assert second in message
    assert "2 shards" in message


@pytest.mark.fault("B71")
def test_a_cache_without_its_blobs_names_the_broken_links(cache):
    add_snapshot(cache, A, ref="main")
    (repo_folder(cache, "org/name") / "blobs" / A).unlink()
    message = refusal("org/name")
    assert "model.safetensors is a broken link to" in message
    assert "cp -L" in message


def test_weights_without_a_config_are_an_incomplete_snapshot(cache):
    (add_snapshot(cache, A, ref="main") / "config.json").unlink()
    assert "no config.json" in refusal("org/name")


def test_a_revision_that_is_not_cached_is_refused_offline(cache):
    assert "no snapshot of this repository" in refusal("org/name")
    add_snapshot(cache, A, ref="main")
    message = refusal("org/name", "v2")
    assert "revision 'v2' of org/name is not in the cache" in message
    assert A in message


def test_a_ref_that_is_not_a_commit_is_refused(cache):
    add_snapshot(cache, A, ref="main")
    (repo_folder(cache, "org/name") / "refs" / "main").write_text("../../../elsewhere")
    assert "does not hold a commit hash" in refusal("org/name")
    assert cached_commit(repo_folder(cache, "org/name"), "..") is None


def test_the_repositorys_cache_folder_follows_refs_too(cache):
    add_snapshot(cache, A)
    add_snapshot(cache, B, ref="main")
    folder = repo_folder(cache, "org/name")
    assert open_source(folder).provenance.commit == B
    assert open_source(folder, A).provenance.commit == A


def test_a_complete_snapshot_is_opened_without_asking_the_hub(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    add_snapshot(cache, A, ref="main")
    assert open_source("org/name").provenance.commit == A


def test_an_unreachable_hub_still_lists_what_is_cached(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    add_snapshot(cache, B, weights=False, ref="main")
    message = refusal("org/name")
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert f"snapshot {B} (refs/main): no .safetensors file" in message


def test_a_local_path_wins_over_a_repository_of_the_same_name(cache, tmp_path, monkeypatch):
    add_snapshot(cache, A, ref="main")
    write_safetensors(tmp_path / "org" / "name" / "model.safetensors", {"local": BYTE})
    monkeypatch.chdir(tmp_path)
    assert list(open_source("org/name").tensors) == ["local"]
    with pytest.raises(RequestError, match="a local path has no revisions"):
        resolve("org/name", "main")


@pytest.mark.parametrize(
    "source",
    [
        "name",
        "./org/name",
        "/no/such/path",
        "~/models/x",
        "a/b/c",
        "org/x.safetensors",
        "org\\name",
        "",
        "a--b/c",
    ],
)
def test_what_is_neither_a_path_nor_a_repository_is_refused(source, cache):
    with pytest.raises(HubError, match=r"existing path, or org/name\[@revision\]"):
        resolve(source)


def test_a_path_object_is_never_taken_for_a_repository(cache):
    with pytest.raises(HubError, match="no such file or directory"):
        resolve(Path("org/name"))


@pytest.mark.parametrize("revision", ["", "..", "a/../b", "/x", "a b", "x\0"])
def test_a_malformed_revision_is_refused(revision):
    with pytest.raises(HubError, match="not a revision"):
        split_source("org/name", revision)


def test_two_different_revisions_are_refused_and_equal_ones_are_not():
    assert split_source("org/name@v1", "v1") == ("org/name", "v1")
    with pytest.raises(RequestError, match="two different revisions"):
        split_source("org/name@v1", "v2")


def test_a_broken_link_to_a_checkpoint_is_named(cache, tmp_path):
    (tmp_path / "model").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="broken link to nowhere"):
        open_source(tmp_path / "model")
