"""Choosing the next token: `SamplingParams` says how, `sample` does it for one row of logits."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import attrs
import torch

from vtensors.errors import RequestError, VtensorsError
from vtensors_engine.drawing import drawn_token, leading, new_draw

MAX_SEED = 2**63 - 1

# Logits of a row from which sampling takes longer than handing it to a thread.
_WORTH_A_THREAD = 1 << 14

_Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _as_int(value: Any) -> Any:
    # numpy's integers become Python's; a bool stays one, which the check refuses.
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _as_float(value: Any) -> Any:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        # No float; refused as it was given.
        return value


def _as_strings(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) else value


def _as_ids(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(_as_int(item) for item in value) if isinstance(value, Iterable) else value


def _check(accepted: str, fits: Callable[[Any], bool]) -> _Check:
    def check(_params: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not fits(value):
            raise RequestError(
                f"the sampling parameter {attribute.name} cannot be used",
                seen=f"{attribute.name}={value!r}",
                accepted=accepted,
            )

    return check


def _is_int(value: Any, low: int, high: int | None = None) -> bool:
    return type(value) is int and value >= low and (high is None or value <= high)


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one completion are chosen, and when it ends.

    max_tokens: most tokens to generate.
    temperature: logits are divided by it; 0 is greedy: the largest logit, the lowest id of equal ones.
    top_k: only the k most probable tokens, the lowest ids of equal ones; 0 is off.
    top_p: only the most probable tokens that together reach this probability; 1 is off.
    min_p: only tokens at least this fraction as probable as the most probable one; 0 is off.
    seed: starts the generator of each sequence; None draws a seed, which the completion reports.
    stop: text that ends the completion; it and what follows are not part of the text.
    stop_token_ids: ids that end the completion beside the model's own end ids.
    ignore_eos: go on behind the model's own end ids.
    logprobs: how many of the most probable tokens to report per step; 0 is the chosen one alone, None is
        nothing.

    Raises RequestError naming the parameter, its value and what is accepted.
    """

    max_tokens: int = attrs.field(
        default=16, converter=_as_int, validator=_check("an integer >= 1", lambda v: _is_int(v, 1))
    )
    temperature: float = attrs.field(
        default=1.0,
        converter=_as_float,
        validator=_check("a number >= 0 (0 is greedy)", lambda v: _is_number(v) and v >= 0),
    )
    top_k: int = attrs.field(
        default=0, converter=_as_int, validator=_check("an integer >= 0 (0 is off)", lambda v: _is_int(v, 0))
    )
    top_p: float = attrs.field(
        default=1.0,
        converter=_as_float,
        validator=_check("a number above 0, at most 1 (1 is off)", lambda v: _is_number(v) and 0 < v <= 1),
    )
    min_p: float = attrs.field(
        default=0.0,
        converter=_as_float,
        validator=_check("a number from 0 to 1 (0 is off)", lambda v: _is_number(v) and 0 <= v <= 1),
    )
    seed: int | None = attrs.field(
        default=None,
        converter=_as_int,
        validator=_check(
            f"None or an integer from 0 to {MAX_SEED}", lambda v: v is None or _is_int(v, 0, MAX_SEED)
        ),
    )
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=_as_strings,
        validator=_check(
            "a string or a list of strings, none of them empty",
            lambda v: isinstance(v, tuple) and all(isinstance(text, str) and text for text in v),
        ),
    )
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=_as_ids,
        validator=_check(
            "a list of token ids, integers >= 0",
            lambda v: isinstance(v, tuple) and all(_is_int(token, 0) for token in v),
        ),
    )
    ignore_eos: bool = attrs.field(
        default=False, validator=_check("True or False", lambda v: isinstance(v, bool))
    )
    logprobs: int | None = attrs.field(
        default=None,
        converter=_as_int,
        validator=_check("None or an integer >= 0", lambda v: v is None or _is_int(v, 0)),
    )


@attrs.frozen(kw_only=True, slots=True)
class SampledToken:
    """A token and, where asked for, natural-log probabilities under the model's own distribution.

    logprob: of the token itself.
    top_logprobs: (token id, logprob), most probable first, lowest id of equal ones.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def new_generator(seed: int | None) -> tuple[torch.Generator, int]:
    """A generator for one sequence and the seed it was started with (drawn at random where None).

    It lives on the CPU whatever the model's device, so that a seed means the same tokens everywhere.
    """
    started = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
    generator = torch.Generator(device="cpu")
    generator.manual_seed(started)
    return generator, started


def largest_token(logits: torch.Tensor) -> int:
    """The greedy choice of logits [V]: the index of the largest, the lowest of equal ones.

    Raises VtensorsError when no logit is largest: NaN, +inf, or all of them -inf.
    """
    return int((logits == _finite_largest(logits)).nonzero()[0, 0])


def not_finite(count: int, largest: float) -> VtensorsError:
    """The error for logits without a largest one. count: of the row."""
    return VtensorsError(
        "the model's logits are not finite",
        seen=f"largest of {count}: {largest}",
        fix="run with dtype float32, check the checkpoint with `vtensors verify`, and let VT_DEBUG_NAN=1 name "
        "the first layer whose output is not finite",
    )


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> SampledToken:
    """The next token of one sequence.

    logits: [V], in the model's dtype, on any device; greedy compares them as they are, everything else is float32.
    generator: on the CPU; one number is drawn from it per token, none when greedy.

    Order: temperature, top_k, top_p, min_p; each works on what the one before has left, renormalized.
    Log probabilities are `log_softmax` of the logits as they came: before temperature and filters.
    Raises VtensorsError when no logit is largest: NaN, +inf, or all of them -inf.
    """
    if logits.ndim != 1:
        raise VtensorsError(
            "logits of one row are needed", seen=f"shape {list(logits.shape)}", accepted="[V]"
        )
    # On the CPU whatever the model's device, so that a seed means the same tokens everywhere.
    logits = logits.to("cpu")
    if params.temperature == 0:
        token = largest_token(logits)
    else:
        _finite_largest(logits)
        token = drawn_token(logits, new_draw(params, generator))
    if params.logprobs is None:
        return SampledToken(token_id=token)
    return _with_logprobs(logits, token, params.logprobs)


def sample_rows(
    logits: torch.Tensor, wanted: Sequence[tuple[int, SamplingParams, torch.Generator]], pool: Executor
) -> list[SampledToken | VtensorsError]:
    """`sample` of some rows, side by side where there are several of a large vocabulary, with the same results.

    logits: [B, V]. wanted: (row, params, generator) each. A row that has no token gives its error.
    """
    # One copy for all rows.
    logits = logits.to("cpu")

    def one(own: tuple[int, SamplingParams, torch.Generator]) -> SampledToken | VtensorsError:
        row, params, generator = own
        try:
            return sample(logits[row], params, generator)
        except VtensorsError as cause:
            return cause

    apart = len(wanted) > 1 and logits.shape[1] >= _WORTH_A_THREAD
    return list(pool.map(one, wanted) if apart else map(one, wanted))


def _finite_largest(logits: torch.Tensor) -> torch.Tensor:
    largest = logits.max()
    if not torch.isfinite(largest):
        raise not_finite(logits.numel(), float(largest))
    return largest


def _with_logprobs(logits: torch.Tensor, token: int, count: int) -> SampledToken:
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        floor = torch.topk(logprobs, min(count, logprobs.numel())).values[-1]
        ordered, order = leading(logprobs, floor)
        top = tuple(zip(order[:count].tolist(), ordered[:count].tolist(), strict=True))
    return SampledToken(token_id=token, logprob=float(logprobs[token]), top_logprobs=top)
