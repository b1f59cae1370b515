"""Small facts about kernels on disk: keyed by all that decides them, safe with several processes.

One fact is one file `<SHA-256 of the key>.json` that repeats its key. An entry that is damaged, of another layout or
of another key counts as absent. A folder that cannot be written is no error: nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from vtensors.kernel_targets import device_type
from vtensors.records import KernelRequest, KernelSpec

# Changes when the file layout or the meaning of a key changes.
LAYOUT = 1


@attrs.frozen(kw_only=True)
class DeviceIdentity:
    """One card. name: for people. uuid: of the card itself. driver: its version."""

    name: str
    uuid: str
    driver: str


def entry_key(
    kernel: KernelSpec,
    request: KernelRequest,
    device: DeviceIdentity,
    *,
    version: str,
    fingerprint: str,
) -> str:
    """The key of a fact about a kernel: canonical JSON of everything that it depends on.

    version: of the distribution that brings the kernel. The card stands for itself: its index in this process,
    paths and times are no part of the key.
    """
    asked = attrs.asdict(request) | {
        "device": device_type(request.device),
        "traits": sorted(request.traits),
    }
    return json.dumps(
        {
            "kernel": kernel.name,
            "version": version,
            "request": asked,
            "fingerprint": fingerprint,
            "uuid": device.uuid,
            "driver": device.driver,
        },
        sort_keys=True,
    )


def mark_key(kernel: KernelSpec, device: DeviceIdentity, *, version: str, fingerprint: str) -> str:
    """The key of what stands against a kernel on a card, whatever the request: canonical JSON, as of `entry_key`."""
    return json.dumps(
        {
            "self_tests_of": kernel.name,
            "version": version,
            "fingerprint": fingerprint,
            "uuid": device.uuid,
            "driver": device.driver,
        },
        sort_keys=True,
    )


def entry_text(key: str, fact: Mapping[str, object]) -> str:
    """What a file holds of the fact under key."""
    return json.dumps({"layout": LAYOUT, "key": key, "fact": fact, "sum": _sum(key, fact)})


def fact_of(text: str, key: str) -> Mapping[str, object] | None:
    """The fact under key in a file's text, None where there is none that can be trusted."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("layout") != LAYOUT or found.get("key") != key:
        return None
    fact = found.get("fact")
    return fact if isinstance(fact, dict) and found.get("sum") == _sum(key, fact) else None


@attrs.frozen(kw_only=True)
class EntryFolder:
    """A folder of facts. A fact is a JSON object of numbers and text."""

    folder: Path

    def read(self, key: str) -> Mapping[str, object] | None:
        """The fact under key, None where there is none that can be trusted."""
        try:
            text = self.path(key).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return fact_of(text, key)

    def write(self, key: str, fact: Mapping[str, object]) -> None:
        """Keep the fact: written beside and renamed, so that another process never sees half a file."""
        text = entry_text(key, fact)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.path(key))
        except OSError:
            Path(name).unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """The file of the fact under key."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _sum(key: str, fact: Mapping[str, object]) -> str:
    return hashlib.sha256(f"{key}\n{json.dumps(fact, sort_keys=True)}".encode()).hexdigest()
