"""The `VT_*` switches: declared by plugins, read from the environment once, typed and validated.

A command or a load reads all of them in one go (`Switches.read`) and passes the frozen result on; nothing
else in the project looks at `os.environ` for a `VT_*` name.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from vtensors.errors import SwitchError
from vtensors.records import Switch

KINDS = ("bool", "str", "path", "names", "seconds")
PREFIX = "VT_"

# These three decide which plugins are imported, so they are known before any plugin is.
BOOT_SWITCHES = (
    Switch(
        name="VT_PLUGINS",
        kind="names",
        default="",
        summary=(
            "Plugins to import, by plugin or distribution name: `name` allows only the named third-party "
            "plugins (built-in ones stay), `-name` leaves any plugin out, built-in ones too."
        ),
    ),
    Switch(
        name="VT_PREFER",
        kind="str",
        default="",
        summary="The plugin (or distribution) that wins where two provide the same name or claim one tensor.",
    ),
    Switch(
        name="VT_STRICT",
        kind="names",
        default="",
        summary=(
            "What is refused instead of reported: conflicts (declared against found), fallbacks (slow "
            "kernels), plugins (one that fails to load), files (stray shards), untested (kernels of a GPU "
            "without a self-test); 1 = all of them."
        ),
        accepted=("conflicts", "fallbacks", "plugins", "files", "untested"),
    ),
)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_NAME = re.compile(r"-?[A-Za-z0-9][A-Za-z0-9._-]*$")
_log = logging.getLogger("vtensors")

Value = bool | str | float | tuple[str, ...]


@attrs.frozen(kw_only=True)
class SwitchValue:
    """A switch with its parsed value. raw: the text of the environment, None where the variable is unset."""

    switch: Switch
    value: Value
    raw: str | None = None

    @property
    def source(self) -> str:
        """Where the value comes from: `environment` or `default`."""
        return "default" if self.raw is None else "environment"


@attrs.frozen(kw_only=True)
class Switches:
    """All declared switches as they stood when read. values: variable name -> SwitchValue."""

    values: Mapping[str, SwitchValue]

    @classmethod
    def read(
        cls,
        declared: Iterable[Switch],
        environ: Mapping[str, str] | None = None,
        *,
        told: set[str] | None = None,
    ) -> Switches:
        """The values of the declared switches in environ (default: the process environment).

        A set variable that starts with `VT_` and is not declared gives one warning line. told: as
        `warn_of_unknown` takes it. Raises SwitchError naming variable, value and accepted values.
        """
        environ = os.environ if environ is None else environ
        declared = tuple(declared)
        warn_of_unknown((switch.name for switch in declared), environ, told=told)
        return cls(values={switch.name: _read_one(switch, environ) for switch in declared})

    def flag(self, name: str) -> bool:
        """The value of a `bool` switch, its default where unset."""
        value = self._value(name, "bool").value
        return value is True

    def get(self, name: str) -> bool | None:
        """The value of a `bool` switch where it is set, None where it is not."""
        found = self._value(name, "bool")
        return None if found.raw is None else found.value is True

    def names(self, name: str) -> tuple[str, ...]:
        """The words of a `names` switch, in the order given, without repeats."""
        value = self._value(name, "names").value
        return value if isinstance(value, tuple) else ()

    def text(self, name: str) -> str:
        """The value of a `str` switch."""
        return str(self._value(name, "str").value)

    def seconds(self, name: str) -> float:
        """The value of a `seconds` switch."""
        value = self._value(name, "seconds").value
        return value if isinstance(value, float) else 0.0

    def path(self, name: str) -> Path | None:
        """The value of a `path` switch with `~` expanded, None where it is empty."""
        value = str(self._value(name, "path").value)
        return Path(value).expanduser() if value else None

    def _value(self, name: str, kind: str) -> SwitchValue:
        found = self.values.get(name)
        if found is None:
            raise SwitchError(
                f"the switch {name} is not declared by any enabled plugin",
                accepted=", ".join(sorted(self.values)),
                fix="declare it in a plugin's vtensors_switches(), or enable the plugin that does",
            )
        if found.switch.kind != kind:
            raise TypeError(f"{name} is a switch of kind {found.switch.kind}, not {kind}")
        return found


def warn_of_unknown(
    known: Iterable[str], environ: Mapping[str, str] | None = None, *, told: set[str] | None = None
) -> None:
    """One warning line for each set `VT_*` variable that is not known, with the nearest name and the known ones.

    told: variables that were warned of before; they are left out, and new ones are added.
    """
    environ = os.environ if environ is None else environ
    told = set() if told is None else told
    names = sorted(known)
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name in names or name in told:
            continue
        told.add(name)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        _log.warning(
            "%s is set, but no enabled plugin reads it%s (switches: %s)", name, hint, ", ".join(names)
        )


def parse_value(switch: Switch, text: str) -> Value:
    """The typed value of a switch's text. Raises SwitchError naming variable, value and accepted values."""
    text = text.strip()
    match switch.kind:
        case "bool":
            return _parse_bool(switch, text)
        case "names":
            return _parse_names(switch, text)
        case "seconds":
            return _parse_seconds(switch, text)
        case "str" | "path":
            if switch.accepted and text not in (*switch.accepted, switch.default):
                raise _refused(switch, text, " or ".join(switch.accepted))
            return text
        case _:
            raise SwitchError(
                f"the switch {switch.name} has an unknown kind", seen=switch.kind, accepted=", ".join(KINDS)
            )


def accepted_words(switch: Switch) -> str:
    """What a switch accepts, in words, for documentation and errors."""
    match switch.kind:
        case "bool":
            return f"{', '.join(_TRUE)} or {', '.join(_FALSE)}"
        case "names" if switch.accepted:
            return f"{', '.join(switch.accepted)} (comma separated), 1 = all, 0 = none"
        case "names":
            return "comma-separated names"
        case "path":
            return "a path"
        case "seconds":
            return "a number of seconds, 0 or more"
        case _:
            return " or ".join(switch.accepted) or "text"


def _read_one(switch: Switch, environ: Mapping[str, str]) -> SwitchValue:
    # An empty variable counts as unset: `VT_X= command` is how a shell user takes it away for one call.
    raw = environ.get(switch.name, "").strip() or None
    value = parse_value(switch, switch.default if raw is None else raw)
    return SwitchValue(switch=switch, value=value, raw=raw)


def _parse_bool(switch: Switch, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise _refused(switch, text, accepted_words(switch))


def _parse_seconds(switch: Switch, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value < math.inf:
        return value
    raise _refused(switch, text, accepted_words(switch))


def _parse_names(switch: Switch, text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if switch.accepted and words == ["1"]:
        return switch.accepted
    if switch.accepted and words == ["0"]:
        return ()
    for word in words:
        if switch.accepted and word not in switch.accepted:
            near = difflib.get_close_matches(word, switch.accepted, n=1)
            raise _refused(switch, text, accepted_words(switch), near[0] if near else None)
        if not _NAME.match(word):
            raise _refused(switch, text, "comma-separated names, each with an optional leading '-'")
    return tuple(dict.fromkeys(words))


def _refused(switch: Switch, text: str, accepted: str, near: str | None = None) -> SwitchError:
    return SwitchError(
        f"the environment variable {switch.name} has a value that is not accepted",
        seen=repr(text),
        accepted=accepted,
        fix=f"did you mean {near}?" if near else f"set {switch.name} to an accepted value or unset it",
    )
