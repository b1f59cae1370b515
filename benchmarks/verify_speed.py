"""MB/s and peak memory of `vtensors verify` on synthetic NVFP4, FP8 and BF16 checkpoints in the page cache.

    python benchmarks/verify_speed.py                       # 1.2 GB each, five runs, in a temporary directory
    python benchmarks/verify_speed.py --gigabytes 2 --runs 3 --folder scratch --json result.json

Each run is a fresh process; the speed is that of reading and checking every value, without the start of Python
and torch, which is given apart. The files are written with legal random values and read once beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

N, K = 8192, 4096

CHILD = r"""
import json, re, sys, time
start = time.perf_counter()
import torch
from vtensors.verification import open_tolerantly
from vtensors_plugins.commands.verify import progress_bar
from vtensors_plugins.verification.report import verify
imported = time.perf_counter()
opened = open_tolerantly(sys.argv[1])
began = time.perf_counter()
report = verify(opened, progress_bar)
done = time.perf_counter()
peak = int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({
    "bytes": report.checked_bytes, "seconds": done - began, "start_seconds": imported - start, "peak": peak,
    "findings": sorted({finding.code for finding in report.findings}),
}))
"""


def _tensors(scheme: str, layer: int) -> list[tuple[str, str, list[int], str]]:
    """(name, dtype, shape, what it holds) of one linear of [N, K]."""
    module = f"model.layers.{layer}.mlp.down_proj"
    if scheme == "nvfp4":
        return [
            (f"{module}.weight", "U8", [N, K // 2], "any"),
            (f"{module}.weight_scale", "F8_E4M3", [N, K // 16], "scale"),
            (f"{module}.weight_scale_2", "F32", [], "scalar"),
        ]
    if scheme == "fp8":
        return [
            (f"{module}.weight", "F8_E4M3", [N, K], "codes"),
            (f"{module}.weight_scale", "F32", [], "scalar"),
            (f"{module}.input_scale", "F32", [], "scalar"),
        ]
    return [(f"{module}.weight", "BF16", [N, K], "bf16")]


def write_checkpoint(folder: Path, scheme: str, size: int) -> None:
    """A checkpoint of an unknown family with about `size` bytes of weights in one scheme."""
    import torch

    folder.mkdir(parents=True)
    width = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}
    entries: list[tuple[str, str, list[int], str]] = []
    header: dict[str, Any] = {}
    end = 0
    while end < size:
        for name, dtype, shape, what in _tensors(scheme, len(entries)):
            count = width[dtype]
            for dim in shape:
                count *= dim
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
            end += count
            entries.append((name, dtype, shape, what))
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (N * K,), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (N * K,), generator=generator, dtype=torch.uint8) << 7
    scales = torch.randint(1, 0x7F, (N * K // 16,), generator=generator, dtype=torch.uint8)
    weights = torch.randn(N * K, generator=generator).bfloat16().view(torch.uint8)
    parts = {
        "any": codes[: N * K // 2],
        "codes": codes,
        "scale": scales,
        "bf16": weights,
        "scalar": torch.tensor([1e-4]).view(torch.uint8),
    }
    stored = {what: part.numpy().tobytes() for what, part in parts.items()}
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(blob).to_bytes(8, "little") + blob)
        for *_, what in entries:
            stream.write(stored[what])
    algorithm = {"nvfp4": "W4A16_NVFP4", "fp8": "FP8"}.get(scheme)
    config: dict[str, Any] = {"model_type": "of-nobody"}
    if algorithm is not None:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": []}
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: Path) -> dict[str, Any]:
    """One run in a fresh process."""
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Write the checkpoints, measure, print and optionally save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary directory)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for scheme in ("nvfp4", "fp8", "bf16"):
            folder = Path(name) / scheme
            write_checkpoint(folder, scheme, int(args.gigabytes * 1e9))
            (folder / "model.safetensors").read_bytes()
            runs = [measure(folder) for _ in range(args.runs)]
            speeds = sorted(run["bytes"] / run["seconds"] / 1e6 for run in runs)
            figures[scheme] = {
                "bytes": runs[0]["bytes"],
                "median_mb_s": median(speeds),
                "best_mb_s": speeds[-1],
                "peak_mb": max(run["peak"] for run in runs) / 1e6,
                "start_seconds": median(run["start_seconds"] for run in runs),
                "findings": runs[0]["findings"],
            }
            print(
                f"{scheme}: {runs[0]['bytes'] / 1e6:.0f} MB, median {median(speeds):.0f} MB/s, best "
                f"{speeds[-1]:.0f} MB/s, peak {figures[scheme]['peak_mb']:.0f} MB (of which imports about "
                f"250), start {figures[scheme]['start_seconds']:.1f} s, findings {runs[0]['findings']}"
            )
            (folder / "model.safetensors").unlink()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
