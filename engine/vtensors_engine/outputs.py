"""What comes back: completions, and the pieces of one that is streamed."""

from __future__ import annotations

from typing import Literal

import attrs

from vtensors_engine.sampling import SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]


@attrs.frozen(kw_only=True)
class Completion:
    """One finished sequence.

    text: of token_ids, without special tokens, the token that ended it, or a stop string and what follows;
        None where the checkpoint has no tokenizer.
    token_ids: every generated id, the one that ended it included.
    logprobs: one entry per token, None where none were asked for.
    finish_reason: `stop` an end id or stop string, `length` max_tokens or the model's positions, `abort` it was
        cancelled, `error` it failed; then the rest is what it had until there.
    seed: that its generator was started with; the same seed and parameters give the same tokens again.
    error: the message of what failed, None where nothing did.
    """

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    logprobs: tuple[SampledToken, ...] | None = None
    error: str | None = None


@attrs.frozen(kw_only=True, slots=True)
class StreamPiece:
    """What one token added. text: may be empty; the pieces joined are the completion's text ("" without a
    tokenizer). finish_reason: in the last piece alone."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@attrs.define
class Timing:
    """Seconds of one call, filled while it runs: prompts, and the steps behind each first token, apart.

    prefill_tokens: prompt tokens. decode_tokens: tokens that steps produced, so not each sequence's first.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def prefill_rate(self) -> float | None:
        """Prompt tokens per second, None where there were none."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    def decode_rate(self) -> float | None:
        """Generated tokens per second over all sequences together, None where there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else None
