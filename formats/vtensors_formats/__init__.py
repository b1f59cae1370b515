"""Number formats and canonical Weights in plain torch: the reference that every kernel is held against.

The names below resolve on first use, so that `vtensors_formats.schemes` can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtensors_formats.activations import (
        ActivationQuantizer,
        FP4Activation,
        FP8StaticActivation,
        QuantizedActivation,
    )
    from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
    from vtensors_formats.e8m0 import ExponentRule
    from vtensors_formats.fp8 import FP8Weight
    from vtensors_formats.mxfp8 import MXFP8Weight
    from vtensors_formats.nvfp4 import NVFP4Weight
    from vtensors_formats.plain import PlainWeight
    from vtensors_formats.schemes import BUILTIN_SCHEMES
    from vtensors_formats.weight import Weight

__all__ = [
    "BUILTIN_SCHEMES",
    "ActivationQuantizer",
    "ExponentRule",
    "FP4Activation",
    "FP8GroupActivation",
    "FP8StaticActivation",
    "FP8TokenActivation",
    "FP8Weight",
    "MXFP8Activation",
    "MXFP8Weight",
    "NVFP4Weight",
    "PlainWeight",
    "QuantizedActivation",
    "Weight",
]

_MODULES = {
    "BUILTIN_SCHEMES": "schemes",
    "ActivationQuantizer": "activations",
    "ExponentRule": "e8m0",
    "FP4Activation": "activations",
    "FP8GroupActivation": "dynamic_activations",
    "FP8StaticActivation": "activations",
    "FP8TokenActivation": "dynamic_activations",
    "FP8Weight": "fp8",
    "MXFP8Activation": "dynamic_activations",
    "MXFP8Weight": "mxfp8",
    "NVFP4Weight": "nvfp4",
    "PlainWeight": "plain",
    "QuantizedActivation": "activations",
    "Weight": "weight",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
