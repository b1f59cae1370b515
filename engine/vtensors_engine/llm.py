"""`LLM`: prompts in, completions out. The step loop is `LLM._steps`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vtensors.errors import RequestError
from vtensors_engine.chat import ChatTemplate, Message, open_chat_template
from vtensors_engine.devices import resolve_device, resolve_dtype
from vtensors_engine.outputs import Completion, StreamPiece, Timing
from vtensors_engine.prompts import Prompt, check_params, check_prompt, params_per_prompt, token_prompts
from vtensors_engine.runner import ReferenceRunner, Runner, SteppedModel
from vtensors_engine.sampling import SamplingParams, new_generator, sample
from vtensors_engine.sequence import Sequence
from vtensors_engine.text import (
    Detokenizer,
    SideFiles,
    Tokenizer,
    end_token_ids,
    missing_tokenizer,
    open_tokenizer,
)

if TYPE_CHECKING:
    from vtensors.lock import Lock
    from vtensors.provenance import Provenance

OnPiece = Callable[[int, StreamPiece], None]

_log = logging.getLogger("vtensors")


class OpenCheckpoint(Protocol):
    """What is left of the checkpoint once its model is loaded."""

    @property
    def snapshot(self) -> SideFiles: ...
    @property
    def provenance(self) -> Provenance: ...


class LoadedModel(SteppedModel, Protocol):
    """What `load_model` returns. config: of config.json; executed_summary: rows as `inspect --json` has them
    under `schemes`."""

    @property
    def checkpoint(self) -> OpenCheckpoint: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    def executed_summary(self) -> list[dict[str, Any]]: ...


class LLM:
    """A model that completes text.

    model: a directory, `repo[@revision]`, or a model that `load_model` returned.
    device: `cpu`, `cuda` or `cuda:<index>`; None is CUDA where torch has a device, else the CPU.
    dtype: what it computes in; None is float32 on the CPU, and the checkpoint's own dtype on CUDA.
    activations, kv_cache_dtype, lock: as `load_model` takes them.
    max_sequences: most prompts in work at the same time; no result depends on it.

    Raises what `load_model` raises, and RequestError for arguments that cannot be served.
    """

    def __init__(
        self,
        model: str | PathLike[str] | LoadedModel,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        activations: str | None = None,
        *,
        revision: str | None = None,
        kv_cache_dtype: str = "auto",
        max_sequences: int = 32,
        lock: Lock | str | PathLike[str] | None = None,
    ) -> None:
        if type(max_sequences) is not int or max_sequences < 1:
            raise RequestError(
                "max_sequences cannot be used", seen=repr(max_sequences), accepted="an integer >= 1"
            )
        if isinstance(model, str | PathLike):
            # Imported here: an LLM over a loaded model needs nothing of the loader.
            from vtensors_engine.loading import load_model

            where = resolve_device(device)
            self.model: LoadedModel = load_model(
                model,
                revision=revision,
                device=where,
                dtype=resolve_dtype(dtype, where),
                activations=activations,
                kv_cache_dtype=kv_cache_dtype,
                lock=lock,
            )
        elif all(value is None for value in (revision, device, dtype, activations, lock)):
            self.model = model
        else:
            raise RequestError(
                "a loaded model keeps what it was loaded with",
                seen="a loaded model and one of revision, device, dtype, activations, lock",
                accepted="either a path and these arguments, or the model alone",
            )
        files = self.model.checkpoint.snapshot
        self._tokenizer = open_tokenizer(files)
        self.end_token_ids = end_token_ids(files, self._tokenizer)
        self._runner: Runner = ReferenceRunner(self.model)
        if self.model.device.type != "cpu":
            _log.warning("%s: the reference runner is used; it is exact, not fast", self.model.device)
        self._max_running = min(max_sequences, self._runner.capacity or max_sequences)
        self._chat_template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError where it has none."""
        if self._tokenizer is None:
            raise missing_tokenizer("text")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        on_piece: OnPiece | None = None,
        timing: Timing | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in their order.

        prompts: a string, a list of token ids, or a list of these. params: one for all or one per prompt.
        on_piece: called with the prompt's place and what each token adds. timing: filled while it runs.
        Everything is checked before any work: RequestError names the prompt or parameter. A completion that
        meets the model's last position ends there with `length`.
        """
        return self._generate(token_prompts(prompts, self._tokenizer), params, on_piece, timing)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timing: Timing | None = None
    ) -> Iterator[StreamPiece]:
        """The completion of one prompt, a piece per token; checked now, computed as it is read.

        A reader that stops early ends the work.
        """
        # An empty list is one empty prompt here, not a list of none.
        ids = token_prompts(prompt, self._tokenizer) or token_prompts([prompt], self._tokenizer)
        if len(ids) != 1:
            raise RequestError("one prompt can be streamed at a time", seen=f"{len(ids)} prompts")
        sequences = self._sequences(ids, params)
        return self._pieces(sequences, timing or Timing())

    def chat(
        self,
        messages: SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        variables: Mapping[str, object] | None = None,
        on_piece: OnPiece | None = None,
        timing: Timing | None = None,
    ) -> Completion:
        """The assistant's next message in a conversation. Arguments as in `chat_prompt` and `generate`."""
        prompt = tuple(self.chat_prompt(messages, variables=variables))
        return self._generate([prompt], params, on_piece, timing)[0]

    def chat_prompt(
        self,
        messages: SequenceOf[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The token ids of a conversation through the checkpoint's chat template.

        messages: [{"role": "user", "content": "..."}, ...]. variables: others that the template reads.
        """
        if self._chat_template is None:
            self._chat_template = open_chat_template(self.model.checkpoint.snapshot)
        text = self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _generate(
        self,
        prompts: list[tuple[int, ...]],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
        on_piece: OnPiece | None,
        timing: Timing | None,
    ) -> list[Completion]:
        sequences = self._sequences(prompts, params)
        for sequence, piece in self._steps(sequences, timing or Timing()):
            if on_piece is not None:
                on_piece(sequence.index, piece)
        return [sequence.completion() for sequence in sequences]

    def _sequences(
        self,
        prompts: list[tuple[int, ...]],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[Sequence]:
        vocab_size, positions = self.model.vocab_size, self.model.max_positions
        each = params_per_prompt(params, len(prompts))
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, index, vocab_size=vocab_size, max_positions=positions)
            check_params(each[index], vocab_size=vocab_size, tokenizer=self._tokenizer)
        return [
            self._sequence(index, prompt, item)
            for index, (prompt, item) in enumerate(zip(prompts, each, strict=True))
        ]

    def _sequence(self, index: int, prompt: tuple[int, ...], params: SamplingParams) -> Sequence:
        generator, seed = new_generator(params.seed)
        return Sequence(
            index=index,
            prompt_token_ids=prompt,
            params=params,
            limit=min(params.max_tokens, self.model.max_positions - len(prompt)),
            end_ids=frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.end_token_ids))),
            generator=generator,
            seed=seed,
            detokenizer=None if self._tokenizer is None else Detokenizer(self._tokenizer),
        )

    def _pieces(self, sequences: list[Sequence], timing: Timing) -> Iterator[StreamPiece]:
        """The pieces of the only sequence; a reader that stops early ends the steps at once."""
        steps = self._steps(sequences, timing)
        try:
            for _, piece in steps:
                yield piece
        finally:
            steps.close()

    def _steps(self, sequences: list[Sequence], timing: Timing) -> Generator[tuple[Sequence, StreamPiece]]:
        """Admit and prefill, then one token for each that runs, until all have finished."""
        waiting, running = deque(sequences), list[Sequence]()
        try:
            while waiting or running:
                while waiting and len(running) < self._max_running:
                    sequence = waiting.popleft()
                    running.append(sequence)
                    piece = self._prefill(sequence, timing)
                    yield sequence, piece
                running = self._unfinished(running)
                if running:
                    pieces = self._decode(running, timing)
                    yield from zip(running, pieces, strict=True)
                    running = self._unfinished(running)
        finally:
            # A reader has left or a step has failed: nothing stays behind in the runner.
            for sequence in (*running, *waiting):
                sequence.abort()
                self._release(sequence)

    def _prefill(self, sequence: Sequence, timing: Timing) -> StreamPiece:
        started = time.perf_counter()
        sequence.handle, logits = self._runner.start(sequence.prompt_token_ids)
        token = sample(logits, sequence.params, sequence.generator)
        timing.prefill_seconds += time.perf_counter() - started
        timing.prefill_tokens += len(sequence.prompt_token_ids)
        return sequence.append(token)

    def _decode(self, running: list[Sequence], timing: Timing) -> list[StreamPiece]:
        started = time.perf_counter()
        handles = [sequence.handle for sequence in running if sequence.handle is not None]
        rows = self._runner.step(handles, [sequence.last_token for sequence in running])
        tokens = [
            sample(row, sequence.params, sequence.generator)
            for row, sequence in zip(rows, running, strict=True)
        ]
        timing.decode_seconds += time.perf_counter() - started
        timing.decode_tokens += len(tokens)
        return [sequence.append(token) for sequence, token in zip(running, tokens, strict=True)]

    def _unfinished(self, running: list[Sequence]) -> list[Sequence]:
        for sequence in running:
            if sequence.finish_reason is not None:
                self._release(sequence)
        return [sequence for sequence in running if sequence.finish_reason is None]

    def _release(self, sequence: Sequence) -> None:
        if sequence.handle is not None:
            handle, sequence.handle = sequence.handle, None
            self._runner.release(handle)
