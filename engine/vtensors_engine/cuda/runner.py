"""`CudaRunner`: sequences over paged caches on one device; prompts in chunks, then batched steps by graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from vtensors.counts import counted
from vtensors.errors import RequestError, VtensorsError
from vtensors_engine.cuda.caches import PAGE_TOKENS, Caches, new_caches
from vtensors_engine.cuda.decode_graphs import DecodeGraphs
from vtensors_engine.cuda.device_rows import DeviceRows, on_device
from vtensors_engine.cuda.device_steps import DeviceStep, new_step
from vtensors_engine.cuda.layers import Chunk
from vtensors_engine.cuda.paged_decoder import PagedDecoder, new_paged_decoder
from vtensors_engine.cuda.self_tests import require_kernels
from vtensors_engine.drawing import Draw
from vtensors_engine.rows import BUCKETS, RowTable, bucket_for
from vtensors_engine.runner import Row
from vtensors_kernels.steps.sample_token import MAX_COLUMNS
from vtensors_kernels.time_limits import time_limit
from vtensors_plugins.architectures.models.attention import Attention
from vtensors_plugins.architectures.models.decoder import Decoder
from vtensors_plugins.architectures.models.gated_delta_net import GatedDeltaNet

if TYPE_CHECKING:
    from vtensors_engine.loading import LoadedModel

# Tokens of a prompt that go through the model together. Of the prompt alone, never of the load: a chunk's end decides
# how its sums are cut.
CHUNK_TOKENS = 2048
# Steps that may be under way before the oldest is read.
AHEAD = 2
_MIXERS = (Attention, GatedDeltaNet)


@attrs.define(kw_only=True, eq=False)
class _Running:
    """One sequence. done: tokens of the prompt that the caches hold. first: what follows the prompt, [1] int64."""

    prompt: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int
    done: int = 0
    first: Tensor | None = None


class CudaRunner:
    """Runs a `Decoder` whose activations have 16 bits. See `Runner`.

    max_sequences: most at a time. max_tokens: of all of them together, None = what fits. chunk: tokens of a prompt
    that are processed together. eager: without CUDA graphs, as VT_DEBUG_NAN runs it too.
    Errors: VtensorsError where the model is not one that it can run or a kernel fails its test on this device,
    RequestError where the memory does not suffice.
    """

    ahead = AHEAD

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_sequences: int,
        max_tokens: int | None = None,
        chunk: int = CHUNK_TOKENS,
        eager: bool = False,
    ) -> None:
        decoder = _require_decoder(model)
        sequences = min(max_sequences, BUCKETS[-1])
        self._device = decoder.device
        with torch.cuda.device(self._device), torch.inference_mode():
            self.caches: Caches = new_caches(decoder, sequences=sequences, tokens=max_tokens)
            longest = min(decoder.max_positions, self.caches.pages.capacity * PAGE_TOKENS)
            # Pages of the longest sequence.
            self._longest = -(-longest // PAGE_TOKENS)
            self._model: PagedDecoder = new_paged_decoder(
                decoder, self.caches, positions=self._longest * PAGE_TOKENS
            )
            require_kernels(self._model, time_limit(model.checkpoint.switches, self._device))
            rows = DeviceRows.empty(
                bucket_for(sequences), self._longest, self.caches.dummy_slot, device=self._device
            )
        self._rows, self._chunk = rows, chunk
        self._graphs = DecodeGraphs(decoder=self._model, rows=rows, eager=eager or decoder.debug_nan)
        self._table = RowTable(rows.tokens.shape[0])
        # Rows on the device that may hold a sequence; more than the table's where a change of rows failed.
        self._occupied = 0
        self._sequences: dict[int, _Running] = {}
        self._next_handle = 0
        self._capacity = sequences

    @property
    def capacity(self) -> int | None:
        """See `Runner`."""
        return self._capacity

    @property
    def draws(self) -> bool:
        """See `Runner`."""
        return self._model.decoder.vocab_size <= MAX_COLUMNS

    @property
    def max_tokens(self) -> int:
        """Tokens that all sequences together have room for."""
        return self.caches.pages.capacity * PAGE_TOKENS

    def warm_up(self) -> None:
        """Records every graph now, the largest first, so that no later step has to."""
        if not self._graphs.eager:
            with torch.cuda.device(self._device), torch.inference_mode():
                largest = bucket_for(self._capacity)
                for rows in sorted((b for b in BUCKETS if b <= largest), reverse=True):
                    self._graphs.capture(rows)

    def admit(self, prompt: Sequence[int], limit: int) -> int | None:
        """See `Runner`."""
        if not prompt:
            raise RequestError("a runner cannot start an empty prompt", accepted="at least one token id")
        tokens = len(prompt) + limit
        pages = -(-tokens // PAGE_TOKENS)
        if pages > min(self.caches.pages.capacity, self._longest):
            raise RequestError(
                "the request can never fit into the KV cache",
                seen=f"{len(prompt):,} + {counted(limit, 'token')}",
                accepted=f"at most {min(self.caches.pages.capacity, self._longest) * PAGE_TOKENS} tokens",
                fix="ask for fewer tokens, or give the engine a larger max_tokens",
            )
        if len(self._sequences) >= self._capacity:
            return None
        taken = self.caches.pages.allocate(pages)
        if taken is None:
            return None
        slot = self.caches.slots.allocate()
        if slot is None:
            self.caches.pages.free(taken)
            return None
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Running(prompt=tuple(prompt), pages=taken, slot=slot)
        return handle

    def prefill(self, handle: int, draw: Draw | None = None) -> DeviceStep | None:
        """See `Runner`."""
        own = self._sequence(handle)
        if own.done == len(own.prompt):
            raise VtensorsError("the prompt has been processed already", seen=f"handle {handle}")
        with torch.cuda.device(self._device), torch.inference_mode():
            h = self._prefilled(own)
            if own.done < len(own.prompt):
                return None
            logits = self._model.logits(h[-1:])
            chosen = DeviceRows.single(self.caches.dummy_slot, self._device)
            self._model.advance(chosen, logits)
            self._draw(chosen, {} if draw is None else {0: draw}, logits)
            own.first = chosen.tokens
            return new_step(logits, chosen, [0])

    def decode(self, rows: Sequence[Row]) -> DeviceStep:
        """See `Runner`."""
        with torch.cuda.device(self._device), torch.inference_mode():
            handles = [row.handle for row in rows]
            self._arrange(handles)
            places = [self._table.row(handle) for handle in handles]
            self._rows.give(
                {place: row.token for place, row in zip(places, rows, strict=True) if row.token is not None}
            )
            count = bucket_for(len(rows))
            logits, used = self._graphs.step(count), self._rows.first(count)
            draws = {place: row.draw for place, row in zip(places, rows, strict=True) if row.draw is not None}
            self._draw(used, draws, logits)
            return new_step(logits, used, places)

    def score(self, ids: Sequence[int]) -> Tensor:
        """[T, V] in the model's dtype: the logits behind every token of a sequence, which is forgotten again.

        Errors: RequestError where there is no room for it.
        """
        handle = self.admit(ids, 0)
        if handle is None:
            raise RequestError("there is no room for another sequence", seen=counted(len(ids), "token"))
        try:
            own, rows = self._sequence(handle), list[Tensor]()
            with torch.cuda.device(self._device), torch.inference_mode():
                while own.done < len(own.prompt):
                    rows.append(self._model.logits(self._prefilled(own)))
            return torch.cat(rows)
        finally:
            self.release(handle)

    def release(self, handle: int) -> None:
        """See `Runner`. Steps under way still write to its pages; whatever takes these next is queued behind."""
        own = self._sequence(handle)
        del self._sequences[handle]
        self.caches.pages.free(own.pages)
        self.caches.slots.free(own.slot)

    def _draw(self, rows: DeviceRows, draws: Mapping[int, Draw], logits: Tensor) -> None:
        """Draws the tokens of the rows named, behind the step that gave the logits."""
        if draws:
            rows.give_draws(draws)
            self._model.draw(rows, logits)

    def _arrange(self, handles: Sequence[int]) -> None:
        """These sequences have a row each, without gaps; all other rows are padding."""
        changes = self._table.assign(handles)
        self._occupied = max(self._occupied, self._table.count)
        for change in changes:
            if change.source is not None:
                self._rows.move(change.source, change.row)
                continue
            own = self._sequence(change.handle)
            if own.first is None:
                raise VtensorsError("the sequence has no token to go on from", seen=f"handle {change.handle}")
            self._rows.enter(
                change.row, token=own.first, position=len(own.prompt), slot=own.slot, pages=own.pages
            )
            # One that leaves the batch is not launched again.
            own.first = None
        for row in range(self._table.count, self._occupied):
            self._rows.leave(row)
        self._occupied = self._table.count

    def _prefilled(self, own: _Running) -> Tensor:
        """[T, hidden] of the next tokens of its prompt, which the caches hold then."""
        piece = own.prompt[own.done : own.done + self._chunk]
        pages = [*own.pages, *[0] * (self._longest - len(own.pages))]
        chunk = Chunk(
            start=own.done,
            position=on_device([own.done], torch.int32, self._device),
            slot=on_device([own.slot], torch.int32, self._device),
            page_table=on_device(pages, torch.int32, self._device).unsqueeze(0),
        )
        h = self._model.prefill(on_device(piece, torch.int64, self._device), chunk)
        own.done += len(piece)
        return h

    def _sequence(self, handle: int) -> _Running:
        if handle not in self._sequences:
            raise VtensorsError("the runner does not know the sequence", seen=f"handle {handle}")
        return self._sequences[handle]


def _require_decoder(model: LoadedModel) -> Decoder:
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Decoder):
        raise VtensorsError(
            "the CUDA runner knows the decoders of this package",
            seen=type(decoder).__name__,
            accepted=Decoder.__name__,
        )
    others = {type(layer.mixer).__name__ for layer in decoder.layers if not isinstance(layer.mixer, _MIXERS)}
    if others:
        raise VtensorsError(
            "the CUDA runner has no cache for a layer of this kind",
            seen=", ".join(sorted(others)),
            accepted=", ".join(kind.__name__ for kind in _MIXERS),
        )
    if decoder.device.type != "cuda" or decoder.dtype not in (torch.bfloat16, torch.float16):
        raise VtensorsError(
            "the CUDA runner computes in 16 bits on a CUDA device",
            seen=f"{decoder.dtype} on {decoder.device}",
            accepted="bfloat16 or float16 on cuda",
        )
    return decoder
