"""Mean loss of checkpoints by scheme and activation precision, on a CUDA device through the engine's kernels.

    python benchmarks/accuracy.py DIR... --ids heldout-ids.npy --json benchmarks/results/accuracy-h200.json

ids: an array of token ids, cut into windows of 256. Each window is one prompt; the loss is of its tokens but the first,
teacher-forced, in nats per token. Where a directory has an oracle (oracle/oracle.json with `nll`), its float32 loss
stands beside.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_device import require_cuda
from measured_on import measured_on
from torch.nn.functional import cross_entropy

import vtensors
from vtensors_engine.cuda.runner import CudaRunner

WINDOW = 256
MODES = ("16bit", "declared", "fp4")


def loss_of(runner: CudaRunner, windows: torch.Tensor) -> float:
    """Nats per token. windows: [W, 256] int64."""
    losses = []
    for window in windows:
        logits = runner.score(window.tolist())
        losses.append(cross_entropy(logits[:-1].float(), window[1:].to(logits.device)).double())
    return float(torch.stack(losses).mean())


def executed_of(model: Any) -> list[str]:
    """Scheme and executed activations of the weights, each pair once."""
    return sorted({f"{row['scheme']}: {row['executed']}" for row in model.executed_summary()})


def measure(path: Path, windows: torch.Tensor, dtype: str) -> list[dict[str, Any]]:
    """A row for each mode that executes something else than those before it."""
    oracle = path / "oracle" / "oracle.json"
    wanted = json.loads(oracle.read_text(encoding="utf-8")).get("nll", {}) if oracle.exists() else {}
    rows, seen = list[dict[str, Any]](), set[tuple[str, ...]]()
    for mode in MODES:
        model = vtensors.load_model(path, device="cuda", dtype=dtype, activations=mode)
        executed = executed_of(model)
        if tuple(executed) in seen:
            continue
        seen.add(tuple(executed))
        runner = CudaRunner(model, max_sequences=1, max_tokens=WINDOW)
        row = {
            "checkpoint": path.name,
            "activations": mode,
            "executed": executed,
            "loss": round(loss_of(runner, windows), 5),
            "oracle": wanted.get("weight_only" if mode == "16bit" else "declared_activations"),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure every directory and write one record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    args = parser.parse_args()
    require_cuda()
    ids = torch.from_numpy(np.load(args.ids).astype(np.int64)).reshape(-1)
    windows = ids[: ids.numel() // WINDOW * WINDOW].view(-1, WINDOW)
    rows = [row for path in args.paths for row in measure(path, windows, args.dtype)]
    record = {**measured_on(args.commit), "dtype": args.dtype, "tokens": windows.numel(), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
