"""Writes a checkpoint with the tensors and configurations of a published Qwen3.6 NVFP4 model, and random weights.

    python benchmarks/synthetic.py qwen3.6-27b --out /models/27b                 # 21,921,428,072 bytes of weights
    python benchmarks/synthetic.py qwen3.6-35b-a3b --out /models/35b             # 23,407,580,856
    python benchmarks/synthetic.py qwen3.6-27b --depth 1/8 --out /models/27b-8   # 6,439,385,496

Names, shapes, dtypes, shards and configurations are the published ones (the vision tower and the multi-token
head too), so that whatever loads one loads the other. There is no tokenizer: prompts are token ids. The same seed
gives the same bytes. A part of the layers (--depth) comes with whole embeddings, head, vision tower and multi-token
head. Nothing is generated on a GPU: the bytes come out of pools as fast as a disk takes them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from synthetic_configs import configs
from synthetic_models import MODELS, Model, Stored, at_depth, shards
from synthetic_values import Values

from vtensors_plugins.commands.progress_bar import progress_bar

DEPTHS = {"1": 1, "1/2": 2, "1/4": 4, "1/8": 8}
_MOST_VIEWS = 1024  # buffers of one write: IOV_MAX of Linux
_WRITE = 32 << 20
# Place in the file, and what is written there one after the other.
Job = tuple[int, list[memoryview]]


def header_bytes(part: list[Stored], metadata: dict[str, str] | None = None) -> bytes:
    """The length and the JSON of a safetensors header, padded with blanks to a multiple of eight."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    place = 0
    for stored in part:
        entries[stored.name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [place, place + stored.nbytes],
        }
        place += stored.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_checkpoint(
    model: Model,
    folder: Path,
    values: Values,
    *,
    threads: int = 8,
    advance: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the shards, the index and the configurations; returns the bytes of the payload."""
    folder.mkdir(parents=True, exist_ok=True)
    files = shards(model)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # The dense model's writer left the metadata out.
        header = header_bytes(part, {"format": "pt"} if model.experts else None)
        _write_shard(folder / name, header, part, values, threads=threads, advance=advance)
        weight_map |= {stored.name: name for stored in part}
    stored = [stored for part in files for stored in part]
    total = sum(one.nbytes for one in stored)
    metadata = {"total_parameters": sum(prod(one.shape) for one in stored), "total_size": total}
    config, hf_quant = configs(model)
    _write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    _write_json(folder / "config.json", config)
    _write_json(folder / "hf_quant_config.json", hf_quant)
    return total


def _write_shard(
    path: Path,
    header: bytes,
    part: list[Stored],
    values: Values,
    *,
    threads: int,
    advance: Callable[[int], None],
) -> None:
    with path.open("wb") as stream, ThreadPoolExecutor(threads) as pool:
        stream.write(header)
        stream.flush()
        os.ftruncate(stream.fileno(), len(header) + sum(stored.nbytes for stored in part))
        for written in pool.map(lambda job: _write(stream.fileno(), *job), _jobs(part, values, len(header))):
            advance(written)


def _jobs(part: list[Stored], values: Values, place: int) -> Iterator[Job]:
    views: list[memoryview] = []
    size = 0
    for stored in part:
        for piece in values.pieces(stored):
            views.append(piece)
            size += len(piece)
            if size >= _WRITE or len(views) == _MOST_VIEWS:
                yield place, views
                place, views, size = place + size, [], 0
    if views:
        yield place, views


def _write(descriptor: int, place: int, views: list[memoryview]) -> int:
    total = sum(len(view) for view in views)
    done = 0
    while views:
        count = os.pwritev(descriptor, views, place + done)
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return total


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoint that the arguments name and say how long it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument(
        "--depth", choices=DEPTHS, default="1", help="which part of the layers (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="print a record instead of a sentence")
    args = parser.parse_args()
    model = at_depth(MODELS[args.model], DEPTHS[args.depth])
    begin = time.perf_counter()
    payload = sum(stored.nbytes for part in shards(model) for stored in part)
    with progress_bar("writing", payload) as advance:
        values = Values(args.seed)
        total = write_checkpoint(model, args.out, values, threads=args.threads, advance=advance)
    seconds = time.perf_counter() - begin
    files = shards(model)
    record = {
        "model": model.name,
        "layers": model.layers,
        "seed": args.seed,
        "tensors": sum(len(part) for part in files),
        "shards": len(files),
        "payload_bytes": total,
        "seconds": round(seconds, 2),
        "gb_per_s": round(total / 1e9 / seconds, 2),
    }
    if args.json:
        print(json.dumps(record))
    else:
        shown = f"{len(files)} {'file' if len(files) == 1 else 'files'}"
        print(
            f"{args.out}: {record['tensors']:,} tensors in {shown}, {total:,} bytes, {seconds:.1f} s "
            f"({record['gb_per_s']} GB/s)"
        )


if __name__ == "__main__":
    main()
