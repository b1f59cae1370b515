"""Whether a config.json belongs to a family. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def family_matcher(
    model_types: tuple[str, ...], classes: tuple[str, ...]
) -> Callable[[Mapping[str, Any]], bool]:
    """A predicate on config.json: `model_type` is one of model_types; without one, a class name counts."""

    def matches(config: Mapping[str, Any]) -> bool:
        model_type = config.get("model_type")
        if isinstance(model_type, str):
            return model_type in model_types
        names = config.get("architectures")
        return isinstance(names, list | tuple) and any(name in classes for name in names)

    return matches
