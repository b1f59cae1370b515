"""Small checkpoints written with the standard library alone, so that a test can also write damaged ones.

Import as `from builders import write_safetensors, write_index` (tests/ is on pytest's pythonpath).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# name -> (safetensors dtype, shape, stored bytes)
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def header_bytes(header: Mapping[str, Any] | str | bytes) -> bytes:
    """Eight length bytes plus the JSON of a header, padded with blanks to a multiple of eight.

    A str or bytes header is taken as it is (not padded), which is how a test writes broken JSON.
    """
    if isinstance(header, str):
        blob = header.encode()
    elif isinstance(header, bytes):
        blob = header
    else:
        blob = json.dumps(header, separators=(",", ":")).encode()
        blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob


def safetensors_bytes(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file that holds the tensors in the order given, without gaps."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    payload = b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        payload += data
    return header_bytes(header) + payload


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file; nothing is checked, so dtype, shape and bytes may contradict each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def write_index(
    folder: Path, weight_map: Mapping[str, str], name: str = "model.safetensors.index.json"
) -> Path:
    """Write an index that maps tensor names to shard file names."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
    return path


def write_json(path: Path, content: object) -> Path:
    """Write a JSON file such as config.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path
