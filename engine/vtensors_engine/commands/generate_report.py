"""What `vtensors generate` prints beside the text: speed, the executed table, JSON, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress

from vtensors.counts import counted
from vtensors_engine.llm import LoadedModel
from vtensors_engine.outputs import Completion, Timing
from vtensors_plugins.commands.console import CommandConsole
from vtensors_plugins.commands.schemes_table import schemes_table


def speed_line(timing: Timing) -> str:
    """One line: tokens per second of prompts and of generated tokens."""
    prefill, decode = timing.prefill_rate(), timing.decode_rate()
    parts = [
        ""
        if prefill is None
        else f"prefill {prefill:,.1f} tokens/s ({counted(timing.prefill_tokens, 'token')})",
        "" if decode is None else f"decode {decode:,.1f} tokens/s ({counted(timing.decode_tokens, 'token')})",
    ]
    return ", ".join(part for part in parts if part)


def executed_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print declared and executed precision per group of modules to stdout, as `inspect` does."""
    console = CommandConsole(file=sys.stdout, markup=False, highlight=False)
    console.print(schemes_table(rows, console.width), soft_wrap=True)


def kv_cache_precision(model: LoadedModel) -> dict[str, str | None]:
    """What the checkpoint declares for the KV cache (None: nothing) and what it is kept in, as in `inspect`."""
    declared = getattr(model.checkpoint, "kv_cache", None)
    return {
        "declared": None if declared is None else str(declared.algorithm),
        "executed": str(getattr(model, "kv_cache", "16bit")),
    }


def kv_cache_line(model: LoadedModel) -> str:
    """Declared and executed precision of the KV cache; empty where nobody speaks of it."""
    found = kv_cache_precision(model)
    if found["declared"] is None and found["executed"] == "16bit":
        return ""
    return f"KV cache  declared {found['declared'] or '16bit'}, executed {found['executed']}"


def json_report(model: LoadedModel, completions: Sequence[Completion], timing: Timing) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "completions": [
            {
                "prompt_token_ids": list(completion.prompt_token_ids),
                "token_ids": list(completion.token_ids),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "seed": completion.seed,
            }
            for completion in completions
        ],
        "model": {
            "provenance": model.checkpoint.provenance.to_json(),
            "architecture": _architecture(model),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_positions": model.max_positions,
        },
        "executed": [dict(row) for row in model.executed_summary()],
        "kv_cache": kv_cache_precision(model),
        "timing": {
            "prefill_tokens": timing.prefill_tokens,
            "prefill_seconds": timing.prefill_seconds,
            "decode_tokens": timing.decode_tokens,
            "decode_seconds": timing.decode_seconds,
        },
    }


@contextmanager
def progress_bar(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block runs; call what it gives with the number of tokens done since."""
    with Progress(console=CommandConsole(stderr=True), transient=True) as progress:
        entry = progress.add_task(task, total=total)
        yield lambda count: progress.advance(entry, count)


def _architecture(model: LoadedModel) -> str | None:
    config = model.checkpoint.snapshot.read_json("config.json") or {}
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(config["model_type"]) if "model_type" in config else None
