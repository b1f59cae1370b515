"""What is known of kernels on a CUDA device: verdicts of self-tests and measured times, and of which card they are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from vtensors.checkpoint import Checkpoint
from vtensors.kernel_candidates import CostOf
from vtensors.kernel_entries import DeviceIdentity
from vtensors.measured_costs import MeasuredCosts
from vtensors.verdicts import Verdicts, kernel_versions
from vtensors_kernels.compiling.cubin_cache import default_cache_folder
from vtensors_kernels.time_limits import time_limit

# One line with the driver's exact release; CUDA's own number stays the same over many of them.
_DRIVER_RELEASE = Path("/proc/driver/nvidia/version")


def verdicts_for(checkpoint: Checkpoint, device: torch.device) -> Verdicts | None:
    """The verdicts of that device under `VT_CACHE_DIR`; None on a CPU, whose kernels need no test."""
    if device.type != "cuda":
        return None
    return Verdicts(
        folder=checkpoint.switches.path("VT_CACHE_DIR") or default_cache_folder(),
        device=device_identity(device),
        versions=kernel_versions(checkpoint.plugins),
        capturing=torch.cuda.is_current_stream_capturing,
        run=time_limit(checkpoint.switches, device),
        check=lambda: torch.cuda.synchronize(device),
        refuse_untested="untested" in checkpoint.switches.names("VT_STRICT"),
    )


def measured_costs(checkpoint: Checkpoint, verdicts: Verdicts | None) -> CostOf | None:
    """Times of kernels under `VT_AUTOTUNE=1`, kept beside the verdicts; None without the switch or a device."""
    if verdicts is None or not checkpoint.switches.flag("VT_AUTOTUNE"):
        return None
    from vtensors_kernels.random_weights import SCHEMES
    from vtensors_kernels.timing import measure

    return MeasuredCosts(verdicts=verdicts, measure=measure, schemes=SCHEMES).cost_of


def device_identity(device: torch.device) -> DeviceIdentity:
    """Name, UUID and driver of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return DeviceIdentity(name=found.name, uuid=str(found.uuid), driver=_driver())


def _driver() -> str:
    """What can be told of the driver; without the CUDA extra only its release."""
    told = []
    try:
        from cuda.bindings import driver
    except ImportError:
        pass
    else:
        told.append(str(int(driver.cuDriverGetVersion()[1])))
    with suppress(OSError):
        told += _DRIVER_RELEASE.read_text(encoding="utf-8", errors="replace").splitlines()[:1]
    return " ".join(told)
