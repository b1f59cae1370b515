"""A decoder whose values are rounded to fewer significant bits at chosen places, for `rounding_study.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import attrs
import torch
from torch import Tensor

from vtensors.errors import VtensorsError
from vtensors_kernels.reference.causal_conv1d import causal_conv1d
from vtensors_kernels.reference.rms_norm import rms_norm
from vtensors_kernels.reference.rope import rope
from vtensors_plugins.architectures.models import attention as attention_module
from vtensors_plugins.architectures.models import gated_delta_net as delta_net_module
from vtensors_plugins.architectures.models.attention import Attention
from vtensors_plugins.architectures.models.decoder import Decoder, DecoderLayer
from vtensors_plugins.architectures.models.gated_delta_net import GatedDeltaNet
from vtensors_plugins.architectures.models.mlp import Mlp
from vtensors_plugins.architectures.models.moe import Moe
from vtensors_plugins.architectures.models.norm import RMSNorm

PLACES = ("logits", "projections", "inside", "mixed", "swiglu", "norms", "residual")
"""logits: the head's output. projections: q, k, v; qkv, z, b, a of delta nets. inside: q and k normed and rotated, the
convolution's output. mixed: what o_proj and out_proj are given. swiglu: what down_proj is given. norms: outputs of the
layers' norms and of the last. residual: the stream behind the embeddings and behind every addition."""
_FLOAT32_BITS = 24


def rounded(x: Tensor, bits: int) -> Tensor:
    """x float32 to nearest, ties to even, of so many significant bits (8: bfloat16); for finite values."""
    dropped = _FLOAT32_BITS - bits
    if not dropped:
        return x
    pattern = x.contiguous().view(torch.int32)
    pattern = pattern + (1 << (dropped - 1)) - 1 + (pattern >> dropped & 1)
    return (pattern & -(1 << dropped)).view(torch.float32)


@attrs.frozen
class Rounding:
    """places: of PLACES. bits: that are left there."""

    places: frozenset[str]
    bits: int

    def at(self, place: str, x: Tensor) -> Tensor:
        """x, rounded if the place is one of those."""
        return rounded(x, self.bits) if place in self.places else x

    def norm(self, norm: RMSNorm, place: str) -> RMSNorm:
        """The norm with its output rounded there."""

        def bind(gain: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
            return lambda x: self.at(place, rms_norm(x, gain, eps, zero_centered=False))

        return attrs.evolve(norm, bind=bind)

    def outputs(self, call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """The projections with their outputs rounded; the call's arguments stay what they are."""
        return lambda *given: tuple(self.at("projections", part) for part in call(*given))

    def added(
        self, call: Callable[[Tensor, Tensor], Tensor], place: str
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """residual + linear(x) with x rounded at the place, and the sum as part of the residual stream."""
        return lambda x, residual: self.at("residual", call(self.at(place, x), residual))

    def layer(self, layer: DecoderLayer) -> DecoderLayer:
        """The layer with everything of it rounded that is to be."""
        return attrs.evolve(
            layer,
            input_norm=self.norm(layer.input_norm, "norms"),
            post_norm=self.norm(layer.post_norm, "norms"),
            mixer=self.mixer(layer.mixer),
            mlp=self.mlp(layer.mlp),
        )

    def mlp(self, mlp: Mlp | Moe) -> Mlp:
        """The same of its second half. Raises VtensorsError for a mixture of experts."""
        if isinstance(mlp, Moe):
            raise VtensorsError("only dense layers are rounded place by place", seen="a mixture of experts")
        return attrs.evolve(mlp, down_proj=self.added(mlp.down_proj, "swiglu"))

    def mixer(self, mixer: Attention | GatedDeltaNet) -> Attention | GatedDeltaNet:
        """The same of its first half."""
        if isinstance(mixer, GatedDeltaNet):
            return attrs.evolve(
                mixer,
                qkvz=self.outputs(mixer.qkvz),
                ba=self.outputs(mixer.ba),
                out_proj=self.added(mixer.out_proj, "mixed"),
            )
        return attrs.evolve(
            mixer,
            qkv=self.outputs(mixer.qkv),
            q_norm=mixer.q_norm and self.norm(mixer.q_norm, "inside"),
            k_norm=mixer.k_norm and self.norm(mixer.k_norm, "inside"),
            o_proj=self.added(mixer.o_proj, "mixed"),
        )

    def decoder(self, decoder: Decoder) -> Decoder:
        """The decoder, of dense layers, bound by reference kernels in float32."""
        embed, head = decoder.embed, decoder.head
        return attrs.evolve(
            decoder,
            embed=lambda ids, dtype: self.at("residual", embed(ids, dtype)),
            layers=tuple(self.layer(layer) for layer in decoder.layers),
            norm=self.norm(decoder.norm, "norms"),
            head=lambda x: self.at("logits", head(x)),
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While it is open, rotation and convolution round too: the layers have no seam there."""

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return self.at("inside", rope(x, cos, sin))

        def convolved(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
            out, kept = causal_conv1d(x, weight, history)
            return self.at("inside", out), kept

        with (
            patch.object(attention_module, "rope", rotated),
            patch.object(delta_net_module, "causal_conv1d", convolved),
        ):
            yield
