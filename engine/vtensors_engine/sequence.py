"""One sequence on its way: its prompt, what was generated, and why it ended."""

from __future__ import annotations

import attrs
import torch

from vtensors.errors import VtensorsError
from vtensors_engine.drawing import Draw, new_draw
from vtensors_engine.outputs import Completion, FinishReason, StreamPiece
from vtensors_engine.sampling import SampledToken, SamplingParams
from vtensors_engine.stops import StopBuffer
from vtensors_engine.text import Detokenizer


@attrs.define(kw_only=True, eq=False)
class Sequence:
    """Owner of everything that changes while one completion is made.

    index: place of the prompt in the request. limit: most tokens to generate, max_tokens cut to the model's
    positions. end_ids: ids that end it. seed: that `generator` was started with.
    handle: the runner's, None before it is admitted and after release. launched: tokens that launched steps will
    give it. failure: why it ended with `error`.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    limit: int
    end_ids: frozenset[int]
    generator: torch.Generator
    seed: int
    detokenizer: Detokenizer | None
    handle: int | None = None
    launched: int = 0
    sampled: list[SampledToken] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    failure: VtensorsError | None = None
    _texts: list[str] = attrs.field(factory=list, init=False)
    _stops: StopBuffer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._stops = StopBuffer(self.params.stop)

    @property
    def reported(self) -> bool:
        """Whether log probabilities are told, which need the logits on the host."""
        return self.params.logprobs is not None

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn; else the largest logit is the choice."""
        return self.params.temperature != 0

    def next_draw(self) -> Draw:
        """The draw of the next token, each of which takes one number from the generator."""
        return new_draw(self.params, self.generator)

    @property
    def last_token(self) -> int:
        """The token that the next step continues from."""
        return self.sampled[-1].token_id

    def append(self, token: SampledToken) -> StreamPiece:
        """Take the next token, decide whether it is the last, and return what it adds."""
        self.sampled.append(token)
        text = ""
        if token.token_id in self.end_ids:
            self.finish_reason = "stop"
        elif self.detokenizer is not None:
            text = self._stops.push(self.detokenizer.push(token.token_id))
        if self.finish_reason is None and self._stops.hit is None and len(self.sampled) >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        if self._stops.hit is not None:
            # Also when the last characters that were kept back completed it.
            self.finish_reason = "stop"
        self._texts.append(text)
        return StreamPiece(text=text, token_ids=(token.token_id,), finish_reason=self.finish_reason)

    def abort(self) -> None:
        """End it where it is; nothing happens to one that has ended."""
        if self.finish_reason is None:
            self._texts.append(self._rest())
            self.finish_reason = "abort"

    def fail(self, failure: VtensorsError) -> StreamPiece:
        """End it with an error, and return the text that was held back."""
        self.failure, self.finish_reason = failure, "error"
        self._texts.append(self._rest())
        return StreamPiece(text=self._texts[-1], token_ids=(), finish_reason="error")

    def completion(self) -> Completion:
        """The result; `abort` where the sequence has not ended."""
        return Completion(
            text=None if self.detokenizer is None else "".join(self._texts),
            token_ids=[token.token_id for token in self.sampled],
            prompt_token_ids=list(self.prompt_token_ids),
            finish_reason=self.finish_reason or "abort",
            seed=self.seed,
            logprobs=None if self.params.logprobs is None else tuple(self.sampled),
            error=None if self.failure is None else str(self.failure),
        )

    def _rest(self) -> str:
        if self.detokenizer is None:
            return ""
        text = self._stops.push(self.detokenizer.flush())
        return text + self._stops.flush()
