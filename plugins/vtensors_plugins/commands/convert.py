"""`vtensors convert`: a checkpoint in another convention, or in another scheme of one."""

from __future__ import annotations

from pathlib import Path

import click

from vtensors.checkpoint import Checkpoint, open_checkpoint
from vtensors.conversion import Assignment, Target, parse_target, plan_conversion
from vtensors.errors import RequestError
from vtensors.modules import Module, is_quantized
from vtensors.records import EncodeOptions
from vtensors_plugins.commands.conversion_output import carry_out, parse_size
from vtensors_plugins.commands.lock_option import lock_option


@click.command("convert")
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--to", "to", required=True, metavar="CONVENTION[:SCHEME]", help="What to write, as above.")
@click.option("--revision", help="Branch, tag or commit of a repository.")
@lock_option(which="SOURCE")
@click.option(
    "--allow-requantize", is_flag=True, help="Allow codes to be rounded into codes of another scheme."
)
@click.option("--drop-unused-scales", is_flag=True, help="Leave out input scales of weight-only modules.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of weights.")
@click.option("--overwrite", is_flag=True, help="Replace DESTINATION when the new one is whole.")
@click.option("--dry-run", is_flag=True, help="Show every module's fate and the exact sizes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str,
    destination: Path,
    to: str,
    revision: str | None,
    lock: str | None,
    allow_requantize: bool,
    drop_unused_scales: bool,
    max_shard_size: str,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE to the directory DESTINATION in another convention.

    `--to compressed-tensors` and `--to modelopt` keep each module's scheme: codes and block scales are copied
    bit for bit. `--to plain:bf16` makes values of them, `--to hf-fp8:fp8-block` codes of another scheme.
    """
    limit = parse_size(max_shard_size)
    checkpoint = open_checkpoint(source, revision, download=not dry_run, lock=lock)
    target, scheme = parse_target(checkpoint.plugins, to, drop_unused=drop_unused_scales)
    assignments = _assignments(checkpoint, target, scheme)

    def assign(module: Module) -> Assignment | None:
        return assignments.get(module.name)

    plan = plan_conversion(
        checkpoint,
        target,
        assign,
        allow_requantize=allow_requantize,
        max_shard_bytes=limit,
    )
    carry_out(checkpoint, plan, destination, dry_run=dry_run, overwrite=overwrite, as_json=as_json)


def _assignments(checkpoint: Checkpoint, target: Target, scheme: str | None) -> dict[str, Assignment]:
    """module -> its new scheme, for the quantized modules; empty where each keeps its own.

    Raises RequestError for a scheme where nothing is quantized: what to quantize is for a recipe to say.
    """
    if scheme is None:
        return {}
    options = EncodeOptions(arithmetic=target.writer.arithmetic.get(scheme, "float32"))
    found = {
        name: Assignment(scheme=scheme, options=options)
        for name, module in checkpoint.modules.items()
        if is_quantized(module.scheme)
    }
    if not found and is_quantized(scheme):
        raise RequestError(
            "nothing in the checkpoint is quantized",
            file=str(checkpoint.provenance.source),
            seen=f"--to {target.convention.name}:{scheme}",
            fix="vtensors quantize SOURCE DESTINATION --recipe NAME says which modules to quantize",
        )
    return found
