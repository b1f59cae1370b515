"""Stored tensors and small checkpoints for the tests of conversion."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import attrs

from builders import write_json, write_safetensors
from vtensors.cli import main
from vtensors.header import read_header

LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@attrs.frozen
class Stored:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> tuple[float, ...]:
        """F32 values."""
        return struct.unpack(f"<{len(self.data) // 4}f", self.data)

    @property
    def bits(self) -> tuple[int, ...]:
        """F32 values as integers, so that their difference is a number of ULPs."""
        return struct.unpack(f"<{len(self.data) // 4}i", self.data)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a directory."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        for info in read_header(path, path.name).tensors:
            found[info.name] = Stored(info.dtype, info.shape, raw[info.begin : info.end])
    return found


def run(capsys: Any, *words: object) -> tuple[int, Any]:
    """Exit status and what the program prints as JSON."""
    status = main([*map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def f32(*values: float) -> bytes:
    """The values as F32 bytes."""
    return struct.pack(f"<{len(values)}f", *values)


def modelopt_nvfp4(
    folder: Path, *, modules: tuple[str, ...] = LINEARS, scale: float = 0.25, kv: bool = False
) -> Path:
    """A ModelOpt NVFP4 checkpoint of no known architecture: [32, 64] matrices, BF16 norm and head."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {
        "model.norm.weight": ("BF16", (64,), b"\x80\x3f" * 64),
        "lm_head.weight": ("BF16", (32, 64), b"\x00\x3f" * 2048),
    }
    for name in modules:
        base = f"model.layers.0.{name}"
        tensors |= {
            f"{base}.weight": ("U8", (32, 32), bytes(range(256)) * 4),
            f"{base}.weight_scale": ("F8_E4M3", (32, 4), b"\x38\x40\x30\x7e" * 32),
            f"{base}.weight_scale_2": ("F32", (), f32(scale)),
            f"{base}.input_scale": ("F32", (), f32(0.1)),
        }
    if kv:
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = ("F32", (), f32(0.05))
        tensors["model.layers.0.self_attn.v_proj.v_scale"] = ("F32", (), f32(0.08))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    block: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if kv:
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    write_json(folder / "config.json", {"model_type": "unheard_of", "quantization_config": block})
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def plain_bf16(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """A BF16 checkpoint of no known architecture with the matrices given; values depend on the place."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        count = shape[0] * shape[1]
        words = [0x3C00 + (place * 7 + number * 131) % 0x300 | (place % 2) << 15 for place in range(count)]
        tensors[f"{name}.weight"] = ("BF16", shape, struct.pack(f"<{count}H", *words))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", {"model_type": "unheard_of"})
    return folder
