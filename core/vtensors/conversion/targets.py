"""`CONVENTION[:SCHEME]` as the user writes it, checked against the plugins that are there."""

from __future__ import annotations

from vtensors.conversion.deciding import PLAIN_DTYPES, Target
from vtensors.errors import RequestError
from vtensors.manager import Plugins


def parse_target(plugins: Plugins, text: str, *, drop_unused: bool = False) -> tuple[Target, str | None]:
    """(target, scheme or None). Raises RequestError naming what is accepted.

    text: `compressed-tensors`, `modelopt:nvfp4`, `plain:bf16`, ... drop_unused: as in `Target`.
    """
    name, _, scheme = text.partition(":")
    conventions = plugins.registry.conventions
    writable = {key: owned.record for key, owned in conventions.items() if owned.record.write is not None}
    record = writable.get(name)
    if record is None or record.write is None:
        known = "it can be read, not written" if name in conventions else "no convention has this name"
        raise RequestError(
            f"cannot convert to '{name}': {known}",
            seen=text,
            accepted=", ".join(sorted(writable)),
            fix="name one of these, or install the plugin that writes it",
        )
    schemes = record.write.schemes or tuple(PLAIN_DTYPES)
    if scheme and scheme not in (*schemes, *(PLAIN_DTYPES if name == "plain" else ())):
        raise RequestError(
            f"'{name}' cannot hold this scheme",
            seen=scheme,
            accepted=", ".join(schemes),
            fix=f"pass --to {name}:SCHEME with one of these",
        )
    return Target(convention=record, writer=record.write, drop_unused=drop_unused), scheme or None
