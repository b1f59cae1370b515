"""What an architecture's builder is given, and the parts it takes: bound linears and small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import ArchitectureError
from vtensors.records import KernelRequest, KernelSpec, Selected
from vtensors.selection import Ranking, bind, rank
from vtensors_formats.weight import Weight

LinearCall = Callable[[Tensor], Tensor]
EmbeddingCall = Callable[[Tensor, torch.dtype], Tensor]


@attrs.frozen(kw_only=True)
class BuildOptions:
    """How a model is to run.

    dtype: of activations and logits. kernels: those that may be selected.
    executed: canonical weight name -> activation mode (`16bit`, `fp4`, `fp8-static`, `fp8-dynamic`); a weight
    that is not named runs with 16-bit activations.
    kv_quant: layer -> (k_scale, v_scale) of an FP8 E4M3 KV cache; None = the cache is in dtype.
    """

    dtype: torch.dtype
    device: torch.device | str
    kernels: Sequence[KernelSpec]
    executed: Mapping[str, str] = attrs.field(factory=dict)
    kv_quant: Mapping[int, tuple[float, float]] | None = None


@attrs.define
class Parts:
    """Gives the builder the model's parts by canonical name and records which kernel each linear got."""

    weights: Mapping[str, Weight]
    options: BuildOptions
    selected: list[Selected] = attrs.field(factory=list)
    _rankings: dict[tuple[str, str, str], Ranking] = attrs.field(factory=dict)

    def linear(self, name: str, *, bias: bool = False) -> LinearCall:
        """The bound linear of that weight: [M, K] -> [M, N], model dtype.

        bias: whether config.json announces one. Raises ArchitectureError where the checkpoint differs,
        VtensorsError where no kernel serves the weight.
        """
        weight = self.weight(name)
        if bias != (weight.bias is not None):
            raise ArchitectureError(
                "has no bias, which config.json announces" if bias else "has a bias that config.json denies",
                tensor=name,
                accepted="attention_bias and mlp_bias as the checkpoint has them",
            )
        call: LinearCall = self._bind("linear", name, weight)
        return call

    def embedding(self, name: str) -> EmbeddingCall:
        """The bound gather of that weight: [T] int64 -> [T, K] in the dtype asked for."""
        call: EmbeddingCall = self._bind("embedding", name, self.weight(name))
        return call

    def small(self, name: str) -> Tensor:
        """A norm or other small parameter in float32, its own shape, on the model's device."""
        return self.weight(name).dequantize(torch.float32).to(self.options.device)

    def weight(self, name: str) -> Weight:
        """The weight of that canonical name. Raises ArchitectureError if it was not loaded."""
        if name not in self.weights:
            raise ArchitectureError("weight is missing", tensor=name, fix="load every weight of the plan")
        return self.weights[name]

    def _bind(self, op: str, name: str, weight: Weight) -> Callable[..., Tensor]:
        executed = self.options.executed.get(name, "16bit")
        key = (op, weight.scheme, executed)
        if key not in self._rankings:
            request = _request(op, weight.scheme, executed, self.options)
            self._rankings[key] = rank(request, self.options.kernels)
        bound = bind(self._rankings[key], weight)
        self.selected.append(
            Selected(
                module=name,
                op=op,
                scheme=weight.scheme,
                declared="16bit" if weight.activation is None else weight.activation.kind,
                executed=executed,
                kernel=bound.kernel.name,
                rejected=bound.rejected,
            )
        )
        return bound.call


def _request(op: str, scheme: str, activations: str, options: BuildOptions) -> KernelRequest:
    device = torch.device(options.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return KernelRequest(
        op=op,
        scheme=scheme,
        activations=activations,
        device=str(device),
        capability=capability,
        dtype=str(options.dtype).removeprefix("torch."),
    )
