"""Fuzz every parser: `python tests/fuzz/run.py --seconds 60`, with atheris where it is installed.

Without atheris a plain mutation loop over the same targets and seeds takes its place. What is found lies in the
corpus folder (`crash-*`); the exit status is 1 where anything was. Figures go to stdout, one JSON object a target.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

MAX_BYTES = 16384
# One input may take so long and the process so much memory; more is a crash.
INPUT_SECONDS = 10
PROCESS_MEGABYTES = 2048
_FOUND = ("crash-", "timeout-", "oom-")


def main() -> int:
    """Run the targets one after the other, each for its share of the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for all targets together")
    parser.add_argument("--targets", default="", help="names, separated by commas; all by default")
    parser.add_argument("--engine", choices=("auto", "atheris", "python"), default="auto")
    parser.add_argument("--corpus", type=Path, help="folder that keeps inputs; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _atheris_process(options.one, options.corpus, options.seconds, options.seed)
    found = importlib.util.find_spec("atheris") is not None
    if options.engine == "atheris" and not found:
        print("atheris is not installed: skipped (pip install atheris, or --engine python)")
        return 0
    use_atheris = found and options.engine != "python"
    if not use_atheris and options.engine == "auto":
        print("atheris is not installed: a plain mutation loop runs instead")
    from fuzz.targets import TARGETS

    names = [name for name in options.targets.split(",") if name] or list(TARGETS)
    crashes = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = (options.corpus or Path(temporary)) / name
            write_seeds(name, folder)
            run = _run_atheris if use_atheris else _run_loop
            figures = run(name, folder, options.seconds / len(names), options.seed)
            figures["corpus_files"] = len(list(folder.iterdir()))
            figures["corpus_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
            crashes += figures["crashes"]
            print(json.dumps({"target": name, **figures}), flush=True)
    return 1 if crashes else 0


def write_seeds(name: str, folder: Path) -> None:
    """Put the target's seeds into the folder, each under the hash of its content."""
    from fuzz.seeds import seeds

    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def _run_loop(name: str, folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    from fuzz.mutating import mutate
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS

    target, pool = TARGETS[name], seeds(name)
    source = random.Random(seed)
    end, runs, slowest = time.monotonic() + seconds, 0, 0.0
    while time.monotonic() < end:
        data = mutate(source.choice(pool), source)[:MAX_BYTES]
        began = time.perf_counter()
        _keep_going(target, data, folder)
        slowest = max(slowest, time.perf_counter() - began)
        runs += 1
        if len(pool) < 2000 and source.random() < 0.02:
            pool.append(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {
        "engine": "python",
        "executions": runs,
        "crashes": sum(1 for path in folder.iterdir() if path.name.startswith(_FOUND)),
        "slowest_seconds": round(slowest, 3),
        "peak_rss_mb": peak,
    }


def _run_atheris(name: str, folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """One libFuzzer process: exceptions are kept and passed over, a hang or too much memory ends it."""
    done = subprocess.run(
        [
            *(sys.executable, __file__, "--one", name, "--corpus", str(folder)),
            *("--seconds", str(seconds), "--seed", str(seed)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    figures = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stdout))
    crashes = [path for path in folder.iterdir() if path.name.startswith(_FOUND)]
    if done.returncode != 0 or crashes:
        (folder.parent / f"{name}.log").write_text(done.stdout)
    return {
        "engine": "atheris",
        "executions": int(figures.get("number_of_executed_units", 0)),
        "crashes": max(len(crashes), int(done.returncode != 0)),
        "slowest_seconds": int(figures.get("slowest_unit_time_sec", 0)),
        "peak_rss_mb": int(figures.get("peak_rss_mb", 0)),
    }


def _keep_going(target: Callable[[bytes], None], data: bytes, folder: Path) -> None:
    """Run one input; one that raises is stored under where it raised, so that each fault is stored once."""
    try:
        target(data)
    except Exception as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        place = f"{type(problem).__name__}-{Path(frame.filename).stem}-{frame.lineno}"
        path = folder / f"crash-{place}"
        if not path.exists():
            path.write_bytes(data)
            traceback.print_exc()


def _atheris_process(name: str, folder: Path, seconds: float, seed: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["vtensors", "vtensors_plugins", "vtensors_engine"]):
        from fuzz.targets import TARGETS
    from fuzz.mutating import mutate

    def mutator(data: bytes, max_size: int, number: int) -> bytes:
        source = random.Random(number)
        if source.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(data, source)[:max_size]

    atheris.Setup(
        [
            *(sys.argv[0], str(folder), f"-max_total_time={max(1, int(seconds))}", f"-max_len={MAX_BYTES}"),
            *(f"-timeout={INPUT_SECONDS}", f"-rss_limit_mb={PROCESS_MEGABYTES}", f"-seed={seed + 1}"),
            *("-print_final_stats=1", f"-artifact_prefix={folder}/", "-verbosity=1"),
        ],
        lambda data: _keep_going(TARGETS[name], data, folder),
        custom_mutator=mutator,
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
