"""Whether a kernel works on this card: its self-test, run once per request and remembered where it passed.

A test that never ends, or that takes the device with it, stands against its kernel on that card from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from vtensors.containment import PLUGIN_FAILURES
from vtensors.errors import DeviceError, RequestError
from vtensors.kernel_candidates import rows_in_words, told
from vtensors.kernel_entries import DeviceIdentity, EntryFolder, entry_key, mark_key
from vtensors.kernel_targets import device_name
from vtensors.records import KernelRequest, KernelSpec
from vtensors.self_test_marks import SelfTestMark
from vtensors.self_test_runs import Runner, RunningTest, run_directly

if TYPE_CHECKING:
    from vtensors.manager import Plugins

FOLDER, MARKS = "verdicts", "self-tests"
_UNTESTED = "has no self-test, and VT_STRICT=untested refuses such kernels on a GPU"


def _never() -> bool:
    return False


def _nothing() -> None:
    return


@attrs.define(kw_only=True)
class Verdicts:
    """The self-tests of one device. One object per load and device.

    folder: the cache folder (`VT_CACHE_DIR`), None = remember in memory only; so it is without a device, too.
    versions: kernel -> distribution and version (`kernel_versions`). capturing: whether a CUDA graph is being
    captured now, in which nothing can be tested. run: runs a test within its time. check: raises where the device no
    longer answers. refuse_untested: kernels without a self-test fail (`VT_STRICT=untested`).
    """

    folder: Path | None = None
    device: DeviceIdentity | None = None
    versions: Mapping[str, str] = attrs.field(factory=dict)
    capturing: Callable[[], bool] = _never
    run: Runner = run_directly
    check: Callable[[], None] = _nothing
    refuse_untested: bool = False
    _known: dict[tuple[str, KernelRequest], str | None] = attrs.field(factory=dict, init=False)

    def failure(self, kernel: KernelSpec, request: KernelRequest) -> str | None:
        """Why the kernel does not work for the request here, None where its self-test passes.

        Launches the self-test unless it passed before: in this object, or on disk for the same kernel, version,
        request, fingerprint, card and driver. Failures are not kept on disk, but for those that say nothing themselves:
        a test that never ended here, in whatever process, or after which the device was lost.
        Errors: RequestError where it would have to be launched inside of a graph capture; DeviceError where the device
        does not answer any more: it did not end in time, or broke the device, now or before in this process.
        """
        if kernel.probe is None:
            return _UNTESTED if self.refuse_untested and kernel.untested else None
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
        version, fingerprint = self._build(kernel, request)
        key = entry_key(kernel, request, self.device, version=version, fingerprint=fingerprint)
        return EntryFolder(folder=self.folder / folder), key

    def _build(self, kernel: KernelSpec, request: KernelRequest) -> tuple[str, str]:
        """Version and fingerprint. Errors: whatever the kernel's fingerprint raises."""
        fingerprint = "" if kernel.fingerprint is None else kernel.fingerprint(request)
        return self.versions.get(kernel.name, ""), fingerprint

    def _mark(self, kernel: KernelSpec, request: KernelRequest) -> SelfTestMark | None:
        if self.folder is None or self.device is None:
            return None
        version, fingerprint = self._build(kernel, request)
        key = mark_key(kernel, self.device, version=version, fingerprint=fingerprint)
        return SelfTestMark(path=EntryFolder(folder=self.folder / MARKS).path(key), key=key)

    def _test(
        self, kernel: KernelSpec, request: KernelRequest, probe: Callable[[KernelRequest], None]
    ) -> str | None:
        try:
            place = self.entry(kernel, request, FOLDER)
            if place is not None and place[0].read(place[1]) == {"passed": True}:
                return None
            mark = self._mark(kernel, request)
        except PLUGIN_FAILURES as problem:
            return f"failed to say what its self-test depends on: {told(problem)}"
        if self.capturing():
            raise RequestError(
                f"the kernel '{kernel.name}' cannot be tested while a CUDA graph is captured",
                seen=f"{request.op} on {request.scheme} weights, {rows_in_words(request.tokens)}",
                fix="bind every layer before the capture begins",
            )
        condemned = None if mark is None else mark.take()
        if mark is not None and condemned is not None:
            if condemned.own:
                raise self._lost(kernel, request, f"the self-test {condemned.why}", mark, kept=True)
            again = f"delete {mark.path} to try it again"
            return f"failed its self-test{_built(kernel, request)}: on this card one {condemned.why}; {again}"
        try:
            # What went wrong before is not this kernel's.
            lost = self._silence(RunningTest())
            if lost is not None:
                raise DeviceError(f"no kernel can be tested: {lost}", fix="restart the process")
            failure = self._launch(kernel, request, lambda: probe(request), RunningTest(mark=mark))
        finally:
            if mark is not None:
                mark.release()
        if failure is None and place is not None:
            place[0].write(place[1], {"passed": True})
        return failure

    def _launch(
        self, kernel: KernelSpec, request: KernelRequest, test: Callable[[], None], running: RunningTest
    ) -> str | None:
        """Why the test fails, or None. Raises DeviceError where the device does not answer any more."""
        with running.going_on():
            try:
                if self.run(test, running):
                    return None
                why = "did not end in time"
            except PLUGIN_FAILURES as problem:
                lost = self._silence(running)
                if lost is None:
                    return f"failed its self-test{_built(kernel, request)}: {told(problem)}"
                why = f"took the device with it: {told(problem)}; {lost}"
        kept = running.mark is not None and running.mark.condemn(why)
        raise self._lost(kernel, request, f"the self-test {why}", running.mark, kept=kept)

    def _silence(self, running: RunningTest) -> str | None:
        """How the device fails to answer after a test that failed, None where it works."""
        try:
            return None if self.run(self.check, running) else "the device does not answer"
        except PLUGIN_FAILURES as problem:
            return told(problem)

    def _lost(
        self, kernel: KernelSpec, request: KernelRequest, why: str, mark: SelfTestMark | None, *, kept: bool
    ) -> DeviceError:
        card = "" if self.device is None else f" on {self.device.name}"
        later = f"restart the process with VT_KERNELS='*:!{kernel.name}'"
        if kept and mark is not None:
            later = (
                f"restart the process: this kernel will not be tried again on this card (delete {mark.path} to try it "
                "again; VT_SELF_TEST_SECONDS sets the time it has)"
            )
        return DeviceError(
            f"{kernel.name}{card}: {why}",
            seen=f"{request.op} on {request.scheme} weights, {rows_in_words(request.tokens)}, "
            f"for {device_name(request)}{_built(kernel, request)}",
            fix=later,
        )


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
