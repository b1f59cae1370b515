"""The one error tree: everything that vtensors refuses on purpose is a `VtensorsError`."""

from __future__ import annotations


class VtensorsError(Exception):
    """Root of all errors raised on purpose.

    The message is composed of what went wrong and, where known: the file, the tensor or module,
    what was seen, what is accepted, and what to do. Each part stays readable as an attribute.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        seen: str | None = None,
        accepted: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = file
        self.tensor = tensor
        self.seen = seen
        self.accepted = accepted
        self.fix = fix
        where = ": ".join(part for part in (file, tensor) if part)
        details = [
            f"{label}: {text}"
            for label, text in (("seen", seen), ("accepted", accepted), ("what to do", fix))
            if text
        ]
        super().__init__("\n  ".join([f"{where}: {problem}" if where else problem, *details]))


class CheckpointError(VtensorsError):
    """A file, header, index or snapshot is damaged, incomplete or contradicts itself."""


class HubError(VtensorsError):
    """A repository, revision or cached snapshot cannot be resolved."""


class DeclarationError(VtensorsError):
    """config.json or hf_quant_config.json says something unknown or impossible."""


class ClaimError(VtensorsError):
    """Tensors that no convention accepts, that two conventions claim, or that nothing consumes."""


class ConflictError(VtensorsError):
    """Declared and found disagree and `VT_STRICT=conflicts` is set."""


class WeightValueError(VtensorsError):
    """Scales or codes hold values that no writer means: NaN, infinite, zero or negative scales."""


class ArchitectureError(VtensorsError):
    """No architecture plugin knows the model, or its tensors do not fit it."""


class PluginError(VtensorsError):
    """A plugin could not be imported, registered or returned something that is not a record."""


class SwitchError(VtensorsError):
    """A `VT_*` environment variable holds a value that is not accepted."""


class OutputError(VtensorsError):
    """What is written cannot be: no space, no permission, a place that must not be written to."""


class LockError(VtensorsError):
    """A checkpoint is not the one that was locked, or the lock file cannot be read.

    moved: one sentence for everything that moved; empty for a lock file that cannot be read.
    """

    moved: tuple[str, ...] = ()


class DeviceError(VtensorsError, RuntimeError):
    """The device failed: out of memory in a step, an error of CUDA, or a self-test that never ended.

    Every request that was in work has ended. A RuntimeError too, as torch's own are; the cause is chained.
    """


class RequestError(VtensorsError):
    """An argument of the Python API or the command line cannot be served."""
