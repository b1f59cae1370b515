"""`vtensors generate`: complete text with a model, then show speed and what was executed."""

from __future__ import annotations

import json
import sys

import attrs
import click

from vtensors_engine.bundled import bundled_checkpoint
from vtensors_engine.commands.generate_report import (
    executed_table,
    json_report,
    kv_cache_line,
    progress_bar,
    speed_line,
)
from vtensors_engine.devices import DTYPES
from vtensors_engine.llm import LLM
from vtensors_engine.outputs import Completion, StreamPiece, Timing
from vtensors_engine.sampling import SamplingParams
from vtensors_plugins.commands.lock_option import lock_option

# Used where neither a model nor the option is given, so that a first run shows the same text everywhere.
DEMO_PROMPT = "In the beginning"
DEMO_TEMPERATURE = 0.8
DEMO_SEED = 1611

DEFAULT_MAX_TOKENS = 128


@attrs.frozen(kw_only=True)
class Work:
    """What the command line asks for, resolved. prompts: token ids.
    shown_prompt: printed in front of the completion."""

    prompts: list[list[int]]
    params: SamplingParams
    as_json: bool
    shown_prompt: str = ""


@click.command(name="generate")
@click.argument("model", required=False)
@click.option("--prompt", "-p", "prompts", multiple=True, help="Text to complete; repeatable.")
@click.option("--chat", is_flag=True, help="Take each prompt as a user's message, through the chat template.")
@click.option(
    "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True, help="Most tokens per prompt."
)
@click.option(
    "--temperature",
    type=float,
    help=f"0 is greedy.  [default: 1; {DEMO_TEMPERATURE} without a model]",
)
@click.option("--top-k", type=int, default=0, help="Only the k most probable tokens; 0 is off.")
@click.option("--top-p", type=float, default=1.0, help="Only tokens that together reach this probability.")
@click.option("--min-p", type=float, default=0.0, help="Only tokens this probable relative to the best one.")
@click.option("--seed", type=int, help=f"[default: random; {DEMO_SEED} without a model]")
@click.option("--stop", "stops", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the model's end tokens.")
@click.option("--device", help="cpu, cuda or cuda:<index>.  [default: cuda if there is one, else cpu]")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Computed in.  [default: float32 on a CPU, the checkpoint's own on CUDA]",
)
@click.option(
    "--activations", type=click.Choice(["16bit", "declared", "fp4"]), help="Precision of activations."
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", help="fp8 rounds K and V to E4M3."
)
@click.option("--revision", help="Branch, tag or commit of a repository.")
@lock_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(
    model: str | None,
    prompts: tuple[str, ...],
    chat: bool,
    max_tokens: int,
    temperature: float | None,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stops: tuple[str, ...],
    ignore_eos: bool,
    device: str | None,
    dtype: str | None,
    activations: str | None,
    kv_cache_dtype: str,
    revision: str | None,
    lock: str | None,
    as_json: bool,
) -> None:
    """Complete text with MODEL: a directory or repo[@revision]. Without one, the bundled model is used.

    Without --prompt the demo's opening words are completed.
    """
    demo = model is None
    for option, value in (("--revision", revision), ("--lock", lock)):
        if demo and value is not None:
            raise click.UsageError(f"{option} needs a MODEL.")
    if temperature is None:
        temperature = DEMO_TEMPERATURE if demo else 1.0
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=DEMO_SEED if demo and seed is None else seed,
        stop=stops,
        ignore_eos=ignore_eos,
    )
    llm = LLM(
        bundled_checkpoint() if model is None else model,
        revision=revision,
        device=device,
        dtype=dtype,
        activations=activations,
        kv_cache_dtype=kv_cache_dtype,
        lock=lock,
    )
    texts = prompts or (DEMO_PROMPT,)
    ids = [
        llm.chat_prompt([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        for text in texts
    ]
    shown = DEMO_PROMPT if not prompts and not chat else ""
    _run(llm, Work(prompts=ids, params=params, as_json=as_json, shown_prompt=shown))


def _run(llm: LLM, work: Work) -> None:
    timing = Timing()
    if work.as_json:
        completions = _collect(llm, work, timing)
        click.echo(json.dumps(json_report(llm.model, completions, timing)))
        return
    if len(work.prompts) == 1:
        _stream(llm, work, timing)
    else:
        for index, completion in enumerate(_collect(llm, work, timing)):
            click.echo(f"--- prompt {index} ({completion.finish_reason})")
            click.echo(completion.text)
    click.echo()
    click.echo(speed_line(timing))
    click.echo()
    executed_table(llm.model.executed_summary())
    if line := kv_cache_line(llm.model):
        click.echo(f"\n{line}")


def _stream(llm: LLM, work: Work, timing: Timing) -> None:
    click.echo(work.shown_prompt, nl=False)
    for piece in llm.stream(work.prompts[0], work.params, timing=timing):
        click.echo(piece.text, nl=False)
        sys.stdout.flush()
    click.echo()


def _collect(llm: LLM, work: Work, timing: Timing) -> list[Completion]:
    if not sys.stderr.isatty():
        return llm.generate(work.prompts, work.params, timing=timing)
    total = len(work.prompts) * work.params.max_tokens
    with progress_bar("generating", total) as advance:

        def on_piece(_index: int, piece: StreamPiece) -> None:
            advance(len(piece.token_ids))

        return llm.generate(work.prompts, work.params, on_piece=on_piece, timing=timing)
