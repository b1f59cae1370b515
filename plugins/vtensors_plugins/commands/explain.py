"""`vtensors explain`: which kernel computes each weight of a checkpoint on a device, and why not another one."""

from __future__ import annotations

import json
from typing import Any

import attrs
import click

from vtensors.activations import MODES
from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.errors import RequestError
from vtensors.inspection import activation_warnings
from vtensors_kernels.compiling.nvrtc import find_toolkit
from vtensors_plugins.commands.device_option import ASSUMED, ReportDevice, report_device
from vtensors_plugins.commands.explain_lines import row_lines, total_line
from vtensors_plugins.commands.explain_rows import ExplainRow, Totals, explain_rows
from vtensors_plugins.commands.lock_option import lock_option
from vtensors_plugins.commands.schemes_table import hanging

DTYPES = ("bfloat16", "float16", "float32")
Times = dict[int, float | str]


@attrs.frozen(kw_only=True)
class Explanation:
    """What the command shows. notes: rules of `VT_KERNELS` that have no effect.

    in_vain: those of the notes that a load counts as fallbacks, and `VT_STRICT=fallbacks` refuses.
    warnings: surprises about activation precision, as a load tells them, and what is known against the compiler.
    times: per row, rows M -> microseconds or a reason; empty where not asked for.
    """

    checkpoint: Checkpoint
    device: ReportDevice
    dtype: str
    rows: tuple[ExplainRow, ...]
    notes: tuple[str, ...] = ()
    in_vain: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    times: tuple[Times, ...] = ()

    @property
    def totals(self) -> Totals:
        """Sums over all rows."""
        return Totals.of(self.rows)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        totals = self.totals
        groups = [row.to_json() for row in self.rows]
        for group, times in zip(groups, self.times, strict=False):
            group["measured_microseconds"] = {str(m): t for m, t in times.items()}
        return {
            "provenance": self.checkpoint.provenance.to_json(),
            "architecture": self.checkpoint.architecture_name,
            **self.device.to_json(),
            "probed": self.device.is_probed,
            "dtype": self.dtype,
            "kernels_switch": self.checkpoint.switches.text("VT_KERNELS"),
            "notes": list(self.notes),
            "in_vain": list(self.in_vain),
            "warnings": list(self.warnings),
            "groups": groups,
            "totals": {
                "weights": totals.weights,
                "fallbacks": totals.fallbacks,
                "on_reference": totals.on_reference,
                "stored_bytes": totals.stored,
                "prepared_bytes": totals.prepared if totals.complete else None,
            },
        }


@click.command("explain")
@click.argument("source", metavar="PATH")
@click.option("--revision", help="Branch, tag or commit of a repository.")
@click.option("--assume", metavar="TARGET", help="A device that need not be here: sm_90a, sm_121a, ..., cpu.")
@click.option(
    "--device", metavar="N", help="A device of this machine: cpu, cuda:1 or 1 (default: the first GPU)."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of activations (default: as a load takes it).")
@click.option("--activations", type=click.Choice(MODES), help="As for a load.")
@click.option("--timings", is_flag=True, help="Time each chosen kernel at M = 1, 8, 32 and 64 on the GPU.")
@lock_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    source: str,
    revision: str | None,
    assume: str | None,
    device: str | None,
    dtype: str | None,
    activations: str | None,
    timings: bool,
    lock: str | None,
    as_json: bool,
) -> None:
    """Show which kernel computes each weight of PATH on a device, from the headers alone.

    On a GPU that is here, what is chosen is also tested, as a load would. Exit 0: every quantized weight has a
    kernel; 1: some fall back to the reference on a GPU, or have none that VT_KERNELS asks for; 2: refused.
    """
    chosen = report_device(device, assume)
    if timings and (chosen.assumed or chosen.capability is None):
        raise RequestError(
            "--timings needs a GPU that is here",
            seen=f"{chosen.target} ({ASSUMED})"
            if chosen.assumed
            else f"{chosen.target}: {chosen.note}".rstrip(": "),
            fix="run it on the machine in question, without --assume",
        )
    checkpoint = open_checkpoint(source, revision, download=False, lock=lock)
    found = explained(checkpoint, chosen, dtype=dtype, activations=activations, timings=timings)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        from rich.console import Console

        click.echo("\n".join(text_lines(found, Console().width)))
    if found.totals.fallbacks or found.in_vain:
        context.exit(1)


def explained(
    checkpoint: Checkpoint,
    device: ReportDevice,
    *,
    dtype: str | None = None,
    activations: str | None = None,
    timings: bool = False,
) -> Explanation:
    """The plan of every weight. Nothing is launched unless the device is a GPU that is here.

    Errors: those of a load, as far as headers show them; VtensorsError where no kernel serves a weight.
    """
    from vtensors_plugins.architectures.checkpoint_inputs import kernel_rules, registered_kernels
    from vtensors_plugins.architectures.outline import outline

    groups = outline(
        checkpoint,
        device=device.name,
        capability=device.capability,
        dtype=dtype,
        activations=activations,
        assumed=device.assumed,
    )
    times: list[Times] = []
    doubts: list[str] = []
    if device.is_probed:
        from vtensors_plugins.commands.explain_probes import probed

        toolkit = find_toolkit()
        doubt = None if isinstance(toolkit, str) else toolkit.doubt(device.target)
        doubts += [] if doubt is None else [doubt]
        groups = probed(checkpoint, groups)
    rows = explain_rows(checkpoint, groups, device)
    if timings:
        from vtensors_plugins.commands.explain_probes import row_times

        times = [row_times(row, checkpoint) for row in rows]
    asked = {(op, group.request.scheme) for group in groups for op in (group.asked, group.request.op)}
    rules, registered = kernel_rules(checkpoint), registered_kernels(checkpoint)
    return Explanation(
        checkpoint=checkpoint,
        device=device,
        dtype=rows[0].request.dtype if rows else "",
        rows=rows,
        notes=rules.notes(asked, registered),
        in_vain=rules.in_vain(asked, registered),
        warnings=(*activation_warnings(checkpoint, checkpoint.activation_request(activations)), *doubts),
        times=tuple(times),
    )


def text_lines(found: Explanation, width: int) -> list[str]:
    """What the command prints."""
    kernels = {name: owned.record for name, owned in found.checkpoint.plugins.registry.kernels.items()}
    device = found.device
    head = f"{found.checkpoint.architecture_name} in {found.dtype} on {device.headline()}"
    lines = [hanging("", text, width) for text in (head, device.note) if text]
    lines += [hanging("warning: ", text, width) for text in found.warnings]
    rules = found.checkpoint.switches.text("VT_KERNELS")
    if rules:
        lines.append(f"VT_KERNELS={rules}")
    for note in found.notes:
        lines.append(hanging("fallback: " if note in found.in_vain else "", note, width))
    for index, row in enumerate(found.rows):
        times = found.times[index] if found.times else None
        lines += ["", *row_lines(row, kernels, width, times)]
    return [*lines, "", total_line(found.totals, len(found.in_vain))]
