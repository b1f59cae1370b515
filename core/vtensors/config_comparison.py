"""Which keys of the configuration files differ; lists of modules are compared entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.snapshot import Snapshot

FILES = (CONFIG, HF_QUANT, "generation_config.json")
# Keys that name modules: their entries are counted and named, not printed whole.
_MODULE_LISTS = ("quantized_layers", "ignore", "exclude_modules", "modules_to_not_convert", "targets")
_ABSENT = object()


@attrs.frozen(kw_only=True)
class ConfigChange:
    """One key that differs. key: dotted path, `` for the file as a whole. before, after: values as written,
    None where the key or the file is absent (`missing` says on which side), the number of entries for lists
    of modules.

    added, removed, altered: entries of such lists.
    """

    file: str
    key: str
    before: Any
    after: Any
    missing: str = ""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same facts as JSON values."""
        return attrs.asdict(self)


def config_changes(before: Snapshot, after: Snapshot) -> tuple[ConfigChange, ...]:
    """Differences of config.json, hf_quant_config.json and generation_config.json, key by key.

    Errors: DeclarationError for a file that is not one JSON object.
    """
    return tuple(
        change
        for file in FILES
        for change in compare_configs(file, before.read_json(file), after.read_json(file))
    )


def compare_configs(
    file: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Iterator[ConfigChange]:
    """Differences of one file's two states, None being an absent file."""
    if before is None or after is None:
        if before is not after:
            missing = "before" if before is None else "after"
            yield ConfigChange(file=file, key="", before=None, after=None, missing=missing)
        return
    yield from _compare(file, "", before, after)


def _compare(
    file: str, path: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[ConfigChange]:
    for key in [*before, *(key for key in after if key not in before)]:
        place = f"{path}.{key}" if path else key
        one, two = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if one is not _ABSENT and two is not _ABSENT and _same(one, two):
            continue
        if key in _MODULE_LISTS and (entries := _entry_change(file, place, one, two)) is not None:
            # A list in another order says the same.
            if entries.missing or entries.added or entries.removed or entries.altered:
                yield entries
        elif isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _compare(file, place, one, two)
        else:
            missing = "before" if one is _ABSENT else "after" if two is _ABSENT else ""
            yield ConfigChange(
                file=file,
                key=place,
                before=None if one is _ABSENT else one,
                after=None if two is _ABSENT else two,
                missing=missing,
            )


def _same(one: object, two: object) -> bool:
    # In Python 1 == True == 1.0; in a configuration they are three values.
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return type(one) is type(two) and one == two


def _entry_change(file: str, place: str, before: object, after: object) -> ConfigChange | None:
    one, two = _entries(before), _entries(after)
    if one is None or two is None:
        return None
    return ConfigChange(
        file=file,
        key=place,
        before=None if before is _ABSENT else len(one),
        after=None if after is _ABSENT else len(two),
        missing="before" if before is _ABSENT else "after" if after is _ABSENT else "",
        added=tuple(name for name in two if name not in one),
        removed=tuple(name for name in one if name not in two),
        altered=tuple(name for name in two if name in one and not _same(one[name], two[name])),
    )


def _entries(value: object) -> Mapping[str, Any] | None:
    """Entry -> what is said of it; None for what is neither an object nor a list of strings."""
    if value is _ABSENT or value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return dict.fromkeys(value)
    return None
