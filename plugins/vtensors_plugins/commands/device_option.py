"""The device that `kernels` and `explain` speak of: one that is here, or one that is only assumed. Torch-free."""

from __future__ import annotations

from typing import Any

import attrs

from vtensors.counts import counted
from vtensors.errors import RequestError
from vtensors_kernels.compiling.architectures import COMPILED, PORTABLE, capability_of, state_of, target_of
from vtensors_kernels.compiling.devices import CudaDevice, find_devices

ASSUMED = "assumed, not probed"


@attrs.frozen(kw_only=True)
class ReportDevice:
    """A device to report on.

    name: `cpu`, `cuda:0`. capability: (major, minor), None on a CPU. product: what the driver calls it.
    assumed: whether it is only asked about. note: why the report is not of a GPU, where nobody said which.
    """

    name: str
    capability: tuple[int, int] | None = None
    product: str = ""
    assumed: bool = False
    note: str = ""

    @property
    def target(self) -> str:
        """`cpu`, or what kernels are compiled for: `sm_121a`, `compute_80` for a device newer than this version."""
        return "cpu" if self.capability is None else target_of(self.capability)

    @property
    def state(self) -> str | None:
        """Whether compiled kernels were run on such a device: `run` or `compiled, not run`; None for a CPU."""
        return None if self.capability is None else state_of(self.target)

    @property
    def is_probed(self) -> bool:
        """Whether kernels can be tested on it: a GPU that is here."""
        return self.capability is not None and not self.assumed

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "device": self.name,
            "target": self.target,
            "capability": None if self.capability is None else list(self.capability),
            "product": self.product or None,
            "assumed": self.assumed,
            "state": self.state,
            "note": self.note or None,
        }

    def headline(self) -> str:
        """One line: what the device is, whether it is here, whether compiled kernels were run on such a one."""
        facts = [
            self.product,
            ASSUMED if self.assumed else "",
            f"kernels for {self.target}: {state_words(self.state)}" if self.state else "",
        ]
        if self.target == PORTABLE and self.capability is not None:
            major, minor = self.capability
            facts.insert(0, f"sm_{major}{minor}, newer than this version: portable code")
        told = "; ".join(fact for fact in facts if fact)
        return f"{self.target}: {told}" if told else self.target


def state_words(state: str) -> str:
    """`run` and `compiled, not run` for a person."""
    return "run on this architecture" if state == "run" else state


def report_device(device: str | None, assume: str | None) -> ReportDevice:
    """The device that the options name; by default the first GPU, else the CPU with a note why.

    device: `cpu`, `cuda`, `cuda:1` or `1`. assume: `cpu` or a target such as `sm_121a`, present or not.
    Errors: RequestError for both at once, a word that is neither, a target below sm_80, a device that is absent.
    """
    if device is not None and assume is not None:
        raise RequestError(
            "--device and --assume cannot be combined",
            seen="both",
            accepted="one of the two",
            fix="leave one of them out",
        )
    if assume is not None:
        return _assumed(assume)
    if device == "cpu":
        return ReportDevice(name="cpu")
    found = find_devices()
    if device is None:
        if isinstance(found, str):
            return ReportDevice(name="cpu", note=f"{found}; --assume shows a GPU that is not here")
        return _here(found[0])
    index = device.removeprefix("cuda").removeprefix(":") or "0"
    if not index.isdecimal():
        raise RequestError(
            "there is no such device",
            seen=f"--device {device}",
            accepted="cpu, cuda, cuda:<index>, <index>",
            fix="name one of these",
        )
    if isinstance(found, str) or int(index) >= len(found):
        raise RequestError(
            "there is no such CUDA device",
            seen=f"--device {device}: {found if isinstance(found, str) else counted(len(found), 'device')}",
            accepted="cpu, or a device that the driver shows",
            fix="use --assume sm_90a (or another target) to see what would be chosen there",
        )
    return _here(found[int(index)])


def _assumed(word: str) -> ReportDevice:
    if word == "cpu":
        return ReportDevice(name="cpu", assumed=True)
    try:
        capability = capability_of(word)
        target_of(capability)
    except RequestError as problem:
        raise RequestError(
            "--assume needs a device that kernels may be made for",
            seen=word,
            accepted=f"cpu, {', '.join(COMPILED)}, or a newer sm_<number>",
            fix="name one of these, or leave --assume out for the device that is here",
        ) from problem
    return ReportDevice(name="cuda:0", capability=capability, assumed=True)


def _here(device: CudaDevice) -> ReportDevice:
    target_of(device.capability)
    return ReportDevice(name=f"cuda:{device.index}", capability=device.capability, product=device.name)
