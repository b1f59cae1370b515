"""How far logits under 4-bit activations move when the float32 reference is rounded to 16 bits at chosen places.

    python benchmarks/rounding_study.py DIR... --ids heldout-ids.npy --json benchmarks/results/rounding-cpu.json

DIR: a checkpoint that declares 4-bit activations, with its oracle (oracle/tensors.safetensors: `input_ids`,
`logits_declared`). The reference runs on the CPU in float32; `rounding_places.py` says where a case rounds.

    error     largest difference to the oracle's logits, over the oracle's largest logit
    mean      mean difference to them
    codes     share of 4-bit codes in the inputs of all linears, of the first and of the last, that are not those of the
              run without rounding
    prompts   `error` of each window's first 32 tokens against that run: median, ninth decile, how many within 0.15
              and `mean` over all of them
    loss      mean over the windows, less that run's; nats per token
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import torch
from rounding_places import PLACES, Rounding
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import vtensors
from vtensors_formats import e2m1
from vtensors_formats.activations import FP4Activation
from vtensors_formats.weight import Weight
from vtensors_kernels.reference.linear import linear

WINDOW, PROMPT = 256, 32
BFLOAT16 = 8
# Significant bits of the sweep: float16's, and more up to float32's 24.
SWEEP = (11, 14, 17, 20, 22)
LIMIT = 0.15


@attrs.define
class Inputs:
    """The 4-bit codes of what linears are given, call by call, while they are watched."""

    codes: list[Tensor] = attrs.field(factory=list)
    watched: bool = False

    def linear(self, x: Tensor, weight: Weight, activation: Any = None) -> Tensor:
        """The reference's linear, noted."""
        if self.watched and isinstance(activation, FP4Activation):
            self.codes.append(e2m1.unpack(activation.codes(x).codes).flatten())
        return linear(x, weight, activation)

    def of(self, call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What the call gives, and the codes of its linears, in order."""
        self.codes, self.watched = [], True
        given, self.watched = call(), False
        return given, self.codes


@attrs.frozen(kw_only=True)
class Run:
    """What a decoder gives. exam: [1, T, V]. codes: of each linear of that. windows: [W, PROMPT, V]. loss: of those."""

    exam: Tensor
    codes: list[Tensor]
    windows: Tensor
    loss: float


def cases() -> list[tuple[str, Rounding]]:
    """Every place alone, more and more of them, and all at more bits."""
    named: list[tuple[str, Iterable[str], int]] = [(f"{place} alone", (place,), BFLOAT16) for place in PLACES]
    named += [(f"{PLACES[0]} to {PLACES[n]}", PLACES[: n + 1], BFLOAT16) for n in range(1, len(PLACES) - 1)]
    named += [("everything", PLACES, BFLOAT16)]
    for what, places in (("residual alone", ("residual",)), ("everything", PLACES)):
        named += [(f"{what}, {bits} bits", places, bits) for bits in SWEEP]
    return [(name, Rounding(frozenset(places), bits)) for name, places, bits in named]


def run_of(decoder: Any, ids: Tensor, windows: Tensor, inputs: Inputs) -> Run:
    """ids: [1, T]. windows: [W, WINDOW] int64."""
    exam, codes = inputs.of(lambda: decoder.logits(ids).float())
    heads, losses = [], []
    for window in windows:
        logits = decoder.logits(window.unsqueeze(0))[0].float()
        heads.append(logits[:PROMPT].clone())
        losses.append(cross_entropy(logits[:-1], window[1:]).double())
    return Run(exam=exam, codes=codes, windows=torch.stack(heads), loss=float(torch.stack(losses).mean()))


def error_of(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest wanted."""
    return float((ours - wanted).abs().max() / wanted.abs().max())


def row_of(name: str, run: Run, base: Run, oracle: Tensor) -> dict[str, Any]:
    """The record of a case."""
    errors = torch.tensor([error_of(a, b) for a, b in zip(run.windows, base.windows, strict=True)])
    changed = [(a != b).float() for a, b in zip(run.codes, base.codes, strict=False)]
    shares = (
        [float(part.mean()) for part in (torch.cat(changed), changed[0], changed[-1])] if changed else None
    )
    return {
        "case": name,
        "error": round(error_of(run.exam, oracle), 4),
        "mean": round(float((run.exam - oracle).abs().mean()), 4),
        "codes": shares and dict(zip(("all", "first", "last"), (round(x, 4) for x in shares), strict=True)),
        "prompts": {
            "median": round(float(errors.quantile(0.5)), 4),
            "decile9": round(float(errors.quantile(0.9)), 4),
            "within": int((errors <= LIMIT).sum()),
            "of": len(errors),
            "mean": round(float((run.windows - base.windows).abs().mean()), 4),
        },
        "loss": round(run.loss - base.loss, 5),
    }


def study(path: Path, windows: Tensor) -> dict[str, Any]:
    """The rows of a checkpoint."""
    tensors = load_file(path / "oracle" / "tensors.safetensors")
    ids, oracle, inputs = tensors["input_ids"], tensors["logits_declared"], Inputs()

    def load(activations: str, dtype: str = "float32") -> Any:
        return vtensors.load_model(path, device="cpu", dtype=dtype, activations=activations).decoder

    # The binding of a reference linear looks the function up when a model is loaded.
    with patch("vtensors_kernels.reference.linear.linear", inputs.linear):
        decoder, half = load("declared"), load("declared", "bfloat16")
    base = run_of(decoder, ids, windows, inputs)
    rows = [row_of("nothing", base, base, oracle)]

    def note(name: str, run: Run) -> None:
        rows.append(row_of(name, run, base, oracle))
        print(json.dumps({"checkpoint": path.name, **rows[-1]}), flush=True)

    for name, rounding in cases():
        with rounding.inside():
            note(name, run_of(rounding.decoder(decoder), ids, windows, inputs))
    note("reference in bfloat16", run_of(half, ids, windows, inputs))
    note("16-bit activations", run_of(load("16bit"), ids, windows, inputs))
    return {"checkpoint": path.name, "loss": round(base.loss, 5), "rows": rows}


def main() -> None:
    """Study every directory and write one record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64, help="at most; default: %(default)s")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ids = torch.from_numpy(np.load(arguments.ids).astype(np.int64)).reshape(-1)
    count = min(arguments.windows, ids.numel() // WINDOW)
    windows = ids[: count * WINDOW].view(-1, WINDOW)
    with torch.inference_mode():
        found = [study(path, windows) for path in arguments.paths]
    record = {
        "device": "cpu",
        "versions": {"torch": torch.__version__},
        "prompts": len(windows),
        "tokens": windows.numel(),
        "checkpoints": found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
