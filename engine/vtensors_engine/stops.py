"""Stop strings: text that streams up to one of them and never past it."""

from __future__ import annotations

import attrs


@attrs.define
class StopBuffer:
    """Passes text on, except what could still become a stop string.

    The stop string that is complete first wins, the longest of those that end together; so the result does
    not depend on how the text is cut into pieces.
    """

    stops: tuple[str, ...]
    hit: str | None = attrs.field(default=None, init=False)
    _held: str = attrs.field(default="", init=False)

    def push(self, piece: str) -> str:
        """The text that is safe to show, up to the stop string if one is complete now (then `hit` is set)."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self.stops if stop in text]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back; the text has ended without it becoming a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
