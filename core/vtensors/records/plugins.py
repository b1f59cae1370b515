"""Who a plugin is."""

from __future__ import annotations

import attrs

API_VERSION = 1


@attrs.frozen(kw_only=True)
class PluginInfo:
    """Who a plugin is. api_version: the `API_VERSION` it was written for."""

    name: str
    summary: str
    api_version: int = API_VERSION
