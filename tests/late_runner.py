"""A runner without a model whose results can only be read late, and which refuses what an engine must not do.

Import as `from late_runner import LateRunner, new_sequence, solo`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import torch

from vtensors.errors import RequestError, VtensorsError, WeightValueError
from vtensors_engine.drawing import Draw, drawn_token
from vtensors_engine.engine import Engine, Event
from vtensors_engine.outputs import FinishReason
from vtensors_engine.pages import PageAllocator
from vtensors_engine.rows import RowTable
from vtensors_engine.runner import Row
from vtensors_engine.sampling import SamplingParams, largest_token, new_generator, not_finite, sample
from vtensors_engine.sequence import Sequence as EngineSequence
from vtensors_engine.slots import SlotAllocator

VOCABULARY = 24
BAD_PROMPT = 22
"""A prompt that begins with it fails while it is processed."""
BAD_ROW = 23
"""A sequence whose prompt begins with it has no finite logits from `BAD_LENGTH` tokens on."""
BAD_LENGTH = 9


def logits_of(tokens: Sequence[int]) -> torch.Tensor:
    """[VOCABULARY] float32: of all tokens in their order, with ties."""
    dice = random.Random(hash(tuple(tokens)))
    row = torch.tensor([float(dice.randrange(40)) / 10 for _ in range(VOCABULARY)])
    return row * float("nan") if tokens[0] == BAD_ROW and len(tokens) >= BAD_LENGTH else row


def new_sequence(
    prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int] = (), index: int = 0
) -> EngineSequence:
    """A request without text."""
    generator, seed = new_generator(params.seed)
    return EngineSequence(
        index=index,
        prompt_token_ids=tuple(prompt),
        params=params,
        limit=params.max_tokens,
        end_ids=frozenset(end_ids),
        generator=generator,
        seed=seed,
        detokenizer=None,
    )


def greedy(prompt: list[int], count: int, end_ids: tuple[int, ...] = ()) -> EngineSequence:
    """A greedy request."""
    return new_sequence(prompt, SamplingParams(temperature=0.0, max_tokens=count), end_ids)


def made(sequence: EngineSequence) -> list[int]:
    """The ids that it has."""
    return [token.token_id for token in sequence.sampled]


def drained(engine: Engine) -> list[Event]:
    """The events until nothing is left to do."""
    events: list[Event] = []
    for _ in range(10_000):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError("the engine never ends")


def solo(sequence: EngineSequence) -> tuple[list[int], FinishReason]:
    """What becomes of the request where nothing else is: its tokens, and why it ends."""
    tokens, made = list(sequence.prompt_token_ids), list[int]()
    generator, _ = new_generator(sequence.seed)
    if tokens[0] == BAD_PROMPT:
        return made, "error"
    while len(made) < sequence.limit:
        row = logits_of(tokens)
        if bool(row.isnan().any()):
            return made, "error"
        made.append(sample(row, sequence.params, generator).token_id)
        tokens.append(made[-1])
        if made[-1] in sequence.end_ids:
            return made, "stop"
    return made, "length"


class Misuse(AssertionError):
    """The engine did what it promises not to do."""


@attrs.define(kw_only=True, eq=False)
class LateStep:
    """rows: logits of each. Nothing of it is there before `tokens` is called, in the order of the launches."""

    runner: LateRunner
    rows: list[torch.Tensor]
    chosen: list[int]
    read: bool = False

    def tokens(self) -> list[int]:
        unread = self.runner.unread
        if not unread or unread[0] is not self:
            raise Misuse("a step is read twice, or before an older one")
        unread.pop(0)
        self.read = True
        return list(self.chosen)

    def failures(self) -> Mapping[int, VtensorsError]:
        if not self.read:
            raise Misuse("failures come with the tokens")
        return {
            i: not_finite(VOCABULARY, float("nan")) for i, row in enumerate(self.rows) if row.isnan().any()
        }

    def logits(self) -> torch.Tensor:
        if not self.read or self.runner.newest is not self:
            raise Misuse("logits are gone, or not there yet")
        return torch.stack(self.rows)


@attrs.define(kw_only=True, eq=False)
class _Running:
    prompt: tuple[int, ...]
    limit: int
    pages: tuple[int, ...]
    slot: int
    tokens: list[int] = attrs.field(factory=list)
    launched: int = 0
    chosen: int | None = None


class LateRunner:
    """See `Runner`. chunk: tokens of a prompt at a time. fail_after: launches behind which the device is gone."""

    def __init__(
        self,
        *,
        ahead: int = 2,
        draws: bool = True,
        capacity: int = 4,
        pages: int = 9,
        page_size: int = 4,
        chunk: int = 3,
        fail_after: int | None = None,
    ) -> None:
        self.ahead = ahead
        self.draws = draws
        self.capacity = capacity
        self.pages = PageAllocator(pages, page_size)
        self.slots = SlotAllocator(capacity + 1)
        self.rows = RowTable(capacity)
        self.unread: list[LateStep] = []
        self.newest: LateStep | None = None
        self.admitted: list[tuple[int, ...]] = []
        self.launches: list[str] = []
        self.most_unread = 0
        self._chunk = chunk
        self._fail_after = fail_after
        self._sequences: dict[int, _Running] = {}
        self._next_handle = 0

    @property
    def leaks(self) -> int:
        """Sequences, pages and slots that nobody gave back."""
        return len(self._sequences) + self.pages.used_pages + self.slots.used_slots

    def admit(self, prompt: Sequence[int], limit: int) -> int | None:
        pages = self.pages.pages_for(len(prompt) + limit)
        if pages > self.pages.capacity:
            raise RequestError("the request can never fit")
        if self.pages.free_pages < pages or not self.slots.free_slots:
            return None
        if any(len(own.tokens) < len(own.prompt) for own in self._sequences.values()):
            raise Misuse("a sequence is admitted before the prompt of another is done")
        taken, slot = self.pages.allocate(pages), self.slots.allocate()
        assert taken is not None
        assert slot is not None
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Running(prompt=tuple(prompt), limit=limit, pages=taken, slot=slot)
        self.admitted.append(tuple(prompt))
        return handle

    def prefill(self, handle: int, draw: Draw | None = None) -> LateStep | None:
        own = self._sequences[handle]
        if len(own.tokens) >= len(own.prompt):
            raise Misuse("a prompt is processed twice")
        self._launch("prefill")
        own.tokens += own.prompt[len(own.tokens) :][: self._chunk]
        if own.prompt[0] == BAD_PROMPT:
            raise WeightValueError("the prompt is bad")
        return None if len(own.tokens) < len(own.prompt) else self._step([own], [draw])

    def decode(self, rows: Sequence[Row]) -> LateStep:
        ready = {handle for handle, own in self._sequences.items() if own.launched}
        if {row.handle for row in rows} != ready or len(rows) != len(ready) or not rows:
            raise Misuse("a step takes exactly the sequences that run")
        self._launch(f"decode {len(rows)}")
        self.rows.assign([row.handle for row in rows])
        running = [self._sequences[row.handle] for row in rows]
        for row, own in zip(rows, running, strict=True):
            token = own.chosen if row.token is None else row.token
            assert token is not None
            own.tokens.append(token)
        return self._step(running, [row.draw for row in rows])

    def release(self, handle: int) -> None:
        own = self._sequences.pop(handle)
        self.pages.free(own.pages)
        self.slots.free(own.slot)

    def _launch(self, what: str) -> None:
        if len(self.unread) > self.ahead:
            raise Misuse("too many steps are unread")
        self.newest = None
        self.launches.append(what)
        if self._fail_after is not None and len(self.launches) > self._fail_after:
            raise RuntimeError("CUDA error: the device is gone")

    def _step(self, running: Sequence[_Running], draws: Sequence[Draw | None]) -> LateStep:
        if not self.draws and any(draws):
            raise Misuse("a runner that does not draw is given a draw")
        for own in running:
            own.launched += 1
            if own.launched > own.limit:
                raise Misuse("a sequence is launched beyond its limit")
        rows = [logits_of(own.tokens) for own in running]
        # What the device goes on with, whoever reads it.
        chosen = [_chosen(row, draw) for row, draw in zip(rows, draws, strict=True)]
        step = LateStep(runner=self, rows=rows, chosen=chosen)
        for own, token in zip(running, chosen, strict=True):
            own.chosen = token
        self.unread.append(step)
        self.most_unread = max(self.most_unread, len(self.unread))
        self.newest = step
        return step


def _chosen(row: torch.Tensor, draw: Draw | None) -> int:
    if row.isnan().any():
        return 0
    return largest_token(row) if draw is None else drawn_token(row, draw)
