"""The reference backend: plain torch for every scheme on every device, chosen when nothing is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vtensors.errors import RequestError
from vtensors.hookspecs import hookimpl
from vtensors.records import KernelRequest, KernelSpec, PluginInfo

if TYPE_CHECKING:
    import torch

    from vtensors_formats.activations import ActivationQuantizer
    from vtensors_formats.weight import Weight

# Behind every measured kernel.
_LAST = 1e9


def _refuse(_request: KernelRequest) -> str | None:
    return None


def _bind_linear(weight: Weight, request: KernelRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    from vtensors_kernels.reference.linear import linear

    activation = _quantizer(weight, request)

    def call(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, activation)

    return call


def _quantizer(weight: Weight, request: KernelRequest) -> ActivationQuantizer | None:
    """What the request puts x through: the weight's own. Raises RequestError where it declares another."""
    activation = None if request.activations == "16bit" else weight.activation
    if request.activations != "16bit" and (activation is None or activation.kind != request.activations):
        declared = "16bit" if activation is None else activation.kind
        raise RequestError(
            f"cannot run {request.activations} activations",
            seen=f"the weight declares {declared}",
            accepted=" or ".join(dict.fromkeys(("16bit", declared))),
        )
    return activation


def _bind_experts(weights: Sequence[Weight], request: KernelRequest) -> Callable[..., torch.Tensor]:
    from vtensors_kernels.reference.experts import experts

    activations = [_quantizer(weight, request) for weight in weights]

    def call(
        x: torch.Tensor,
        chosen: torch.Tensor,
        router: torch.Tensor,
        gate: torch.Tensor | None,
        shared: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        return experts(x, chosen, router, gate, shared, residual, weights, request.experts, activations)

    return call


def _bind_embedding(
    weight: Weight, _request: KernelRequest
) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    from vtensors_kernels.reference.embedding import embedding

    def call(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return embedding(ids, weight, dtype)

    return call


def _spec(op: str, bind: Callable[[Any, KernelRequest], Callable[..., Any]]) -> KernelSpec:
    return KernelSpec(
        name=f"{op}_reference",
        op=op,
        schemes=("*",),
        targets=("cpu", "portable"),
        numerics="reference",
        refuse=_refuse,
        bind=bind,
        cost=_LAST,
    )


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """Who this plugin is."""
    return PluginInfo(name="reference", summary="Plain-torch kernels for every scheme and device.")


@hookimpl
def vtensors_kernels() -> list[KernelSpec]:
    """`linear_reference`, `experts_reference` and `embedding_reference`."""
    return [
        _spec("linear", _bind_linear),
        _spec("experts", _bind_experts),
        _spec("embedding", _bind_embedding),
    ]
