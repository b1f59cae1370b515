"""Times of the linears that the selection picks, on a CUDA device, against peers and the read floor, in one run.

    python benchmarks/linear.py --marlin DIR --json benchmarks/results/linear-h200.json
    python benchmarks/linear.py --quick --shapes gate_up,o_out --tokens 1,16 --impls vtensors,cublas_bf16
    python benchmarks/linear.py --impls vtensors_fp8,vtensors_fp8_block,vtensors_mxfp8,marlin_fp8,scaled_mm_fp8
    python benchmarks/linear.py --impls vtensors_fp8,vtensors_fp8_w8a8,vtensors_fp8_w8a8_token,scaled_mm_fp8
    python benchmarks/linear.py --shapes in_proj_ba,router,shared_gate --impls vtensors_bf16,cublas_bf16

A time is the median of replays of a CUDA graph that rotates over at least 400 MB of copies of the weight. Each
implementation is first held against float32 on every element, with uninitialized memory poisoned, and again on the
last result of its graph. DIR holds the Marlin kernels (see peers/marlin.py); without it its published times are
scaled by cuBLAS of this run. `linear_table.py` makes the tables of docs/performance.md from the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import linear_goals as table
import torch
from cuda_device import require_cuda
from graph_timing import ERROR_LIMIT, ROTATED_BYTES, copies_of, poisoned_memory, relative_error, time_calls
from linear_subjects import Subject, bytes_read, make_fixture, make_subject
from linear_table import goals_table, times_tables
from measured_on import measured_on, without_paths
from peers.marlin import Marlin, load_marlin
from peers.published import scaled_marlin_us
from read_ceiling import PEAK_BYTES, Floor, Reader
from selected import launches_seen
from torch import Tensor

IMPLS = (table.OURS, table.OURS_APART, table.MARLIN, table.CUBLAS, table.SCALED_MM)
FP8_IMPLS = (table.OURS_FP8, table.OURS_FP8_BLOCK, table.OURS_MXFP8)
MORE_IMPLS = (table.MARLIN_FP8, *FP8_IMPLS, *table.W8A8, table.OURS_BF16)


@attrs.define(kw_only=True)
class Run:
    """What is measured and where it goes. record: grows row by row; saved after each shape and M."""

    record: dict[str, Any]
    path: Path | None
    graph_us: float
    replays: int
    marlin: Marlin | str
    reader: Reader
    device: torch.device
    floors: dict[int, Floor] = attrs.field(factory=dict)
    began: float = attrs.field(factory=time.perf_counter)

    def floor(self, nbytes: int) -> Floor:
        """The read floor for that many bytes, measured once."""
        if nbytes not in self.floors:
            found = self.reader.floor(nbytes, graph_us=self.graph_us / 2, replays=max(5, self.replays // 2))
            self.floors[nbytes] = found
            facts = {
                name: round(v, 3) if isinstance(v, float) else v for name, v in attrs.asdict(found).items()
            }
            self.record["floors"].append({**facts, "gb_s": round(found.gb_s)})
        return self.floors[nbytes]

    def fail(self, shape: str, m: int | None, impl: str, reason: str) -> None:
        """Note why something has no row; paths are cut to the last name."""
        reason = without_paths(reason)
        self.record["failures"].append({"shape": shape, "m": m, "impl": impl, "reason": reason})
        self.tell(f"{shape} M={m} {impl}: {reason}")

    def tell(self, text: str) -> None:
        """One line of progress."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self, *, complete: bool = False) -> None:
        """Write the record beside and rename it, so that a killed run leaves a whole file."""
        self.record["seconds"] = round(time.perf_counter() - self.began, 1)
        self.record["complete"] = complete
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".part")
            beside.write_text(record_text(self.record))
            beside.replace(self.path)


def measure_shape(run: Run, shape: str, tokens: list[int], impls: list[str]) -> None:
    """Every row of one shape; an implementation that fails is noted and the others go on."""
    n, k = table.size_of(shape)
    fixture = make_fixture(n, k, max(tokens), run.device)
    subjects = []
    for impl in impls:
        nbytes = bytes_read(impl, n, k)
        run.floor(nbytes)
        copies = copies_of(nbytes)
        begin = time.perf_counter()
        try:
            subjects.append(make_subject(impl, fixture, run.marlin, copies))
        except Exception as problem:  # whatever a peer or a kernel raises is its failure, not the run's
            run.fail(shape, None, impl, _told(problem))
            continue
        run.tell(
            f"{shape}: {impl} bound to {len(subjects[-1].calls)} copies, {time.perf_counter() - begin:.1f} s"
        )
    for m in tokens:
        for subject in subjects:
            try:
                row = measure(run, shape, m, subject, fixture.x[:m])
            except Exception as problem:
                run.fail(shape, m, subject.impl, _told(problem))
                continue
            run.record["rows"].append(row)
            run.tell(
                f"{shape} M={m} {subject.impl}: {row['us']:.2f} us, {row['share_of_floor']:.0%} of the floor, "
                f"spread {row['spread']:.1%}, error {row['relative_error']:.1e}, {row['kernel']}"
            )
        _add_scaled_marlin(run, shape, m)
        for row in run.record["rows"]:
            if (row["shape"], row["m"]) == (shape, m):
                marlin = table.marlin_row(run.record["rows"], shape, m)
                row["ratio_to_marlin"] = None if marlin is None else round(marlin["us"] / row["us"], 3)
        run.save()


def measure(run: Run, shape: str, m: int, subject: Subject, x: Tensor) -> dict[str, Any]:
    """One row. Raises ValueError where a result is wrong."""
    n, k = table.size_of(shape)
    wanted = subject.product[:m]
    with subject.around():
        error, poisoned, launches = _first_call(subject, x, wanted)
        calls = [partial(call, x) for call in subject.calls]
        times = time_calls(calls, graph_us=run.graph_us, replays=run.replays)
    if isinstance(times.last, Tensor):
        _checked(times.last, wanted, "the last call of the graph")
    floor = run.floor(subject.nbytes)
    return {
        "shape": shape,
        "n": n,
        "k": k,
        "m": m,
        "impl": subject.impl,
        "kernel": subject.kernel(m),
        "functions": [name for name, _ in launches],
        "dependent_launch": any(dependent for _, dependent in launches) and subject.impl != table.OURS_APART,
        "us": round(times.median, 3),
        "low_us": round(times.low, 3),
        "high_us": round(times.high, 3),
        "spread": round(times.spread, 4),
        "launches": times.launches,
        "copies": len(subject.calls),
        "bytes": subject.nbytes,
        "gb_s": round(subject.nbytes / times.median / 1e3),
        "floor_us": round(floor.us, 3),
        "share_of_floor": round(floor.us / times.median, 4),
        "relative_error": round(error, 6),
        "poisoned": poisoned,
    }


def _first_call(subject: Subject, x: Tensor, wanted: Tensor) -> tuple[float, bool, list[tuple[str, bool]]]:
    """Relative error of one call, whether it was made in poisoned memory, and what it launched.

    A peer that is right only in memory as it comes is timed all the same; ours is not.
    """
    call = subject.calls[0]
    try:
        with poisoned_memory(), launches_seen() as launches:
            result = call(x)
        return _checked(result, wanted, "a single call"), True, launches
    except ValueError:
        if subject.impl in (table.OURS, table.OURS_APART, table.OURS_BF16, *FP8_IMPLS, *table.W8A8):
            raise
        return _checked(call(x), wanted, "a single call"), False, []


def _checked(result: Tensor, wanted: Tensor, what: str) -> float:
    torch.cuda.synchronize()
    if result.shape != wanted.shape:
        raise ValueError(f"{what} gives shape {tuple(result.shape)}, not {tuple(wanted.shape)}")
    error = relative_error(result, wanted)
    if not error < ERROR_LIMIT:
        wrong = int((~torch.isfinite(result)).sum())
        raise ValueError(f"{what} is wrong: relative error {error:.2e}, {wrong} elements not finite")
    return error


def _add_scaled_marlin(run: Run, shape: str, m: int) -> None:
    """Without the kernels themselves: the published time, scaled."""
    cublas = table.find(run.record["rows"], shape, m, table.CUBLAS)
    if not isinstance(run.marlin, str) or cublas is None:
        return
    us = scaled_marlin_us(shape, m, cublas["us"])
    if us is not None:
        n, k = table.size_of(shape)
        row = {"shape": shape, "n": n, "k": k, "m": m, "impl": table.MARLIN_SCALED, "kernel": "marlin_gemm"}
        run.record["rows"].append({**row, "us": round(us, 3), "share_of_floor": None})


def _told(problem: BaseException) -> str:
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({Path(where.filename).name}:{where.lineno})"


def record_text(record: dict[str, Any]) -> str:
    """JSON with one line per entry of a list."""
    fields = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def new_record(facts: dict[str, Any], marlin: Marlin | str) -> dict[str, Any]:
    """A record with no rows yet."""
    missing = without_paths(marlin) if isinstance(marlin, str) else None
    return {
        **facts,
        "versions": {**facts["versions"], "marlin": None if isinstance(marlin, str) else marlin.version},
        "marlin_missing": missing,
        "complete": False,
        "seconds": 0.0,
        "read_peak": None,
        "floors": [],
        "rows": [],
        "failures": [],
    }


def _names(text: str | None, known: tuple[str, ...], default: tuple[str, ...], what: str) -> list[str]:
    names = list(default) if text is None else [word for word in text.split(",") if word]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        sys.exit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def main() -> int:
    """Measure, print the goals, and write the record; 1 where something that was asked for has no row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", help=f"default: {','.join(table.SHAPES)}; also {','.join(table.SHAPES_SMALL)}"
    )
    parser.add_argument("--tokens", help=f"default: {','.join(map(str, table.TOKENS))}")
    parser.add_argument("--impls", help=f"default: {','.join(IMPLS)}; also {','.join(MORE_IMPLS)}")
    parser.add_argument("--marlin", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="Of the code, where git is not there to ask.")
    parser.add_argument("--quick", action="store_true", help="Three M, shorter graphs, fewer replays.")
    args = parser.parse_args()
    known = (*table.SHAPES, *table.SHAPES_SMALL)
    shapes = _names(args.shapes, known, tuple(table.SHAPES), "shape")
    impls = _names(args.impls, IMPLS + MORE_IMPLS, IMPLS, "implementation")
    numbers = (1, 16, 64) if args.quick else table.TOKENS
    tokens = sorted({int(word) for word in args.tokens.split(",")}) if args.tokens else list(numbers)

    require_cuda()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    marlin = load_marlin(args.marlin)
    graph_us, replays = (1500.0, 9) if args.quick else (3000.0, 15)
    record = new_record(measured_on(args.commit), marlin)
    record["method"] = {"rotated_bytes": ROTATED_BYTES, "graph_us": graph_us, "replays": replays}
    largest = max(bytes_read(impl, *table.size_of(shape)) for impl in impls for shape in shapes)
    run = Run(
        record=record,
        path=args.json,
        graph_us=graph_us,
        replays=replays,
        marlin=marlin,
        reader=Reader.make(largest, device.index),
        device=device,
    )
    run.tell(f"{record['gpu']}, marlin: {marlin if isinstance(marlin, str) else marlin.version}")
    peak = run.floor(PEAK_BYTES)
    record["read_peak"] = {"bytes": peak.nbytes, "us": round(peak.us, 3), "gb_s": round(peak.gb_s)}
    wanted = [impl for impl in impls if not (impl == table.MARLIN and isinstance(marlin, str))]
    for shape in shapes:
        measure_shape(run, shape, tokens, wanted)
        torch.cuda.empty_cache()
    run.save(complete=True)
    print("\n\n".join([*times_tables(record), goals_table(record)]))
    run.tell("done")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
