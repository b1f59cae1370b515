"""`vtensors quantize`: codes and scales for an unquantized checkpoint, by a recipe."""

from __future__ import annotations

from pathlib import Path

import click

from vtensors.checkpoint import open_checkpoint
from vtensors.conversion import Assignment, parse_target, plan_conversion
from vtensors.errors import RequestError
from vtensors.modules import Module
from vtensors_plugins.commands.conversion_output import carry_out, parse_size
from vtensors_plugins.commands.lock_option import lock_option
from vtensors_plugins.quantization.assigning import QuantizeOptions, assign
from vtensors_plugins.quantization.recipes import BUILTIN, load_recipe

_NO_INPUT_SCALE = (
    "FP8 per tensor is declared with static activations, and no input_scale is written, because nothing was "
    "calibrated: engines that want one refuse or misread the file; vtensors runs it weight-only"
)


@click.command("quantize")
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--recipe", required=True, metavar="NAME|FILE", help=f"{', '.join(BUILTIN)}, or a JSON file.")
@click.option(
    "--to", "to", default="modelopt", show_default=True, metavar="CONVENTION", help="How to spell it."
)
@click.option("--revision", help="Branch, tag or commit of a repository.")
@lock_option(which="SOURCE")
@click.option("--share-scales", is_flag=True, help="One NVFP4 global scale for q|k|v, gate|up and qkv|z.")
@click.option("--mse", is_flag=True, help="Search each NVFP4 block's scale for the least squared error.")
@click.option("--four-over-six", is_flag=True, help="Let NVFP4 blocks put their largest value at 4 or at 6.")
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "modelopt", "compressed-tensors"]),
    help="Whose rounding is followed; float32 rounds once.  [default: that of --to]",
)
@click.option("--skip", is_flag=True, help="Leave modules as they are whose shape the scheme cannot take.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of weights.")
@click.option("--overwrite", is_flag=True, help="Replace DESTINATION when the new one is whole.")
@click.option("--dry-run", is_flag=True, help="Show every module's fate and the exact sizes; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str,
    destination: Path,
    recipe: str,
    to: str,
    revision: str | None,
    lock: str | None,
    share_scales: bool,
    mse: bool,
    four_over_six: bool,
    arithmetic: str | None,
    skip: bool,
    max_shard_size: str,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Quantize the weights of SOURCE, round to nearest, and write the checkpoint to DESTINATION.

    By default as the target's publisher rounds (--arithmetic says otherwise). Norms, embeddings, routers,
    conv1d, in_proj_a/b, lm_head, vision and mtp are left as they are unless the recipe says otherwise.
    """
    limit = parse_size(max_shard_size)
    rules = load_recipe(recipe)
    checkpoint = open_checkpoint(source, revision, download=not dry_run, lock=lock)
    target, scheme = parse_target(checkpoint.plugins, to)
    if scheme is not None:
        raise RequestError(
            "the recipe decides the schemes",
            seen=f"--to {to}",
            accepted="--to CONVENTION",
            fix=f"give --to {to.partition(':')[0]}, and a recipe of that scheme",
        )
    options = QuantizeOptions(
        share_scales=share_scales, mse=mse, four_over_six=four_over_six, skip=skip, arithmetic=arithmetic
    )
    assigned = assign(checkpoint, rules, target, options)

    def lookup(module: Module) -> Assignment | None:
        return assigned.assignments.get(module.name)

    plan = plan_conversion(checkpoint, target, lookup, max_shard_bytes=limit)
    warnings = [f"left as it is: {name}: {reason}" for name, reason in assigned.skipped.items()]
    warnings += assigned.unused
    if to == "modelopt" and any(one.scheme == "fp8-tensor" for one in assigned.assignments.values()):
        warnings.append(_NO_INPUT_SCALE)
    carry_out(
        checkpoint,
        plan,
        destination,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
        warnings=tuple(warnings),
    )
