"""Whether a kernel works on this card: its self-test, run once per request and remembered where it passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import RequestError
from vtensors.kernel_candidates import rows_in_words, told
from vtensors.kernel_entries import DeviceIdentity, EntryFolder, entry_key
from vtensors.records import KernelRequest, KernelSpec

if TYPE_CHECKING:
    from vtensors.manager import Plugins

FOLDER = "verdicts"


def _never() -> bool:
    return False


@attrs.define(kw_only=True)
class Verdicts:
    """The self-tests of one device. One object per load and device.

    folder: the cache folder (`VT_CACHE_DIR`), None = remember in memory only; so it is without a device, too.
    versions: kernel -> distribution and version (`kernel_versions`). capturing: whether a CUDA graph is being
    captured now, in which nothing can be tested.
    """

    folder: Path | None = None
    device: DeviceIdentity | None = None
    versions: Mapping[str, str] = attrs.field(factory=dict)
    capturing: Callable[[], bool] = _never
    _known: dict[tuple[str, KernelRequest], str | None] = attrs.field(factory=dict, init=False)

    def failure(self, kernel: KernelSpec, request: KernelRequest) -> str | None:
        """Why the kernel does not work for the request here, None where its self-test passes.

        Launches the self-test unless it passed before: in this object, or on disk for the same kernel, version,
        request, fingerprint, card and driver. Failures are not kept on disk.
        Errors: RequestError where it would have to be launched inside of a graph capture.
        """
        if kernel.probe is None:
            return None
        asked = (kernel.name, request)
        if asked not in self._known:
            self._known[asked] = self._test(kernel, request, kernel.probe)
        return self._known[asked]

    def entry(
        self, kernel: KernelSpec, request: KernelRequest, folder: str
    ) -> tuple[EntryFolder, str] | None:
        """Where a fact about the kernel on this device is kept: folder and key; None = only in memory.

        Errors: whatever the kernel's fingerprint raises.
        """
        if self.folder is None or self.device is None:
            return None
        fingerprint = "" if kernel.fingerprint is None else kernel.fingerprint(request)
        version = self.versions.get(kernel.name, "")
        key = entry_key(kernel, request, self.device, version=version, fingerprint=fingerprint)
        return EntryFolder(folder=self.folder / folder), key

    def _test(
        self, kernel: KernelSpec, request: KernelRequest, probe: Callable[[KernelRequest], None]
    ) -> str | None:
        try:
            place = self.entry(kernel, request, FOLDER)
        except PLUGIN_FAILURES as problem:
            return f"failed to say what its self-test depends on: {told(problem)}"
        if place is not None and place[0].read(place[1]) == {"passed": True}:
            return None
        if self.capturing():
            raise RequestError(
                f"the kernel '{kernel.name}' cannot be tested while a CUDA graph is captured",
                seen=f"{request.op} on {request.scheme} weights, {rows_in_words(request.tokens)}",
                fix="bind every layer before the capture begins",
            )
        try:
            probe(request)
        except PLUGIN_FAILURES as problem:
            return f"failed its self-test{_built(kernel, request)}: {told(problem)}"
        if place is not None:
            place[0].write(place[1], {"passed": True})
        return None


def kernel_versions(plugins: Plugins) -> dict[str, str]:
    """Kernel -> distribution and version of the plugin that brings it."""
    versions = {status.name: f"{status.distribution} {status.version}" for status in plugins.statuses}
    return {name: versions.get(owned.plugin, "") for name, owned in plugins.registry.kernels.items()}


def _built(kernel: KernelSpec, request: KernelRequest) -> str:
    """What the kernel was built from, in brackets: a compiler that miscompiles is found by it."""
    if kernel.fingerprint is None:
        return ""
    try:
        return f" ({kernel.fingerprint(request)[:160]})"
    except PLUGIN_FAILURES:
        return ""
