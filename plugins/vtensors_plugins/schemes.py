"""The built-in number formats as a plugin."""

from __future__ import annotations

from vtensors.hookspecs import hookimpl
from vtensors.records import PluginInfo, Scheme
from vtensors_formats.schemes import BUILTIN_SCHEMES


@hookimpl
def vtensors_plugin() -> PluginInfo:
    """This plugin."""
    return PluginInfo(name="schemes", summary="The built-in number formats.")


@hookimpl
def vtensors_schemes() -> list[Scheme]:
    """NVFP4, MXFP8, FP8 per tensor, row and block, BF16, F16, F32."""
    return list(BUILTIN_SCHEMES)
