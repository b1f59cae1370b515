"""Where a checkpoint keeps its text model: the prefix of its module names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from vtensors.errors import ArchitectureError
from vtensors.records import Waiver

KNOWN_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
HEAD_NAMES = ("lm_head", "model.lm_head", "language_model.lm_head")

_VISION = "vision tower: text path only"
_MTP = "multi-token prediction: not used"

# Prefixes of tensors that no text model needs, wherever the rest lies.
WAIVERS: tuple[Waiver, ...] = (
    *(
        Waiver(prefix=prefix, reason=_VISION)
        for prefix in (
            "model.visual.",
            "visual.",
            "model.vision_tower.",
            "vision_tower.",
            "model.multi_modal_projector.",
            "multi_modal_projector.",
        )
    ),
    *(
        Waiver(prefix=prefix, reason=_MTP)
        for prefix in ("mtp.", "model.mtp.", "model.language_model.mtp.", "language_model.mtp.")
    ),
)

_ROTARY = "rotary frequencies: computed from config.json"
_INV_FREQ = "rotary_emb.inv_freq"
_ANCHOR = re.compile(r"((?:[^.]+\.)*?)(layers\.\d+\.|embed_tokens$)")


def waivers_for(names: Iterable[str]) -> tuple[Waiver, ...]:
    """`WAIVERS` and one for each stored table of rotary frequencies among the names."""
    tables = sorted(name for name in names if name.endswith(_INV_FREQ))
    return (*WAIVERS, *(Waiver(prefix=name, reason=_ROTARY) for name in tables))


def find_prefix(names: Iterable[str]) -> str:
    """The one prefix under which the layers and the embeddings lie.

    names: module names of the checkpoint. Raises ArchitectureError where a prefix is unknown, or where two
    would give the same weights. Without a layer or embeddings it is `model.`, and every weight is missing.
    """
    waived = tuple(waiver.prefix for waiver in WAIVERS)
    found: dict[str, str] = {}
    for name in names:
        match = _ANCHOR.match(name)
        if match and match[1] not in found and not name.startswith(waived):
            found[match[1]] = name
    for prefix, name in found.items():
        if prefix not in KNOWN_PREFIXES:
            raise ArchitectureError(
                f"unknown prefix '{prefix}', known: {', '.join(repr(known) for known in KNOWN_PREFIXES)}",
                tensor=name,
                fix="rename the tensors, or add an architecture plugin that knows the prefix",
            )
    if len(found) > 1:
        raise _two_names("prefixes", tuple(found), tuple(found.values()))
    return next(iter(found), "model.")


def find_head(names: Collection[str]) -> str | None:
    """The module name of the output head, None where there is none. Raises ArchitectureError on two."""
    found = tuple(name for name in HEAD_NAMES if name in names)
    if len(found) > 1:
        raise _two_names("names of the head", found, found)
    return found[0] if found else None


def _two_names(what: str, found: tuple[str, ...], examples: tuple[str, ...]) -> ArchitectureError:
    return ArchitectureError(
        f"two {what} give the same weights: {' and '.join(repr(item) for item in found[:2])}",
        seen=", ".join(examples[:2]),
        accepted="one of them",
        fix="remove one copy of the tensors from the checkpoint",
    )
