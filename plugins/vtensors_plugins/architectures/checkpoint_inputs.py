"""What a checkpoint and its switches give to a builder, whether it binds or only plans.

The weights come by canonical name, each read when it is asked for and held by nobody here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import torch

from vtensors.activations import ActivationRequest
from vtensors.checkpoint import Checkpoint
from vtensors.errors import ArchitectureError, RequestError
from vtensors.kernel_rules import KernelRules
from vtensors.modules import is_quantized
from vtensors.records import Architecture, KernelSpec, Weight

HEAD = "lm_head"
_CONFIG_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@attrs.frozen(kw_only=True, eq=False)
class CheckpointWeights(Mapping[str, Weight]):
    """canonical name -> Weight, read anew at every look-up, so that what was prepared from it can replace it.

    modules: canonical name -> module of the checkpoint. read: canonical name -> the weight.
    """

    modules: Mapping[str, str]
    read: Callable[[str], Weight]

    def __getitem__(self, name: str) -> Weight:
        if name not in self.modules:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __contains__(self, name: object) -> bool:
        return name in self.modules


def planned_modules(checkpoint: Checkpoint) -> dict[str, str]:
    """canonical name -> module, of every weight that the architecture expects and the checkpoint has."""
    expected = checkpoint.plan.weights if checkpoint.plan else {}
    return {name: own.module for name, own in expected.items() if own.module in checkpoint.modules}


def dequantizes_head(checkpoint: Checkpoint) -> bool:
    """Whether the head is quantized and `VT_LMHEAD_QUANTIZED=0` asks for plain numbers."""
    module = planned_modules(checkpoint).get(HEAD)
    if module is None or checkpoint.switches.flag("VT_LMHEAD_QUANTIZED"):
        return False
    return is_quantized(checkpoint.modules[module].scheme)


def executed_modes(checkpoint: Checkpoint, request: ActivationRequest) -> dict[str, str]:
    """canonical name -> activation mode, of the weights that do not run with 16-bit activations."""
    plain = {HEAD} if dequantizes_head(checkpoint) else set()
    found = {
        name: checkpoint.executed(module, request).activations
        for name, module in planned_modules(checkpoint).items()
        if name not in plain
    }
    return {name: mode for name, mode in found.items() if mode != "16bit"}


def registered_kernels(checkpoint: Checkpoint) -> list[KernelSpec]:
    """Every kernel of the enabled plugins."""
    return [owned.record for owned in checkpoint.plugins.registry.kernels.values()]


def kernel_rules(checkpoint: Checkpoint) -> KernelRules:
    """`VT_KERNELS`. Raises SwitchError for an entry that names no kernel or scheme."""
    schemes = checkpoint.plugins.registry.schemes
    return KernelRules.parse(checkpoint.switches.text("VT_KERNELS"), registered_kernels(checkpoint), schemes)


def require_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture that knows the model. Raises ArchitectureError with the known ones where there is none."""
    if checkpoint.architecture is None:
        known = ", ".join(
            f"{o.record.name} ({', '.join(o.record.model_types)})"
            for o in checkpoint.plugins.registry.architectures.values()
        )
        raise ArchitectureError(
            "no architecture plugin knows this model",
            file="config.json",
            seen=f"architectures {checkpoint.config.get('architectures')!r}, "
            f"model_type {checkpoint.config.get('model_type')!r}",
            accepted=known,
            fix="install a plugin that brings the architecture; `vtensors inspect` works without one",
        )
    return checkpoint.architecture


def config_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that config.json names. Raises RequestError where it names none to compute in."""
    text = checkpoint.configs.text
    named = text.get("dtype") or text.get("torch_dtype") or checkpoint.config.get("dtype")
    if not isinstance(named, str) or named not in _CONFIG_DTYPES:
        raise RequestError(
            "config.json does not name a dtype to compute in",
            file="config.json",
            seen=f"dtype {named!r}"[:80],
            accepted=", ".join(_CONFIG_DTYPES),
            fix="pass dtype",
        )
    return _CONFIG_DTYPES[named]
