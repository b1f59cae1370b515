"""A plugin that says who it is and then returns something else than records."""

from vtensors import PluginInfo, hookimpl


@hookimpl
def vtensors_plugin():
    return PluginInfo(name="returns-rubbish", summary="Returns rubbish.")


@hookimpl
def vtensors_schemes():
    return [{"name": "int3"}]
