"""Where ModelOpt's configuration contradicts itself: between two files, and between algorithms and config_groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vtensors.configs import CONFIG, HF_QUANT
from vtensors.counts import agreeing, counted
from vtensors.records import Conflict
from vtensors_plugins.conventions.modelopt_forms import ALGORITHMS
from vtensors_plugins.conventions.modelopt_sources import Source


def between_files(found: list[Source]) -> Iterator[Conflict]:
    """What the first source and the others say differently; the first is followed."""
    if len(found) < 2:
        return
    main = found[0]
    for other in found[1:]:
        places = f"{main.block.where} and {other.block.where}"
        if main.producer != other.producer and "modelopt" not in (main.producer, other.producer):
            yield _conflict(places, "producer", other.producer, main.producer, "neither decides anything")
        if main.algorithm and other.algorithm and main.algorithm.lower() != other.algorithm.lower():
            yield _conflict(places, "quant_algo", other.algorithm, main.algorithm, main.algorithm)
        if (main.kv or "none").upper() != (other.kv or "none").upper():
            yield _conflict(
                places,
                "KV cache",
                main.kv or "nothing",
                other.kv or "nothing",
                main.kv or other.kv or "nothing",
            )
        if main.layers is not None and other.layers is not None and dict(main.layers) != dict(other.layers):
            names = [n for n in {*main.layers, *other.layers} if main.layers.get(n) != other.layers.get(n)]
            example = min(names)
            yield _conflict(
                places,
                f"quantized_layers of {counted(len(names), 'module')}, for example '{example}'",
                f"{other.layers.get(example)}",
                f"{main.layers.get(example)}",
                f"{main.block.where} is followed",
                modules=len(names),
            )
        if set(main.excludes) != set(other.excludes):
            unlike = sorted(set(main.excludes) ^ set(other.excludes))
            yield _conflict(
                places,
                f"excluded modules ({len(unlike)} {agreeing(len(unlike), 'differs', 'differ')}, "
                f"for example '{unlike[0]}')",
                f"{counted(len(other.excludes), 'entry', 'entries')} in {HF_QUANT}",
                f"{counted(len(main.excludes), 'entry', 'entries')} in {CONFIG}",
                f"{main.block.where} is followed",
            )


def _conflict(places: str, what: str, says: str, instead: str, chosen: str, *, modules: int = 1) -> Conflict:
    return Conflict(where=f"{places}: {what}", says=says, instead=instead, chosen=chosen, modules=modules)


def against_groups(
    main: Source, layers: Mapping[str, Mapping[str, Any]] | None, algorithm: str | None
) -> Iterator[Conflict]:
    """config_groups that give activations which the algorithm of their targets does not have, or the reverse.

    NVFP4_AWQ is left out: its writer always describes it as 8-bit activations in groups of 128.
    """
    groups = main.block.values.get("config_groups")
    if not isinstance(groups, Mapping):
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            continue
        targets = group.get("targets") if isinstance(group.get("targets"), list) else []
        says = _group_activations(group.get("input_activations"))
        named = [(layers or {}).get(str(target)) for target in targets or []]
        algorithms = {str(entry.get("quant_algo")) for entry in named if entry and entry.get("quant_algo")}
        if not algorithms and algorithm and algorithm.lower() in ALGORITHMS:
            algorithms = {algorithm}
        for declared in sorted(algorithms):
            instead = ALGORITHMS.get(declared.lower(), ("", says))[1]
            if declared.lower() == "nvfp4_awq" or says == instead.split("-")[0]:
                continue
            yield Conflict(
                where=f"{main.block.where}: config_groups.{name}",
                says=f"input activations {says}",
                instead=f"{'quantized_layers' if named else 'quant_algo'} {declared}: {instead}",
                chosen=f"{declared}: {instead} (quantized_layers and quant_algo go before config_groups)",
                modules=sum(1 for e in named if e and str(e.get("quant_algo")) == declared) or 1,
            )


def _group_activations(values: Any) -> str:
    if not isinstance(values, Mapping):
        return "16bit"
    bits = values.get("num_bits")
    return {"4": "fp4", "8": "fp8"}.get(str(bits), f"{bits}-bit")
