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
_STORED_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


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
    return KernelRules.of(checkpoint.switches.text("VT_KERNELS"), checkpoint.plugins.registry)


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
    """The dtype that config.json names, else the one 16-bit dtype of the model's unquantized weights.

    Writers that take the dtype of the first tensor name a format of codes, such as `float8_e4m3fn` (nvidia-modelopt
    0.47 where the embeddings are quantized). Raises RequestError where nothing tells what to compute in.
    """
    named = checkpoint.configs.dtype
    if named is None or (isinstance(named, str) and named.startswith("float8")):
        schemes = {checkpoint.modules[module].scheme for module in planned_modules(checkpoint).values()}
        stored = [dtype for scheme, dtype in _STORED_DTYPES.items() if scheme in schemes]
        if len(stored) == 1:
            return stored[0]
    if not isinstance(named, str) or named not in _CONFIG_DTYPES:
        raise RequestError(
            "config.json does not name a dtype to compute in",
            file="config.json",
            seen=f"dtype {named!r}"[:80],
            accepted=", ".join(_CONFIG_DTYPES),
            fix="pass dtype",
        )
    return _CONFIG_DTYPES[named]
