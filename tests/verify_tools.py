"""What the tests of `vtensors verify` share: running it, editing small models, damaging their files.

Import as `from verify_tools import run, found`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from builders import write_json, write_safetensors
from tiny_checkpoints import Tiny
from vtensors.manager import Plugins
from vtensors.verification import Finding, open_tolerantly
from vtensors_plugins.commands.progress_bar import progress_bar
from vtensors_plugins.verification.report import Report, verify

GATE, UP, DOWN = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down"))
EXPERT = "model.layers.0.mlp.experts.2.down_proj"
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
SHARD = "model.safetensors"


def run(
    folder: Path, *, plugins: Plugins | None = None, against: Path | None = None, **options: Any
) -> Report:
    """The report about a checkpoint on disk."""
    reference = open_tolerantly(against) if against is not None else None
    return verify(open_tolerantly(folder, plugins=plugins), progress_bar, against=reference, **options)


def found(report: Report, code: str) -> list[Finding]:
    """The findings of one code."""
    return [finding for finding in report.findings if finding.code == code]


def edited(tiny: Callable[[], Tiny], edit: Callable[[Tiny], None]) -> Callable[[Path], Path]:
    """Saves a model after the edit."""

    def make(folder: Path) -> Path:
        model = tiny()
        edit(model)
        return model.save(folder)

    return make


def put(name: str, value: torch.Tensor | None) -> Callable[[Tiny], None]:
    """An edit that replaces or removes one tensor."""

    def edit(tiny: Tiny) -> None:
        if value is None:
            del tiny.tensors[name]
        else:
            tiny.tensors[name] = value

    return edit


def poke(name: str, byte: int, place: int = 0) -> Callable[[Tiny], None]:
    """An edit that sets one byte of a tensor."""

    def edit(tiny: Tiny) -> None:
        changed_tensor = tiny.tensors[name].clone()
        changed_tensor.view(torch.uint8).view(-1)[place] = byte
        tiny.tensors[name] = changed_tensor

    return edit


def config(**values: Any) -> Callable[[Tiny], None]:
    """An edit of config.json."""
    return lambda tiny: tiny.config.update(values)


def both(*edits: Callable[[Tiny], None]) -> Callable[[Tiny], None]:
    """One edit after the other."""

    def edit(tiny: Tiny) -> None:
        for one in edits:
            one(tiny)

    return edit


# --- files ------------------------------------------------------------------------------------------------

SECOND = "model-00002-of-00002.safetensors"


def on_disk(change: Callable[[Path], object], *, shards: int = 1) -> Callable[[Path], Path]:
    """Saves a Llama in BF16, then changes its folder."""

    def make(folder: Path) -> Path:
        Tiny.plain_model().save(folder, shards=shards)
        change(folder)
        return folder

    return make


def append(folder: Path, data: bytes) -> None:
    """Write bytes behind the end of the shard."""
    with (folder / SHARD).open("ab") as stream:
        stream.write(data)


def duplicate(folder: Path) -> None:
    """A third indexed file that holds a tensor of the first one too."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first = next(name for name, file in index.items() if file != SECOND)
    write_safetensors(folder / "other.safetensors", {first: ("F32", (1,), bytes(4)), "x": ("U8", (1,), b"1")})
    write_json(folder / "model.safetensors.index.json", {"weight_map": {**index, "x": "other.safetensors"}})


def stale_index(folder: Path) -> None:
    """The index names a tensor that no file has."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    write_json(path, {"weight_map": {**index, "gone.weight": SECOND}})


def to_link(folder: Path) -> None:
    """The shard becomes a link to a file outside of the folder."""
    outside = folder.parent / "outside.safetensors"
    (folder / SHARD).rename(outside)
    os.symlink(outside, folder / SHARD)


def hub_cache(folder: Path, *, content: bytes | None = None) -> Path:
    """The model as a snapshot of a Hub cache; content: what config.json's blob holds instead of its own."""
    snapshot = folder / "models--org--name" / "snapshots" / ("0" * 39 + "1")
    blobs = folder / "models--org--name" / "blobs"
    plain = Tiny.plain_model().save(folder / "plain")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in plain.iterdir():
        data = file.read_bytes()
        large = file.suffix == ".safetensors"
        name = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        (blobs / name.hexdigest()).write_bytes(data if large or content is None else content)
        os.symlink(f"../../blobs/{name.hexdigest()}", snapshot / file.name)
    return snapshot


def overwritten_blob(folder: Path) -> Path:
    """A snapshot whose weights were written to through its link: same size, another first norm."""
    snapshot = hub_cache(folder)
    with (snapshot / SHARD).open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\x00\x3c")
    return snapshot
