from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from huggingface_hub import constants

import vtensors
from builders import write_json, write_safetensors
from fake_hub import COMMIT, FakeHub, serving
from sparse_checkpoints import Shapes, published_27b, write_sparse
from vtensors.checkpoint import open_checkpoint
from vtensors.errors import LockError
from vtensors.lock import Lock, check_lock, differences, make_lock, read_lock, write_lock

FP8_ROW: Shapes = {"lm_head.weight": ("F8_E4M3", (32, 64)), "lm_head.weight_scale": ("F32", (32,))}
CONFIG: dict[str, Any] = {
    "model_type": "of-nobody",
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "checkpoint", FP8_ROW, CONFIG)


def lock_of(folder: Path) -> Lock:
    return make_lock(open_checkpoint(folder))


def moved(folder: Path, lock: Lock) -> tuple[str, ...]:
    with pytest.raises(LockError) as caught:
        open_checkpoint(folder, lock=lock)
    return caught.value.moved


def test_a_lock_that_was_written_is_read_back(checkpoint: Path, tmp_path: Path) -> None:
    lock = lock_of(checkpoint)
    write_lock(lock, tmp_path / "a.lock.json")
    assert read_lock(tmp_path / "a.lock.json") == lock
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_unchanged_checkpoint_opens_under_its_lock_wherever_it_lies(
    checkpoint: Path, tmp_path: Path
) -> None:
    lock = lock_of(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "elsewhere")
    write_lock(lock, tmp_path / "lock.json")
    assert open_checkpoint(tmp_path / "elsewhere", lock=str(tmp_path / "lock.json")).modules
    assert vtensors.open_checkpoint(checkpoint, lock=tmp_path / "lock.json").modules


def test_a_lock_holds_no_path_of_the_machine(checkpoint: Path) -> None:
    text = json.dumps(lock_of(checkpoint).to_json())
    assert str(checkpoint.parent) not in text
    assert '"source": "checkpoint"' in text


def test_a_moved_scheme_names_header_size_and_module(checkpoint: Path) -> None:
    lock = lock_of(checkpoint)
    write_sparse(checkpoint, {"lm_head.weight": ("BF16", (32, 64))}, CONFIG)
    sentences = moved(checkpoint, lock)
    assert any(s.startswith("model.safetensors: header changed (") for s in sentences)
    assert any(s.startswith("model.safetensors: size ") for s in sentences)
    assert (
        "modules lm_head: fp8-row [32, 64] modelopt fp8-dynamic FP8_PER_CHANNEL_PER_TOKEN "
        "-> bf16 [32, 64] plain 16bit" in sentences
    )


def test_a_configuration_that_moved_is_named_though_no_module_did(checkpoint: Path) -> None:
    lock = lock_of(checkpoint)
    write_json(checkpoint / "config.json", {**CONFIG, "rope_theta": 1})
    (sentence,) = moved(checkpoint, lock)
    assert sentence.startswith("config.json: changed (")


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [(None, "{}", "new (absent -> "), ("{}", None, "gone ("), ("{}", "{ }", "changed (")],
    ids=["new", "gone", "changed"],
)
def test_tokenizer_files_are_locked_too(
    checkpoint: Path, before: str | None, after: str | None, word: str
) -> None:
    file = checkpoint / "tokenizer_config.json"
    if before is not None:
        file.write_text(before)
    lock = lock_of(checkpoint)
    file.unlink(missing_ok=True)
    if after is not None:
        file.write_text(after)
    (sentence,) = moved(checkpoint, lock)
    assert sentence.startswith(f"tokenizer_config.json: {word}")


def test_a_shard_that_came_or_went_is_named(checkpoint: Path) -> None:
    lock = lock_of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    sentences = moved(checkpoint, lock)
    assert "model.safetensors: shard is gone" in sentences
    assert "other.safetensors: new shard" in sentences


def test_another_commit_is_refused_though_everything_else_is_the_same(tmp_path: Path) -> None:
    snapshots = tmp_path / "models--org--name" / "snapshots"
    first, second = (write_sparse(snapshots / (letter * 40), FP8_ROW, CONFIG) for letter in "ab")
    lock = lock_of(first)
    assert (lock.repo, lock.commit) == ("org/name", "a" * 40)
    assert moved(second, lock) == (f"commit: {'a' * 40} -> {'b' * 40}",)
    with pytest.raises(LockError, match=f"open org/name@{'a' * 40}"):
        check_lock(open_checkpoint(second), lock)


def test_a_plain_directory_satisfies_a_lock_with_a_commit_by_its_hashes(tmp_path: Path) -> None:
    cached = write_sparse(tmp_path / "models--org--name" / "snapshots" / ("a" * 40), FP8_ROW, CONFIG)
    lock = lock_of(cached)
    shutil.copytree(cached, tmp_path / "copy")
    assert not list(differences(lock, lock_of(tmp_path / "copy")))


def test_modules_read_otherwise_from_the_same_files_are_refused(checkpoint: Path) -> None:
    lock = lock_of(checkpoint)
    old = {**lock.to_json(), "modules_sha256": "0" * 64, "written_by": "vtensors 0.0"}
    path = checkpoint / "old.json"
    write_json(path, old)
    with pytest.raises(LockError) as caught:
        open_checkpoint(checkpoint, lock=path)
    assert caught.value.moved[0] == "modules: the same kinds and counts under other names"
    assert "locked by vtensors 0.0" in caught.value.moved[1]


def test_a_scale_that_came_or_went_is_named_with_its_module(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn"
    both: Shapes = {**FP8_ROW, f"{name}.k_scale": ("F32", ()), f"{name}.v_scale": ("F32", ())}
    lock = lock_of(write_sparse(tmp_path / "both", both, CONFIG))
    one = {key: value for key, value in both.items() if not key.endswith("k_scale")}
    folder = write_sparse(tmp_path / "one", one, CONFIG)
    said = (
        "modules model.layers.*.self_attn: kv-cache scales (k F32 [], v F32 []) -> kv-cache scales (v F32 [])"
    )
    assert said in moved(folder, lock)
    earlier = attrs.evolve(lock, groups=tuple(attrs.evolve(group, tensors=None) for group in lock.groups))
    assert "modules: the same kinds and counts under other names, or with other tensors" in moved(
        folder, earlier
    )


def test_a_lock_of_headers_from_the_hub_fits_the_download_and_refuses_before_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_root = tmp_path / "hub"
    write_safetensors(hub_root / "model.safetensors", {"lm_head.weight": ("BF16", (2, 2), bytes(8))})
    write_json(hub_root / "config.json", {"model_type": "of-nobody"})
    (hub_root / "chat_template.jinja").write_text("{{ messages }}")
    with serving(FakeHub(root=hub_root)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # Where older versions keep the template.
        older = "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(older, template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        remote = make_lock(open_checkpoint("org/name"))
        assert remote.commit == COMMIT
        assert "chat_template.jinja" not in remote.files
        assert not list(differences(remote, lock_of(hub_root)))
        write_json(hub_root / "config.json", {"model_type": "of-another"})
        hub.requests.clear()
        with pytest.raises(LockError, match=r"config\.json: changed"):
            open_checkpoint("org/name", download=True, lock=remote)
        whole = [path for method, path, ranged in hub.requests if path.endswith("safetensors") and not ranged]
        assert whole == []
        assert not (tmp_path / "cache").exists()


def test_tens_of_thousands_of_modules_make_a_small_lock(tmp_path: Path) -> None:
    tensors: Shapes = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": ("BF16", (2, 2))
        for layer in range(40)
        for expert in range(128)
        for part in ("gate", "up", "down")
    }
    lock = lock_of(write_sparse(tmp_path, tensors, {"model_type": "of-nobody"}))
    assert lock.modules == 40 * 128 * 3
    assert len(lock.groups) == 3
    assert len(json.dumps(lock.to_json(), indent=1)) < 3000


def test_the_lock_of_the_published_27b_is_a_small_file(shared: Path, tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / "q27", *published_27b(shared))
    write_lock(lock_of(folder), tmp_path / "lock.json")
    assert (tmp_path / "lock.json").stat().st_size < 14_000


def _of_another_version(lock: dict[str, Any]) -> None:
    lock["version"] = 2


def _without_shards(lock: dict[str, Any]) -> None:
    del lock["shards"]


def _with_a_short_hash(lock: dict[str, Any]) -> None:
    lock["files"]["config.json"] = "abc"


def _with_a_negative_size(lock: dict[str, Any]) -> None:
    lock["shards"][0]["size"] = -1


def _with_a_shape_of_words(lock: dict[str, Any]) -> None:
    lock["groups"][0]["shape"] = ["N", "K"]


def _of_another_format(lock: dict[str, Any]) -> None:
    lock["format"] = "cargo"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_of_another_version, "another format version"),
        (_without_shards, "'shards'"),
        (_with_a_short_hash, "'config.json'"),
        (_with_a_negative_size, "'size'"),
        (_with_a_shape_of_words, "'shape'"),
        (_of_another_format, "not a lock of vtensors"),
    ],
)
def test_a_damaged_lock_is_refused_naming_the_field(
    checkpoint: Path, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    value = lock_of(checkpoint).to_json()
    damage(value)
    path = write_json(checkpoint / "lock.json", value)
    with pytest.raises(LockError, match=said):
        open_checkpoint(checkpoint, lock=path)


def test_an_absent_lock_is_refused_saying_how_to_write_one(checkpoint: Path) -> None:
    with pytest.raises(LockError, match="vtensors lock SOURCE -o"):
        open_checkpoint(checkpoint, lock=checkpoint / "none.json")


def test_a_file_that_is_no_lock_is_not_overwritten(checkpoint: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    with pytest.raises(LockError, match="not a lock of vtensors"):
        write_lock(lock_of(checkpoint), checkpoint / "config.json")
    assert (checkpoint / "config.json").read_text() == config


@pytest.mark.parametrize("kind", ["directory", "device"])
def test_a_lock_that_is_no_file_is_refused_without_reading_it(tmp_path: Path, kind: str) -> None:
    place = tmp_path if kind == "directory" else Path("/dev/null")
    with pytest.raises(LockError, match="the lock is not a regular file") as caught:
        read_lock(place)
    assert caught.value.seen is not None
    assert kind in caught.value.seen
    assert caught.value.fix
