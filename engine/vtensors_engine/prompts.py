"""Requests put in order: prompts of any accepted form become token ids, and are checked before any work."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from vtensors.counts import counted
from vtensors.errors import RequestError
from vtensors_engine.sampling import SamplingParams
from vtensors_engine.text import Tokenizer, missing_tokenizer

Prompt = str | Sequence[int]

_ACCEPTED = "a string, a list of token ids, or a list of these"
# Sequences of integers that are text to whoever passes them.
_BYTES = (bytes, bytearray, memoryview)


def token_prompts(
    prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> list[tuple[int, ...]]:
    """One tuple of token ids per prompt. A string or a list of integers alone is one prompt.

    Raises RequestError for a prompt that is empty or neither, and for text without a tokenizer.
    """
    if isinstance(prompts, str):
        return [_one(prompts, 0, tokenizer, add_special_tokens)]
    if _is_ids(prompts):
        return [_one(prompts, 0, tokenizer, add_special_tokens)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise RequestError(
            "prompts cannot be used", seen=type(prompts).__name__, accepted=_ACCEPTED, fix=_fix(prompts)
        )
    return [_one(prompt, index, tokenizer, add_special_tokens) for index, prompt in enumerate(prompts)]


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One record per prompt: the same for all, or those given; RequestError where the numbers differ."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(item, SamplingParams) for item in found):
        raise RequestError(
            "params cannot be used",
            seen=type(params).__name__,
            accepted="SamplingParams, or a list with one per prompt",
            fix="pass SamplingParams(...)",
        )
    if len(found) != count:
        raise RequestError(
            "there are not as many params as prompts",
            seen=f"{counted(len(found), 'set of params', 'sets of params')}, {counted(count, 'prompt')}",
            accepted="one for all, or one per prompt",
            fix="give one for all, or as many as there are prompts",
        )
    return found


def check_prompt(ids: Sequence[int], index: int, *, vocab_size: int, max_positions: int) -> None:
    """Raises RequestError for ids the model does not have and for a prompt that leaves no room."""
    bad = next((place for place, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(
            f"prompt {index} holds a token id that the model does not have",
            seen=f"{ids[bad]} at {bad}",
            accepted=f"0 to {vocab_size - 1}",
            fix="encode the text with the model's own tokenizer",
        )
    if len(ids) >= max_positions:
        raise RequestError(
            f"prompt {index} is too long for the model",
            seen=counted(len(ids), "token"),
            accepted=f"at most {max_positions - 1}; prompt and completion share {max_positions} positions",
            fix="shorten it",
        )


def check_params(params: SamplingParams, *, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Raises RequestError for stop ids the model does not have and for stop strings without a tokenizer."""
    bad = [token for token in params.stop_token_ids if token >= vocab_size]
    if bad:
        raise RequestError(
            "stop_token_ids holds an id that the model does not have",
            seen=str(bad[0]),
            accepted=f"0 to {vocab_size - 1}",
            fix="use ids of the model's own tokenizer",
        )
    if params.stop and tokenizer is None:
        raise missing_tokenizer("a stop string")


def _is_ids(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, Sequence) or isinstance(value, _BYTES):
        return False
    return bool(value) and all(_is_id(item) for item in value)


def _is_id(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _one(
    prompt: object, index: int, tokenizer: Tokenizer | None, add_special_tokens: bool
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise missing_tokenizer("text")
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    elif _is_ids(prompt):
        ids = tuple(int(token) for token in prompt)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES) and not prompt:
        ids = ()
    else:
        raise RequestError(
            f"prompt {index} cannot be used", seen=repr(prompt)[:80], accepted=_ACCEPTED, fix=_fix(prompt)
        )
    if not ids:
        raise RequestError(
            f"prompt {index} is empty",
            seen=repr(prompt)[:80],
            accepted="at least one token",
            fix="give it text; a model has nothing to go on from otherwise",
        )
    return ids


def _fix(value: object) -> str | None:
    if isinstance(value, _BYTES):
        return "decode it to text"
    return "pass its .tolist()" if hasattr(value, "tolist") else None
