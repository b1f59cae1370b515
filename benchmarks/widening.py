"""Times of the widening linears on a CUDA device against cuBLAS on a bfloat16 weight, in one run.

    python benchmarks/widening.py --json benchmarks/results/widening-h200.json

Each time is the median of replays of a CUDA graph that rotates over copies of the weight larger than the L2 cache
together. The floor is the bytes of the stored weight over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from cuda_device import require_cuda

from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_kernels.compiling.nvrtc import find_toolkit
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.widening import bind_fp8, bind_nvfp4

SHAPES = {
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "in_qkvz": (16384, 5120),
    "o_out": (5120, 6144),
}
TOKENS = (1, 8, 64, 512, 2048)
ROTATED_BYTES = 300e6
Call = Callable[[], object]


def microseconds(calls: list[Call], repeats: int = 9) -> float:
    """Median time of one call, from graphs that run every call a few times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        rounds = max(1, 24 // len(calls))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(repeats + 2):
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[2:])


def read_bandwidth() -> float:
    """Bytes per second of a reduction over 4 GB, the highest that a plain torch kernel reads here."""
    data = torch.ones(2 << 30, dtype=torch.bfloat16, device="cuda")
    best = min(microseconds([lambda: data.view(torch.int32).amax()]) for _ in range(3))
    return data.numel() * 2 / (best * 1e-6)


def nvfp4(n: int, k: int) -> NVFP4Weight:
    """Random codes, plausible scales."""
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        block_scale=torch.empty(n, k // 16, device="cuda").uniform_(24, 160).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 8192, device="cuda"),
    )


def fp8(n: int, k: int) -> FP8Weight:
    """Random codes, one scale."""
    codes = torch.empty(n, k, device="cuda").uniform_(-200, 200).to(torch.float8_e4m3fn)
    return FP8Weight(codes=codes, scale=torch.tensor(1e-3, device="cuda"))


def measure(name: str, bandwidth: float) -> list[dict[str, object]]:
    """One row per kernel and number of tokens for a shape."""
    n, k = SHAPES[name]
    rows: list[dict[str, object]] = []
    for kind, make, bind in (("nvfp4", nvfp4, bind_nvfp4), ("fp8-tensor", fp8, bind_fp8)):
        first = make(n, k)
        copies = [first, *(make(n, k) for _ in range(int(ROTATED_BYTES // first.nbytes)))]
        calls = [bind(weight) for weight in copies]
        plain = [weight.dequantize(torch.bfloat16) for weight in copies[:3]]
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            wanted = linear(x.float(), first)
            error = float((calls[0](x).float() - wanted).norm() / wanted.norm())
            ours = microseconds([lambda call=call, x=x: call(x) for call in calls])
            peer = microseconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in plain])
            floor = first.nbytes / bandwidth * 1e6
            rows.append(
                {
                    "shape": name,
                    "n": n,
                    "k": k,
                    "m": tokens,
                    "scheme": kind,
                    "us": round(ours, 2),
                    "floor_us": round(floor, 2),
                    "share_of_floor": round(floor / ours, 3),
                    "cublas_bf16_us": round(peer, 2),
                    "relative_error": round(error, 5),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure every shape and write one record with what it was measured on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    args = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    toolkit = find_toolkit()
    record = {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "toolkit": toolkit if isinstance(toolkit, str) else toolkit.name,
        "torch": torch.__version__,
        "cupy": metadata.version("cupy-cuda13x"),
        "commit": args.commit,
        "read_bandwidth_gb_s": round(bandwidth / 1e9),
        "rows": [row for name in SHAPES for row in measure(name, bandwidth)],
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
