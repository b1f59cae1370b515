"""vtensors opens LLM checkpoints in any quantization convention, keeps them quantized, and runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.errors import (
    ArchitectureError,
    CheckpointError,
    ClaimError,
    ConflictError,
    DeclarationError,
    DeviceError,
    HubError,
    LockError,
    OutputError,
    PluginError,
    RequestError,
    SwitchError,
    VtensorsError,
    WeightValueError,
)
from vtensors.forms import Form, TensorForm
from vtensors.hookspecs import hookimpl
from vtensors.records import (
    Architecture,
    Claim,
    Command,
    Convention,
    Declaration,
    DeclaredScheme,
    KernelSpec,
    PluginInfo,
    Scheme,
    Switch,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    LLM: TypeAlias = Any
    SamplingParams: TypeAlias = Any

__all__ = [
    "LLM",
    "Architecture",
    "ArchitectureError",
    "Checkpoint",
    "CheckpointError",
    "Claim",
    "ClaimError",
    "Command",
    "ConflictError",
    "Convention",
    "Declaration",
    "DeclarationError",
    "DeclaredScheme",
    "DeviceError",
    "Form",
    "HubError",
    "KernelSpec",
    "LockError",
    "OutputError",
    "PluginError",
    "PluginInfo",
    "RequestError",
    "SamplingParams",
    "Scheme",
    "Switch",
    "SwitchError",
    "TensorForm",
    "VtensorsError",
    "WeightValueError",
    "hookimpl",
    "load_model",
    "open_checkpoint",
    "testing",
]


def __getattr__(name: str) -> Any:
    """Names of the packages to the right (`LLM`, `load_model`, ...), resolved on first use."""
    from importlib import import_module

    from vtensors._lazy import LAZY

    if name == "__version__":
        from importlib.metadata import version

        return version("vtensors")
    if name not in LAZY:
        raise AttributeError(f"module 'vtensors' has no attribute {name!r}")
    module, attribute = LAZY[name]
    loaded = import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value
