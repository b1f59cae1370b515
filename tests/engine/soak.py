"""Random arrivals, lengths, cancellations and sampling settings over one engine for some minutes; run by hand on a GPU.

    python tests/engine/soak.py PATH --seconds 240 --json soak.json

PATH: a checkpoint directory, or `bundled`. First every prompt of a pool is answered greedily alone. Then the pool's
prompts arrive in waves, with random limits and end tokens; some are sampled, some want logprobs, some can never fit,
some are cancelled. Every greedy answer must be the solo answer up to where it ends, whenever nothing runs no page and
no slot may be in use, and in the end no memory may be missing. The first wrong thing ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import vtensors
from vtensors_engine.bundled import bundled_checkpoint
from vtensors_engine.engine import Engine
from vtensors_engine.sampling import SamplingParams, new_generator
from vtensors_engine.sequence import Sequence as EngineSequence

LONGEST_ANSWER = 160
# More tokens than any cache has.
IMPOSSIBLE = 1 << 40
_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SETTINGS: tuple[dict[str, Any], ...] = (
    _GREEDY,
    _GREEDY,
    _GREEDY,
    {**_GREEDY, "logprobs": 2},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
)
MEBI = 1 << 20


class Wrong(SystemExit):
    """What must not happen has happened."""


@attrs.frozen(kw_only=True)
class Wave:
    """Requests of some seconds. most: in the engine at a time. arrivals: a step. settings: to choose from.

    Only where all are greedy steps are launched ahead of what is read.
    """

    name: str
    most: int
    arrivals: float
    settings: tuple[dict[str, Any], ...]


def waves(rows: int) -> tuple[Wave, ...]:
    """rows: sequences that the runner takes at a time."""
    return (
        Wave(name="greedy crowd", most=2 * rows, arrivals=0.7, settings=(_GREEDY,)),
        Wave(name="mixed crowd", most=2 * rows, arrivals=0.7, settings=_SETTINGS),
        Wave(name="few greedy", most=3, arrivals=0.1, settings=(_GREEDY,)),
        Wave(name="few", most=3, arrivals=0.1, settings=_SETTINGS),
    )


@attrs.define(kw_only=True)
class Soak:
    """Traffic over an engine, and what has been seen of it.

    pool: prompts. answers: the solo answer of each, as long as the longest. held: pages and slots in use.
    clock: seconds. running: what is in the engine -> its place in the pool.
    """

    engine: Engine
    pool: Sequence[tuple[int, ...]]
    answers: Sequence[Sequence[int]]
    waves: Sequence[Wave]
    held: Callable[[], int]
    dice: random.Random
    clock: Callable[[], float] = time.monotonic
    running: dict[EngineSequence, int] = attrs.field(factory=dict)
    counts: Counter[str] = attrs.field(factory=Counter)
    most_running: int = 0

    def run(self, seconds: float) -> None:
        """Wave after wave for so long, until everything has ended. Raises Wrong."""
        end, until, wave = self.clock() + seconds, 0.0, self.waves[0]
        while self.clock() < end:
            if self.clock() >= until:
                wave = self.dice.choice(self.waves)
                until = self.clock() + self.dice.uniform(1, 6)
                self.counts[f"waves: {wave.name}"] += 1
            if len(self.running) < wave.most and self.dice.random() < wave.arrivals:
                self.arrive(wave)
            if self.running and self.dice.random() < 0.02:
                self.cancel(self.dice.choice(list(self.running)))
            self.step()
        while self.engine.busy:
            self.step()
        if self.running:
            raise Wrong(f"{len(self.running)} requests never ended")

    def arrive(self, wave: Wave) -> None:
        """One more request."""
        place = self.dice.randrange(len(self.pool))
        answer = self.answers[place]
        limit = IMPOSSIBLE if self.dice.random() < 0.01 else self.dice.randint(1, len(answer))
        # Tokens of the answer, so that some requests end by them, which is seen when steps behind are under way.
        ends = [self.dice.choice(answer)] if self.dice.random() < 0.4 else []
        settings = {**self.dice.choice(wave.settings), "seed": self.dice.randrange(1 << 30)}
        sequence = new_sequence(self.pool[place], limit, settings, ends)
        self.running[sequence] = place
        self.counts["arrived"] += 1
        self.engine.add(sequence)

    def cancel(self, sequence: EngineSequence) -> None:
        """One request less, wherever it is."""
        self.engine.cancel(sequence)
        self._ended(sequence)

    def step(self) -> None:
        """One step of the engine; answers that ended are compared."""
        for event in self.engine.step():
            self.counts["tokens"] += len(event.piece.token_ids)
            if event.sequence not in self.running:
                raise Wrong(f"a request that has ended has an event: {event.piece}")
            if event.piece.finish_reason is not None:
                self._ended(event.sequence)
        self.counts["steps"] += 1
        self.most_running = max(self.most_running, sum(s.handle is not None for s in self.running))
        if not self.engine.busy:
            self.counts["times idle"] += 1
            if self.held():
                raise Wrong(f"nothing runs, and {self.held()} pages and slots are in use")

    def _ended(self, sequence: EngineSequence) -> None:
        place = self.running.pop(sequence)
        self.counts[f"ended: {sequence.finish_reason}"] += 1
        ours = [token.token_id for token in sequence.sampled]
        told = (
            f"prompt {place} of {len(self.pool[place])} tokens, limit {sequence.limit}, {sequence.params}, "
            f"ends {sorted(sequence.end_ids)}: {sequence.finish_reason} behind {len(ours)} tokens"
        )
        if sequence.limit == IMPOSSIBLE:
            if ours or sequence.finish_reason not in ("error", "abort"):
                raise Wrong(f"{told}, although it can never fit")
            return
        if sequence.failure is not None:
            raise Wrong(f"{told}: {sequence.failure}")
        cut = next((n for n, token in enumerate(ours, 1) if token in sequence.end_ids), None)
        wanted = "length" if cut is None else "stop"
        if sequence.finish_reason != "abort":
            if sequence.finish_reason != wanted or len(ours) != (cut or sequence.limit):
                raise Wrong(f"{told}, not {wanted} behind {cut or sequence.limit}")
        elif cut is not None or len(ours) >= sequence.limit:
            raise Wrong(f"{told}, although it had ended")
        if sequence.params.temperature == 0:
            self.counts["compared"] += 1
            alone = list(self.answers[place][: len(ours)])
            if ours != alone:
                first = next(n for n, (a, b) in enumerate(zip(ours, alone, strict=True)) if a != b)
                raise Wrong(f"{told}; token {first} is {ours[first]}, alone {alone[first]}")


def new_sequence(
    prompt: tuple[int, ...], limit: int, settings: dict[str, Any], end_ids: Sequence[int] = ()
) -> EngineSequence:
    """A request without text, of `limit` tokens unless an end id comes before."""
    params = SamplingParams(**settings, max_tokens=limit, ignore_eos=True)
    generator, seed = new_generator(params.seed)
    return EngineSequence(
        index=0,
        prompt_token_ids=prompt,
        params=params,
        limit=limit,
        end_ids=frozenset(end_ids),
        generator=generator,
        seed=seed,
        detokenizer=None,
    )


def solo(engine: Engine, prompt: tuple[int, ...], tokens: int = LONGEST_ANSWER) -> list[int]:
    """The greedy answer of one prompt alone. Raises what it fails with."""
    sequence = new_sequence(prompt, tokens, _GREEDY)
    engine.add(sequence)
    while engine.busy:
        engine.step()
    if sequence.failure is not None:
        raise sequence.failure
    return [token.token_id for token in sequence.sampled]


def memory() -> dict[str, int]:
    """Bytes now: of this process, of torch's tensors on the GPU, and of the GPU beside what torch has reserved."""
    torch.cuda.synchronize()
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    free, total = torch.cuda.mem_get_info()
    return {
        "host": int(found[1]) * 1024 if found else 0,
        "tensors": torch.cuda.memory_allocated(),
        "beside": total - free - torch.cuda.memory_reserved(),
    }


def main() -> None:
    """Run, print what was seen, exit with an error where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--pool", type=int, default=48)
    parser.add_argument("--longest-prompt", type=int, default=700)
    parser.add_argument("--chunk", type=int, default=256, help="Tokens of a prompt at a time.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Imported here: the traffic can be tested where nothing of CUDA is.
    from vtensors_engine.cuda.runner import CudaRunner

    dice = random.Random(args.seed)
    path = bundled_checkpoint() if args.path == "bundled" else args.path
    model = vtensors.load_model(path, device="cuda", dtype="bfloat16")
    longest = min(args.longest_prompt, model.max_positions - LONGEST_ANSWER)
    # Fewer pages than the longest requests of all rows together, so that some have to wait.
    tokens = args.sequences * (longest + LONGEST_ANSWER) // 2
    runner = CudaRunner(model, max_sequences=args.sequences, max_tokens=tokens, chunk=args.chunk)
    runner.warm_up()
    lengths = [min(longest, int(2 ** dice.uniform(0, 11))) for _ in range(args.pool)]
    pool = [tuple(dice.randrange(model.vocab_size) for _ in range(length)) for length in lengths]
    engine, pages, slots = Engine(runner), runner.caches.pages, runner.caches.slots
    started = time.monotonic()
    answers = [solo(engine, prompt) for prompt in pool]
    print(f"{len(pool)} answers alone in {time.monotonic() - started:.1f} s", flush=True)
    soak = Soak(
        engine=engine,
        pool=pool,
        answers=answers,
        waves=waves(args.sequences),
        held=lambda: pages.used_pages + slots.used_slots,
        dice=dice,
    )
    # What is loaded and kept at first use has been by then.
    soak.run(args.seconds / 6)
    before = memory()
    soak.run(args.seconds * 5 / 6)
    after = memory()
    more = {name: after[name] - before[name] for name in before}
    record = {
        "model": Path(args.path).name,
        "device": torch.cuda.get_device_name(),
        "seconds": args.seconds,
        **dict(sorted(soak.counts.items())),
        "most_running": soak.most_running,
        "most_tokens": runner.max_tokens,
        "pages_and_slots_missing": pages.used_pages + slots.used_slots,
        **{f"bytes_more_{name}": count for name, count in more.items()},
    }
    print(json.dumps(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if record["pages_and_slots_missing"] or more["tensors"] > MEBI or max(more.values()) > 128 * MEBI:
        raise Wrong("something is missing")
    if not soak.counts["compared"] or soak.most_running < args.sequences:
        raise Wrong(f"{soak.counts['compared']} answers compared, {soak.most_running} at a time")


if __name__ == "__main__":
    main()
