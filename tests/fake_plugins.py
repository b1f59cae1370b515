"""Plugins made on the spot for tests of the manager and the program."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from vtensors.forms import Form, TensorForm
from vtensors.hookspecs import hookimpl
from vtensors.manager import Plugins
from vtensors.plugin_candidates import Candidate
from vtensors.plugin_loading import PluginStatus
from vtensors.records import Convention, PluginInfo, Scheme

Hook = Callable[..., Any]


def module(name: str, hooks: dict[str, Hook] | None = None, *, info: object = None) -> ModuleType:
    """A plugin module with the hooks given and a vtensors_plugin()."""
    made = ModuleType(f"fake_{name}")

    def vtensors_plugin() -> object:
        return PluginInfo(name=name, summary=f"The fake plugin {name}.") if info is None else info

    for hook_name, function in {"vtensors_plugin": vtensors_plugin, **(hooks or {})}.items():
        setattr(made, hook_name, hookimpl(function))
    return made


def candidate(
    name: str, plugin: object = None, *, distribution: str | None = None, builtin: bool = False
) -> Candidate:
    """A candidate that gives the plugin, or raises it if it is an exception."""

    def load() -> object:
        if isinstance(plugin, BaseException):
            raise plugin
        return module(name) if plugin is None else plugin

    return Candidate(
        name=name,
        distribution=distribution or f"{name}-dist",
        version="1.2",
        value=f"fake_{name}",
        load=load,
        builtin=builtin,
    )


def discover(*candidates: Candidate, **environ: str) -> Plugins:
    """Only these plugins, without the project's own."""
    return Plugins.discover(builtins=(), third_parties=candidates, environ=environ)


def scheme(name: str) -> Scheme:
    """A scheme record."""
    return Scheme(name=name, summary="A scheme.", bits_per_weight="8", weight_class="fake:Weight")


def convention(name: str, *, overrides: tuple[str, ...] = ()) -> Convention:
    """A convention record that reads nothing."""
    form = Form(
        scheme="bf16",
        tensors=(TensorForm(suffix="weight", dtypes=("BF16",), shapes=("[N, K]",), role="weight"),),
        formula="w = weight",
        source="a test",
    )
    return Convention(
        name=name,
        summary="A convention.",
        forms=(form,),
        declare=lambda files: None,
        read=lambda claim, source: None,  # type: ignore[arg-type, return-value]
        overrides=overrides,
    )


def schemes(*names: str) -> dict[str, Hook]:
    """The hook that returns scheme records of these names."""
    return {"vtensors_schemes": lambda: [scheme(name) for name in names]}


def conventions(*records: Convention) -> dict[str, Hook]:
    """The hook that returns these conventions."""
    return {"vtensors_conventions": lambda: list(records)}


def status_of(plugins: Plugins, name: str) -> PluginStatus:
    """The status of the one plugin of that name."""
    (status,) = (status for status in plugins.statuses if status.name == name)
    return status
