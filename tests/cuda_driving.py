"""Sequences driven through a runner step by step, for tests that compare tokens and logits bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from vtensors_engine.cuda.runner import CudaRunner
from vtensors_engine.runner import Row, Step


@attrs.frozen(kw_only=True)
class Driven:
    """What one sequence gave. logits: [V] each on the CPU, behind the prompt and behind every token."""

    tokens: list[int]
    logits: list[Tensor]

    def same_as(self, other: Driven) -> bool:
        """Whether tokens and the bits of all logits agree."""
        return self.tokens == other.tokens and all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(self.logits, other.logits, strict=True)
        )


def run_alone(runner: CudaRunner, prompt: Sequence[int], count: int, forced: Sequence[int] = ()) -> Driven:
    """count tokens behind the prompt. forced: tokens taken instead of those chosen, as far as they go."""
    (driven,) = run_together(runner, [prompt], count, forced={0: forced})
    return driven


def run_together(
    runner: CudaRunner,
    prompts: Sequence[Sequence[int]],
    count: int,
    forced: Mapping[int, Sequence[int]] | None = None,
) -> list[Driven]:
    """count tokens behind each prompt; all are started, then decoded together."""
    handles, tokens = [], list[list[int]]()
    logits = list[list[Tensor]]()
    for prompt in prompts:
        handle = runner.admit(tuple(prompt), count)
        assert handle is not None
        handles.append(handle)
        step = prefilled(runner, handle)
        tokens.append(step.tokens())
        logits.append([step.logits()[0].cpu()])
    for number in range(count - 1):
        given = [_forced(forced, index, number) for index in range(len(handles))]
        for index, token in enumerate(given):
            if token is not None:
                tokens[index][-1] = token
        step = runner.decode([Row(handle, token) for handle, token in zip(handles, given, strict=True)])
        chosen, rows = step.tokens(), step.logits().cpu()
        for index in range(len(handles)):
            tokens[index].append(chosen[index])
            logits[index].append(rows[index])
    for handle in handles:
        runner.release(handle)
    return [Driven(tokens=t, logits=rows) for t, rows in zip(tokens, logits, strict=True)]


def prefilled(runner: CudaRunner, handle: int) -> Step:
    """The whole prompt, chunk by chunk: the step behind its last token."""
    step = runner.prefill(handle)
    while step is None:
        step = runner.prefill(handle)
    return step


def _forced(forced: Mapping[int, Sequence[int]] | None, index: int, number: int) -> int | None:
    own = (forced or {}).get(index, ())
    return own[number] if number < len(own) else None
