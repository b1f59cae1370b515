"""Which kernels a model would get on any device, from headers and configuration alone: no weight byte is read.

The architecture's own builder runs on weights without data, so an outline and a load cannot differ but where
values decide: parts with pre-scales or input scales are taken to have equal ones (`PlannedGroup.assumes`), and a
head beside tied embeddings to repeat them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import attrs
import torch
from torch import Tensor

from vtensors.checkpoint import Checkpoint
from vtensors.containment import blamed_on
from vtensors.errors import RequestError
from vtensors.kernel_candidates import CostOf
from vtensors.records import Claim, Weight
from vtensors.tensor_source import stored_tensor
from vtensors.tensors import TensorInfo
from vtensors_formats import PlainWeight
from vtensors_kernels.self_tests import measured_costs, verdicts_for
from vtensors_plugins.architectures.build import BuildOptions
from vtensors_plugins.architectures.checkpoint_inputs import (
    HEAD,
    CheckpointWeights,
    config_dtype,
    dequantizes_head,
    executed_modes,
    kernel_rules,
    planned_modules,
    registered_kernels,
    require_architecture,
)
from vtensors_plugins.architectures.groups import DryRun, PlannedGroup

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def outline(
    checkpoint: Checkpoint,
    *,
    device: str = "cpu",
    capability: tuple[int, int] | None = None,
    dtype: str | None = None,
    activations: str | None = None,
    assumed: bool = False,
) -> tuple[PlannedGroup, ...]:
    """The groups of modules in the builder's order, with their requests and plans.

    device, capability: `cpu`, or `cuda:0` with (major, minor). assumed: the device is not there, and what this
    machine lacks does not count. dtype: of activations; None = what a load would take. activations: as for
    `load_model`. The switches apply as there, so that `VT_AUTOTUNE=1` times kernels on a device that is there.
    Errors: those of `Checkpoint.check`; ArchitectureError where no architecture plugin knows the model,
    VtensorsError where no kernel serves a weight, RequestError for an unknown dtype or a device without capability.
    """
    if (capability is None) != (device.partition(":")[0] != "cuda"):
        raise RequestError(
            "the device and its capability do not fit",
            seen=f"device={device!r}, capability={capability}",
            accepted="cuda:<index> with (major, minor), or cpu with None",
        )
    architecture = require_architecture(checkpoint)
    checkpoint.check()
    compute = _dtype(checkpoint, dtype, device)
    dry_run = DryRun(device=device, capability=capability, assumed=assumed)
    modules = planned_modules(checkpoint)
    options = BuildOptions(
        dtype=compute,
        device="meta",
        kernels=registered_kernels(checkpoint),
        executed=executed_modes(checkpoint, checkpoint.activation_request(activations)),
        rules=kernel_rules(checkpoint),
        cost_of=None if assumed else _measured(checkpoint, device),
        dry_run=dry_run,
    )
    blank = _BlankWeights(checkpoint=checkpoint, modules=modules, dtype=compute)
    weights = CheckpointWeights(modules=modules, read=blank.read)
    module, function = architecture.build.split(":")
    getattr(import_module(module), function)(checkpoint.config, weights, options)
    return tuple(_named(group, checkpoint, modules) for group in dry_run.planned)


@attrs.frozen(kw_only=True)
class _BlankWeights:
    """Canonical weights of the right class, shape and roles, without data."""

    checkpoint: Checkpoint
    modules: Mapping[str, str]
    dtype: torch.dtype

    def read(self, name: str) -> Weight:
        module = self.checkpoint.modules[self.modules[name]]
        if name == HEAD and dequantizes_head(self.checkpoint):
            return PlainWeight(tensor=torch.empty(module.shape, dtype=self.dtype, device="meta"))
        owned = self.checkpoint.plugins.registry.conventions[module.convention]
        with blamed_on(owned, f"reading '{module.name}' without data: the convention '{module.convention}'"):
            try:
                return owned.record.read(module.claim, _NoData())
            except RuntimeError:
                # The convention looks at values, which `meta` tensors have not: numbers that take no memory have.
                return owned.record.read(module.claim, _Numbers.of(module.claim)).to("meta")


@attrs.frozen
class _NoData:
    """A `TensorSource` of tensors on the `meta` device."""

    def view(self, info: TensorInfo) -> Tensor:
        with torch.device("meta"):
            return stored_tensor(b"", info, info.shape)


@attrs.frozen
class _Numbers:
    """A `TensorSource` of scales that are 1 and of zeros, one element behind each tensor."""

    scales: frozenset[str]

    @classmethod
    def of(cls, claim: Claim) -> _Numbers:
        senses = {place.role: place.sense for place in claim.form.tensors}
        return cls(frozenset(info.name for role, info in claim.roles.items() if senses.get(role)))

    def view(self, info: TensorInfo) -> Tensor:
        blank = _NoData().view(info)
        number = torch.zeros(blank.element_size(), dtype=torch.uint8).view(blank.dtype)
        if info.name in self.scales:
            number = torch.ones(1).to(blank.dtype)
        return number.reshape(()).expand(blank.shape)


def _measured(checkpoint: Checkpoint, device: str) -> CostOf | None:
    """Times that a load under `VT_AUTOTUNE=1` would go by: of a device that is here."""
    if not checkpoint.switches.flag("VT_AUTOTUNE"):
        return None
    return measured_costs(checkpoint, verdicts_for(checkpoint, torch.device(device)))


def _dtype(checkpoint: Checkpoint, name: str | None, device: str) -> torch.dtype:
    if name is None:
        return torch.float32 if device == "cpu" else config_dtype(checkpoint)
    if name not in _DTYPES:
        raise RequestError(
            "models do not compute in this dtype",
            seen=f"dtype={name!r}",
            accepted=", ".join(_DTYPES),
            fix="pass one of these",
        )
    return _DTYPES[name]


def _named(group: PlannedGroup, checkpoint: Checkpoint, modules: Mapping[str, str]) -> PlannedGroup:
    """The group under the checkpoint's module names, with what is declared and stored of them."""
    own = [checkpoint.modules[modules[name]] for name in group.modules]
    return attrs.evolve(
        group,
        modules=tuple(module.name for module in own),
        declared=tuple(module.declared for module in own),
        nbytes=sum(module.nbytes for module in own),
    )
