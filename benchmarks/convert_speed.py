"""Speed and peak memory of `vtensors convert` and `vtensors quantize` on a synthetic checkpoint of about 2 GB.

    python benchmarks/convert_speed.py                       # writes to a temporary directory
    python benchmarks/convert_speed.py --gigabytes 0.5 --folder /fast/disk --json result.json

Each case runs in a process of its own: seconds, MB/s of what is read and written together (and hashed once, and
put on the disk), the largest resident set, and whether torch was imported. One matrix has a quarter of the
bytes, so that nothing that holds a whole tensor in memory passes unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = r"""
import resource, sys
from vtensors.cli import main
status = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(status, peak, int("torch" in sys.modules), file=sys.stderr)
"""
COLUMNS = 4096
CASES = {
    "copy and reciprocals (modelopt to compressed-tensors)": (
        "nvfp4",
        ["--to", "compressed-tensors"],
        "convert",
    ),
    "dequantize (nvfp4 to plain:bf16)": ("nvfp4", ["--to", "plain:bf16"], "convert"),
    "quantize (bf16 to nvfp4)": ("bf16", ["--recipe", "nvfp4"], "quantize"),
    "quantize (bf16 to fp8-row)": ("bf16", ["--recipe", "fp8-row"], "quantize"),
}


def write_checkpoint(folder: Path, kind: str, total: float) -> int:
    """Write a checkpoint of one kind, `nvfp4` or `bf16`; returns the bytes of its weights."""
    layers = 12
    per_row = COLUMNS // 2 + COLUMNS // 16 if kind == "nvfp4" else COLUMNS * 2
    rows = int(total * 0.75 / layers / per_row) // 128 * 128
    shapes = {f"model.layers.{layer}.mlp.down_proj": rows for layer in range(layers)}
    shapes["model.layers.0.mlp.up_proj"] = int(total * 0.25 / per_row) // 128 * 128
    tensors: dict[str, tuple[str, list[int], int]] = {}
    for name, n in shapes.items():
        if kind == "bf16":
            tensors[f"{name}.weight"] = ("BF16", [n, COLUMNS], n * COLUMNS * 2)
            continue
        tensors[f"{name}.weight_scale_2"] = ("F32", [], 4)
        tensors[f"{name}.weight"] = ("U8", [n, COLUMNS // 2], n * COLUMNS // 2)
        tensors[f"{name}.weight_scale"] = ("F8_E4M3", [n, COLUMNS // 16], n * COLUMNS // 16)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Random mantissas under one exponent: finite in every dtype, and no file system stores them as holes.
    codes = os.urandom(1 << 20)
    floats = bytes(byte & 0x7F if place % 2 == 0 else 0x3C for place, byte in enumerate(codes))
    scales = bytes(0x30 | byte & 7 for byte in codes)
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for dtype, _, size in tensors.values():
            if dtype == "F32":
                stream.write(b"\x00\x00\x80\x38")
                continue
            source = {"U8": codes, "BF16": floats, "F8_E4M3": scales}[dtype]
            for start in range(0, size, len(source)):
                stream.write(source[: min(len(source), size - start)])
    config: dict[str, object] = {"model_type": "synthetic"}
    if kind == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    (folder / "config.json").write_text(json.dumps(config))
    return position


def measure(folder: Path, source: Path, words: list[str], command: str, nbytes: int) -> dict[str, float]:
    """Seconds, MB read and written, MB/s of both, peak MB and whether torch came in, of one run in a fresh process."""
    out = folder / "out"
    begin = time.perf_counter()
    program = [sys.executable, "-c", CHILD, command, str(source), str(out), *words, "--overwrite", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begin
    status, peak, torch = (int(word) for word in done.stderr.split()[-3:])
    if status:
        raise RuntimeError(done.stdout + done.stderr)
    written = sum(path.stat().st_size for path in out.iterdir())
    return {
        "seconds": seconds,
        "read_mb": nbytes / 1e6,
        "written_mb": written / 1e6,
        "mb_per_s": (nbytes + written) / 1e6 / seconds,
        "peak_mb": peak / 1e6,
        "torch": torch,
    }


def main() -> None:
    """Write both checkpoints, measure every case, print and optionally save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        sizes = {
            kind: write_checkpoint(folder / kind, kind, args.gigabytes * 1e9) for kind in ("nvfp4", "bf16")
        }
        for case, (kind, words, command) in CASES.items():
            found = measure(folder, folder / kind, words, command, sizes[kind])
            results[case] = found
            sizes_text = f"read {found['read_mb'] / 1e3:.2f} GB, written {found['written_mb'] / 1e3:.2f} GB"
            print(
                f"{case:<54} {found['seconds']:6.1f} s  {sizes_text}: {found['mb_per_s']:5.0f} MB/s  "
                f"peak {found['peak_mb']:4.0f} MB  {'with' if found['torch'] else 'without'} torch",
                flush=True,
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
