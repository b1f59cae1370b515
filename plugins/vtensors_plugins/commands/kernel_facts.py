"""Facts of the registered kernels for one device: whether each may serve it, and why not. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from vtensors.kernel_candidates import refusal_of, rows_in_words
from vtensors.kernel_rules import SWITCH, KernelRules
from vtensors.kernel_targets import reason_against, specificity
from vtensors.manager import Plugins
from vtensors.plugin_candidates import OWN_DISTRIBUTION
from vtensors.records import KernelRequest, KernelSpec
from vtensors.switches import Switches
from vtensors_kernels.ops import OPS
from vtensors_plugins.commands.device_option import ReportDevice

# What a layer may ask for, in the order tried: a kernel serves the device if it serves one of these.
_ACTIVATIONS = ("16bit", "fp4", "fp8-static", "fp8-dynamic")
_DTYPES = ("bfloat16", "float16", "float32")
_OP_NAMES = tuple(op.name for op in OPS)
# The card that the cost models of this distribution's kernels were fitted to, whatever the target.
MODELLED_FOR = "an H200"
# Of a kernel that nothing holds against the reference before it is used.
UNTESTED = "not self-tested"
# Stands for "anything that dequantizes".
_ANY_SCHEME = "bf16"


@attrs.frozen(kw_only=True)
class KernelFacts:
    """A kernel, who brings it, and what it is to the device. reason: why it cannot serve it, None if it can.

    state: `run` or `compiled, not run` for a compiled kernel of this distribution; None where that says nothing
    (plain torch, a CPU, a third party's). A kernel that nothing tests before it is used is `kernel.untested`.
    """

    kernel: KernelSpec
    plugin: str
    distribution: str
    reason: str | None
    state: str | None

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        kernel = self.kernel
        return {
            "name": kernel.name,
            "op": kernel.op,
            "schemes": list(kernel.schemes),
            "targets": list(kernel.targets),
            "layout": kernel.layout,
            "tokens": list(kernel.tokens),
            "numerics": kernel.numerics,
            "plugin": self.plugin,
            "distribution": self.distribution,
            "serves": self.reason is None,
            "reason": self.reason,
            "state": self.state,
            "self_tested": not kernel.untested,
        }

    @property
    def rows(self) -> str:
        """The range of M it serves: `M = 1..32`."""
        return rows_in_words(self.kernel.tokens)


def kernel_facts(plugins: Plugins, device: ReportDevice) -> list[KernelFacts]:
    """Every registered kernel, by op, then name."""
    owned = plugins.registry.kernels.values()
    return [
        KernelFacts(
            kernel=entry.record,
            plugin=entry.plugin,
            distribution=entry.distribution,
            reason=reason_against_device(entry.record, device),
            state=state_on(entry.record, entry.distribution, device),
        )
        for entry in sorted(owned, key=lambda entry: (entry.record.op, entry.record.name))
    ]


def require_known_names(plugins: Plugins, switches: Switches) -> None:
    """Raises SwitchError as a load would, where `VT_KERNELS` names no kernel or no scheme of the enabled plugins."""
    if SWITCH in switches.values:
        KernelRules.of(switches.text(SWITCH), plugins.registry)


def reason_against_device(kernel: KernelSpec, device: ReportDevice) -> str | None:
    """Why the kernel cannot serve the device for any of its schemes, or None; the shape is left open."""
    if kernel.op not in _OP_NAMES:
        return f"computes '{kernel.op}', which is no op; ops: {', '.join(_OP_NAMES)}"
    reasons = []
    for request in _requests(kernel, device):
        if specificity(kernel.targets, request) is None:
            return reason_against(kernel.targets, request)
        reason = refusal_of(kernel, request)
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[0] if reasons else "computes no scheme"


def state_on(kernel: KernelSpec, distribution: str, device: ReportDevice) -> str | None:
    """The state of a compiled kernel of this distribution on the device's target, None where there is none."""
    plain = "portable" in kernel.targets or specificity(kernel.targets, _request(kernel, device)) is None
    return None if plain or distribution != OWN_DISTRIBUTION else device.state


def modelled_for(kernel: KernelSpec, distribution: str) -> str | None:
    """The card that the kernel's cost model estimates for; None where that is not known, or it only orders."""
    return None if kernel.numerics == "reference" or distribution != OWN_DISTRIBUTION else MODELLED_FOR


def applies_to(kernel: KernelSpec, scheme: str) -> bool:
    """Whether the kernel computes the scheme at all."""
    return "*" in kernel.schemes or scheme in kernel.schemes


def takes_activations_of(kernel: KernelSpec, request: KernelRequest) -> bool:
    """Whether the kernel may run at the request's activation precision; False where it runs at others alone.

    Shape, dtype and what the weight brings are left open, and what this machine lacks does not count.
    """
    whole = attrs.evolve(
        request, op=kernel.op, shape=None, parts=(), traits=frozenset(), tokens=kernel.tokens
    )
    served = {
        activations
        for activations in _ACTIVATIONS
        for dtype in _DTYPES
        if refusal_of(kernel, attrs.evolve(whole, activations=activations, dtype=dtype, assumed=True)) is None
    }
    return not served or request.activations in served


def _requests(kernel: KernelSpec, device: ReportDevice) -> Iterator[KernelRequest]:
    for scheme in kernel.schemes:
        for activations in _ACTIVATIONS:
            for dtype in _DTYPES:
                yield attrs.evolve(
                    _request(kernel, device),
                    scheme=_ANY_SCHEME if scheme == "*" else scheme,
                    activations=activations,
                    dtype=dtype,
                )


def _request(kernel: KernelSpec, device: ReportDevice) -> KernelRequest:
    return KernelRequest(
        op=kernel.op,
        scheme=_ANY_SCHEME,
        activations="16bit",
        device=device.name,
        capability=device.capability,
        dtype="bfloat16",
        tokens=kernel.tokens,
        assumed=device.assumed,
    )
