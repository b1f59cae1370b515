"""`LLM`: prompts in, completions out. The step loop is `Engine.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from vtensors.counts import counted
from vtensors.errors import DeviceError, RequestError
from vtensors_engine.chat import ChatTemplate, open_chat_template
from vtensors_engine.chat_messages import Message
from vtensors_engine.devices import resolve_device, resolve_dtype
from vtensors_engine.engine import Engine
from vtensors_engine.outputs import Completion, StreamPiece, Timing
from vtensors_engine.prompts import Prompt, check_params, check_prompt, params_per_prompt, token_prompts
from vtensors_engine.runner import SteppedModel
from vtensors_engine.runner_choice import make_runner
from vtensors_engine.sampling import SamplingParams, new_generator
from vtensors_engine.sequence import Sequence
from vtensors_engine.shared_steps import SharedSteps
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
    from vtensors.switches import Switches

OnPiece = Callable[[int, StreamPiece], None]
OnError = Literal["raise", "return"]


class OpenCheckpoint(Protocol):
    """What is left of the checkpoint once its model is loaded."""

    @property
    def snapshot(self) -> SideFiles: ...
    @property
    def provenance(self) -> Provenance: ...
    @property
    def switches(self) -> Switches: ...


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
    max_sequences: most prompts in work at the same time, on CUDA at most 64; up to 32 no result depends on it.
    max_tokens: most tokens of prompts and completions in the KV cache of a CUDA device at the same time; None
    takes what fits. The reference runner has no such bound.

    Calls that are in work at the same time, such as two streams, share the steps. Several threads may call it: they
    take turns, step by step; on CUDA all of them on one stream, torch's default unless they choose another.
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
        max_tokens: int | None = None,
        lock: Lock | str | PathLike[str] | None = None,
    ) -> None:
        for name, value in (("max_sequences", max_sequences), ("max_tokens", max_tokens)):
            if not (value is None and name == "max_tokens") and (type(value) is not int or value < 1):
                raise RequestError(
                    f"{name} cannot be used",
                    seen=repr(value),
                    accepted="an integer >= 1",
                    fix=f"pass {name} as such a number",
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
        elif not hasattr(model, "checkpoint"):
            raise RequestError(
                "this is no model",
                seen=repr(model)[:80],
                accepted="a path, org/name[@revision], or a model that load_model returned",
                fix="pass the path or the name as text",
            )
        elif all(
            value is None for value in (revision, device, dtype, activations, lock)
        ) and kv_cache_dtype in ("auto", getattr(model, "kv_cache", None)):
            self.model = model
        else:
            raise RequestError(
                "a loaded model keeps what it was loaded with",
                seen="a loaded model and one of revision, device, dtype, activations, kv_cache_dtype, lock",
                accepted="either a path and these arguments, or the model alone",
                fix="leave these arguments out, or pass the path",
            )
        files = self.model.checkpoint.snapshot
        self._tokenizer = open_tokenizer(files)
        self.end_token_ids = end_token_ids(files, self._tokenizer)
        self.engine = Engine(make_runner(self.model, max_sequences=max_sequences, max_tokens=max_tokens))
        self._steps = SharedSteps(self.engine)
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
        on_error: OnError = "raise",
        timing: Timing | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in their order.

        prompts: a string, a list of token ids, or a list of these. params: one for all or one per prompt.
        on_piece: called with the prompt's place and what each token adds. timing: filled while it runs.
        Everything is checked before any work: RequestError names the prompt or parameter. A completion that
        meets the model's last position ends there with `length`.

        A prompt that fails later stops no other. on_error: `raise` the error of the first one when all others
        have finished, or `return` its completion with them, with finish_reason `error` and the message.
        Raises DeviceError, whatever on_error is, where the device fails.
        """
        if on_error not in ("raise", "return"):
            raise RequestError(
                "on_error cannot be used",
                seen=repr(on_error),
                accepted="raise, return",
                fix="pass one of these",
            )
        ids = token_prompts(prompts, self._tokenizer)
        return self._generate(ids, params, on_piece, timing, on_error)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timing: Timing | None = None
    ) -> Iterator[StreamPiece]:
        """The completion of one prompt, a piece per token; checked now, computed as it is read.

        A reader that stops early ends the work.
        """
        # An empty list is one empty prompt here, not a list of none.
        ids = token_prompts(prompt, self._tokenizer) or token_prompts([prompt], self._tokenizer)
        if len(ids) != 1:
            raise RequestError(
                "one prompt can be streamed at a time",
                seen=counted(len(ids), "prompt"),
                accepted="one prompt",
                fix="call stream() once for each, or generate()",
            )
        sequences = self._sequences(ids, params)
        return self._pieces(sequences, timing)

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
        return self._generate([prompt], params, on_piece, timing, "raise")[0]

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
        on_error: OnError,
    ) -> list[Completion]:
        sequences = self._sequences(prompts, params)
        with closing(self._steps.events(sequences, timing)) as events:
            for event in events:
                if on_piece is not None:
                    on_piece(event.sequence.index, event.piece)
        _raise_first(sequences, device_alone=on_error == "return")
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

    def _pieces(self, sequences: list[Sequence], timing: Timing | None) -> Iterator[StreamPiece]:
        """The pieces of the only sequence; a reader that stops early ends the steps at once."""
        with closing(self._steps.events(sequences, timing)) as events:
            for event in events:
                yield event.piece
        _raise_first(sequences)


def _raise_first(sequences: list[Sequence], *, device_alone: bool = False) -> None:
    """The error of the first sequence that failed; a note says which where there are several."""
    for sequence in sequences:
        of_device = isinstance(sequence.failure, DeviceError)
        if sequence.failure is not None and (of_device or not device_alone):
            if len(sequences) > 1 and not of_device:
                sequence.failure.add_note(
                    f"prompt {sequence.index} of {len(sequences)}; the others have finished"
                )
            raise sequence.failure
