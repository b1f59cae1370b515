"""Repositories on a local server that speaks the Hub's paths: what is asked for, how many bytes travel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from builders import header_bytes, write_index, write_json, write_safetensors
from fake_hub import COMMIT, FakeHub, serving
from vtensors.errors import CheckpointError, HubError, RequestError
from vtensors.hub import open_source
from vtensors.hub_cache import repo_folder
from vtensors.remote import FIRST_READ_BYTES, open_remote
from vtensors.snapshot import open_snapshot

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PAYLOAD = 64 << 20
# What may travel beyond headers and configurations where a server sends whole files: socket buffers fill up.
SOCKET_SLACK = 16 << 20


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    (tmp_path / "repository").mkdir()
    with serving(FakeHub(root=tmp_path / "repository")) as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.endpoint)
        template = fake.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # Where older versions keep the template.
        older = "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(older, template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield fake


def write_large_shard(path: Path, names: list[str], payload: int = PAYLOAD) -> int:
    """A sparse shard; returns the length of its header."""
    part = payload // len(names)
    head = header_bytes(
        {
            n: {"dtype": "U8", "shape": [part], "data_offsets": [i * part, (i + 1) * part]}
            for i, n in enumerate(names)
        }
    )
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + part * len(names))
    return len(head)


@pytest.fixture
def large(hub: FakeHub) -> int:
    """Two shards of 64 MiB, one with a long header; returns the length of headers and configs."""
    second = [f"layers.{n}.w" for n in range(4096)]
    total = write_large_shard(hub.root / ONE, ["a", "b"]) + write_large_shard(hub.root / TWO, second)
    assert total > 2 * FIRST_READ_BYTES
    write_index(hub.root, {"a": ONE, "b": ONE, **dict.fromkeys(second, TWO)})
    write_json(hub.root / "config.json", {"model_type": "llama"})
    write_json(hub.root / "tokenizer.json", {"big": "x" * 1_000_000})
    small = sum((hub.root / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    return total + small


def test_only_headers_and_configurations_travel(hub, large):
    snapshot = open_source("org/name")
    assert snapshot.root is None
    assert len(snapshot.tensors) == 4098
    assert snapshot.read_json("config.json") == {"model_type": "llama"}
    assert snapshot.read_json("hf_quant_config.json") is None
    assert hub.sent <= large + 2 * FIRST_READ_BYTES + 10_000
    shard_requests = [path for _, path, wanted in hub.requests if wanted is not None]
    assert len(shard_requests) == 3  # one for the short header, two for the long one


def test_the_commit_is_resolved_first_and_every_file_is_asked_for_by_it(hub, large):
    provenance = open_source("org/name@main").provenance
    assert (provenance.repo, provenance.revision, provenance.commit) == ("org/name", "main", COMMIT)
    assert hub.requests[0][1].startswith("/api/models/org/name/revision/main")
    assert all(path.startswith(f"/org/name/resolve/{COMMIT}/") for _, path, _ in hub.requests[1:])


def test_a_remote_snapshot_is_the_same_as_the_local_one(hub, large):
    remote = open_remote("org/name", None)
    local = open_snapshot(hub.root, remote.provenance)
    assert remote.tensors == local.tensors
    assert remote.provenance == local.provenance


def test_a_server_that_ignores_ranges_does_not_make_us_read_the_weights(hub, large):
    hub.ranges = False
    assert len(open_source("org/name").tensors) == 4098
    assert hub.sent < large + SOCKET_SLACK < 2 * PAYLOAD


def test_weights_and_other_files_of_a_header_only_snapshot_are_refused(hub, large):
    snapshot = open_source("org/name")
    with pytest.raises(RequestError, match="only their headers"):
        snapshot.shard_path(ONE)
    with pytest.raises(RequestError, match=r"tokenizer\.json was not fetched"):
        snapshot.read_bytes("tokenizer.json")


@pytest.mark.fault("B60")
@pytest.mark.parametrize("length", range(FIRST_READ_BYTES - 10, FIRST_READ_BYTES + 3))
def test_a_remote_header_at_the_border_of_the_first_read_is_read_whole(hub, length):
    blob = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'.ljust(length)
    (hub.root / "model.safetensors").write_bytes(header_bytes(blob) + bytes(4))
    assert open_source("org/name").shards["model.safetensors"].header_bytes == length + 8


@pytest.mark.fault("B59")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git-LFS"),
        ((10**6).to_bytes(8, "little") + b"{}", "longer than the file"),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_damaged_remote_files_get_the_messages_of_local_ones(hub, data, says, ranges):
    hub.ranges = ranges
    (hub.root / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        open_source("org/name")


def test_files_beside_the_indexed_shards_are_listed_and_not_asked_for(hub, large):
    write_safetensors(hub.root / "stray.safetensors", {"x": ("U8", (1,), b"x")})
    assert "stray.safetensors" in open_source("org/name").warnings[0]
    assert not any("stray" in path for _, path, _ in hub.requests)
    with pytest.raises(CheckpointError, match="stray"):
        open_source("org/name", refuse_stray=True)


def test_an_indexed_file_that_the_repository_lacks_is_refused(hub, large):
    (hub.root / TWO).unlink()
    with pytest.raises(CheckpointError, match=TWO):
        open_source("org/name")


def test_what_the_hub_refuses_is_said_in_words(hub, large):
    with pytest.raises(HubError, match="no such repository"):
        open_source("org/other")
    with pytest.raises(HubError, match="no such revision"):
        open_source("org/name@v9")
    for status, says in ((403, "log in"), (500, "HTTP status 500")):
        hub.status = status
        with pytest.raises(HubError, match=says):
            open_source("org/name")


def test_loading_downloads_the_indexed_shards_and_side_files_and_then_uses_the_cache(hub, tmp_path):
    write_safetensors(hub.root / ONE, {"a": ("U8", (1,), b"a")})
    write_index(hub.root, {"a": ONE})
    write_safetensors(hub.root / "consolidated.safetensors", {"a": ("U8", (1,), b"x")})
    (hub.root / "pytorch_model.bin").write_bytes(b"x")
    for name in ("config.json", "tokenizer.json"):
        write_json(hub.root / name, {})
    snapshot = open_source("org/name", download=True)
    assert snapshot.root == repo_folder(tmp_path / "hub", "org/name") / "snapshots" / COMMIT
    assert snapshot.provenance.commit == COMMIT
    assert sorted(path.name for path in snapshot.root.iterdir()) == [
        "config.json",
        ONE,
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    hub.requests.clear()
    assert open_source("org/name").provenance.commit == COMMIT
    assert hub.requests == []


def test_the_environment_variables_of_the_hub_are_respected(hub, large, tmp_path):
    code = "from vtensors.hub import open_source; print(len(open_source('org/name').tensors))"
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env={**env, **more}, capture_output=True, text=True, timeout=60, check=False
        )

    assert run().stdout == "4098\n"
    hub.requests.clear()
    offline = run(HF_HUB_OFFLINE="1")
    assert "not in the cache" in offline.stderr
    assert hub.requests == []


def test_huggingface_hub_is_not_imported_for_a_local_path(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", (1,), b"a")})
    code = (
        "import sys; from vtensors.hub import open_source; from vtensors.reading import TensorReader\n"
        f"snapshot = open_source({str(tmp_path)!r})\n"
        "TensorReader(snapshot).bytes_view(snapshot.tensors['a'])\n"
        "print(sorted({'torch', 'numpy', 'huggingface_hub', 'click', 'rich'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
