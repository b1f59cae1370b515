"""A decoder over paged caches: one token of many sequences, or some tokens of one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from vtensors_engine.cuda.caches import Caches
from vtensors_engine.cuda.device_rows import DeviceRows
from vtensors_engine.cuda.layers import Chunk, PagedLayer, paged_layers
from vtensors_kernels.reference.rope import rope_angles
from vtensors_kernels.steps.next_token import NextToken
from vtensors_kernels.steps.sample_token import SampleToken
from vtensors_plugins.architectures.models.finite import check_finite

if TYPE_CHECKING:
    from vtensors_plugins.architectures.models.decoder import Decoder


@attrs.frozen(kw_only=True, eq=False)
class PagedDecoder:
    """decoder: whose bound linears, embeddings and head are used; layers: its layers over the caches."""

    decoder: Decoder
    layers: tuple[PagedLayer, ...]
    next_token: NextToken
    sample_token: SampleToken

    def decode(self, rows: DeviceRows) -> Tensor:
        """Logits [B, V] behind the token of each row; the caches take the tokens in, `rows` stays as it is."""
        h = self._seen(self.decoder.embed(rows.tokens, self.decoder.dtype), "embed_tokens", "embedding")
        for index, layer in enumerate(self.layers):
            h = self._seen(layer.mixer.decode(h, layer.input_norm, rows), f"layers.{index}", "mixer")
            h = self._seen(layer.mlp(h, layer.post_norm), f"layers.{index}", "mlp")
        return self.logits(h)

    def advance(self, rows: DeviceRows, logits: Tensor) -> None:
        """Each running row's token becomes its largest logit, noted in rows.largest; its position the next."""
        self.next_token(logits, rows.tokens, rows.positions, rows.steps, rows.largest)

    def draw(self, rows: DeviceRows, logits: Tensor) -> None:
        """The token of each running row that has a draw becomes the drawn one; behind `advance` of the same logits."""
        self.sample_token(logits, rows.draws, rows.largest, rows.steps, rows.tokens)

    def prefill(self, ids: Tensor, chunk: Chunk) -> Tensor:
        """[T, hidden] before the final norm; ids: [T] int64 on the device."""
        h = self._seen(self.decoder.embed(ids, self.decoder.dtype), "embed_tokens", "embedding")
        for index, layer in enumerate(self.layers):
            h = self._seen(layer.mixer.prefill(h, layer.input_norm, chunk), f"layers.{index}", "mixer")
            h = self._seen(layer.mlp(h, layer.post_norm), f"layers.{index}", "mlp")
        return h

    def logits(self, h: Tensor) -> Tensor:
        """[T, V] of rows [T, hidden] that `prefill` has given."""
        x = self._seen(self.decoder.norm(h), "norm", "norm")
        return self._seen(self.decoder.head(x), "lm_head", "head")

    def _seen(self, values: Tensor, place: str, part: str) -> Tensor:
        """The values; under VT_DEBUG_NAN an error where they are not finite, which no graph could raise."""
        return check_finite(values, place, part) if self.decoder.debug_nan else values


def new_paged_decoder(decoder: Decoder, caches: Caches, *, positions: int) -> PagedDecoder:
    """The decoder over the caches. positions: the most of one sequence."""
    frequencies = decoder.frequencies.cpu()
    # On the CPU: the same bits as the reference has there, on any device.
    angles = rope_angles(torch.arange(positions), frequencies)
    cos_sin = torch.cat(angles, dim=-1).to(decoder.device)
    return PagedDecoder(
        decoder=decoder,
        layers=paged_layers(decoder, caches, cos_sin),
        next_token=NextToken(decoder.device, decoder.dtype),
        sample_token=SampleToken(decoder.device, decoder.dtype),
    )
