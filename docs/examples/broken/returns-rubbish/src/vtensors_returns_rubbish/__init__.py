"""A plugin that says who it is and then returns something else than records."""

from vtensors.hookspecs import hookimpl
from vtensors.records import PluginInfo


@hookimpl
def vtensors_plugin():
    return PluginInfo(name="returns-rubbish", summary="Returns rubbish.")


@hookimpl
def vtensors_schemes():
    return [{"name": "int3"}]
