"""Compiled kernels on disk, keyed by everything that decides their content; safe with several processes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs

# Changes when the file layout or the meaning of a key changes.
LAYOUT = b"vtensors cubin 1\n"


def default_cache_folder(environ: dict[str, str] | None = None) -> Path:
    """`VT_CACHE_DIR`, else `$XDG_CACHE_HOME/vtensors`, else `~/.cache/vtensors`."""
    values = os.environ if environ is None else environ
    # As the switches are read: without blanks around it, and `~` is the user's home.
    asked = values.get("VT_CACHE_DIR", "").strip()
    if asked:
        return Path(asked).expanduser()
    return Path(values.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vtensors"


def cache_key(text: str, options: tuple[str, ...], toolkit: str, library: str) -> str:
    """SHA-256 over source text, options (the target is one), toolkit and library version; no path, no time."""
    digest = hashlib.sha256(LAYOUT)
    for part in (text, *options, toolkit, library):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@attrs.frozen(kw_only=True)
class CubinCache:
    """A folder of `<key>.cubin` files: layout line, SHA-256 of the image, the image.

    An entry that is damaged is made again. A folder that cannot be written is no error: nothing is kept.
    """

    folder: Path

    def get(self, key: str, make: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The image under key and whether it was on disk; made and stored where it was not."""
        path = self.folder / f"{key}.cubin"
        image = _read(path)
        if image is not None:
            return image, True
        image = make()
        self._store(path, image)
        return image, False

    def _store(self, path: Path, image: bytes) -> None:
        """Written beside and renamed, so that another process never sees half a file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=path.stem[:16], suffix=".tmp")
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(LAYOUT + hashlib.sha256(image).digest() + image)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    image = data[len(LAYOUT) + 32 :]
    if not data.startswith(LAYOUT) or hashlib.sha256(image).digest() != data[len(LAYOUT) : len(LAYOUT) + 32]:
        return None
    return image
