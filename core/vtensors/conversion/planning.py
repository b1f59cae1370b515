"""The plan of a conversion, from headers alone: every module's fate, every file of the output and its size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from vtensors.checkpoint import Checkpoint
from vtensors.configs import BLOCK_KEYS, CONFIG, HF_QUANT
from vtensors.conversion.deciding import Target, decide, keep_expert
from vtensors.conversion.kv_units import kv_units
from vtensors.conversion.layout import GIGABYTE, PlannedShard, index_file, pack_shards
from vtensors.conversion.loose import loose_units
from vtensors.conversion.side_files import SideFile, side_files
from vtensors.conversion.units import Assignment, Fate, Unit
from vtensors.counts import counted
from vtensors.errors import RequestError
from vtensors.modules import Module
from vtensors.plugin_candidates import own_version
from vtensors.records import WrittenCheckpoint

DEFAULT_SHARD_BYTES = 5 * GIGABYTE
_HEAD = "lm_head"


@attrs.frozen(kw_only=True)
class ConversionPlan:
    """units: modules and loose tensors in output order. shards: files of weights. files: the other files.

    left_out: sentences for what is not written. notes: sentences for the user.
    fingerprint: hexadecimal digest of the source's state and of everything decided here; equal plans may
    continue one another's work.
    """

    source: str
    target: str
    units: tuple[Unit, ...]
    shards: tuple[PlannedShard, ...]
    files: tuple[SideFile, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of the output."""
        return sum(shard.size for shard in self.shards) + sum(file.size for file in self.files)


def plan_conversion(
    checkpoint: Checkpoint,
    target: Target,
    assign: Callable[[Module], Assignment | None],
    *,
    allow_requantize: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ConversionPlan:
    """The plan. No weight byte is read but zero points and scalars that become their reciprocal.

    assign: module -> its new scheme, None = it keeps its own.
    Raises what `Checkpoint.check` raises; RequestError, naming the first module and field and how many more,
    for what the target cannot express and for a second rounding that is not allowed.
    """
    checkpoint.check()
    units = list(_module_units(checkpoint, target, assign))
    _refuse_lossy(units, allow_requantize)
    units.extend(loose_units(checkpoint, target))
    units.extend(kv_units(checkpoint, target))
    units.sort(key=_source_position(checkpoint))
    _refuse_repeats(units)
    version = own_version()
    kv = checkpoint.kv_cache
    configured = target.writer.configure(
        WrittenCheckpoint(
            config=_bare_config(checkpoint.config),
            weights=tuple(unit.weight for unit in units if unit.weight is not None),
            unquantized=_unquantized(checkpoint, units),
            kv_cache=kv.algorithm if kv is not None else None,
            version=version,
        )
    )
    shards = pack_shards([unit.tensors for unit in units], max_shard_bytes)
    files, left_files = side_files(
        checkpoint, _kept_configs(checkpoint, units, configured), index_file(shards)
    )
    return ConversionPlan(
        source=str(checkpoint.provenance.source),
        target=target.convention.name,
        units=tuple(units),
        shards=shards,
        files=files,
        left_out=(*(text for unit in units for text in unit.left_out), *left_files),
        notes=checkpoint.snapshot.warnings,
        fingerprint=_fingerprint(checkpoint, units, shards, files, version),
    )


def _source_position(checkpoint: Checkpoint) -> Callable[[Unit], int]:
    """Units in the order of the source's tensors, so that both are read and written in one sweep."""
    places = {id(info): place for place, info in enumerate(checkpoint.snapshot.tensors.values())}

    def position(unit: Unit) -> int:
        infos = [part.info for part in unit.parts.values()]
        if unit.remake is not None:
            infos.extend(unit.remake.claim.roles.values())
        return min((places[id(info)] for info in infos), default=0)

    return position


def _module_units(
    checkpoint: Checkpoint, target: Target, assign: Callable[[Module], Assignment | None]
) -> Iterator[Unit]:
    """One unit per module; one for all experts of a stacked tensor that stays as it is."""
    refused: list[RequestError] = []
    stacked: dict[str, list[Unit]] = {}
    for module in checkpoint.modules.values():
        try:
            unit = decide(checkpoint, module, target, assign(module))
        except RequestError as problem:
            refused.append(problem)
            continue
        if module.claim.part is None:
            yield unit
        else:
            stacked.setdefault(module.claim.roles["codes"].name, []).append(unit)
    if refused:
        raise _with_count(refused)
    emitted: set[str] = set()
    for tensor, experts in stacked.items():
        if all(unit.fate is Fate.KEPT for unit in experts):
            yield _whole(tensor, experts[0], emitted)
        else:
            modules = checkpoint.modules
            yield from (keep_expert(modules[u.name], target) if u.fate is Fate.KEPT else u for u in experts)


def _whole(tensor: str, first: Unit, emitted: set[str]) -> Unit:
    """The stacked tensor with its companions, each written once. emitted: names so far."""
    kept = tuple(one for one in first.tensors if one.name not in emitted)
    emitted.update(one.name for one in kept)
    parts = {one.role: first.parts[one.role] for one in kept}
    return attrs.evolve(first, name=tensor, tensors=kept, parts=parts)


def _with_count(refused: list[RequestError]) -> RequestError:
    first = refused[0]
    others = [str(problem.tensor) for problem in refused[1:4]]
    more = f" (and {counted(len(refused) - 1, 'more module')}: {', '.join(others)}" if others else ""
    more += " ...)" if len(refused) > 4 else ")" if more else ""
    return RequestError(
        first.problem + more,
        file=first.file,
        tensor=first.tensor,
        seen=first.seen,
        accepted=first.accepted,
        fix=first.fix,
    )


def _refuse_lossy(units: list[Unit], allowed: bool) -> None:
    again = [unit for unit in units if unit.fate is Fate.REQUANTIZED]
    if again and not allowed:
        raise RequestError(
            f"{counted(len(again), 'module')} would be rounded a second time",
            tensor=again[0].name,
            seen=f"{again[0].before} to {again[0].after}",
            accepted="schemes that stay as they are",
            fix="give --allow-requantize, or quantize the unquantized checkpoint instead",
        )


def _refuse_repeats(units: list[Unit]) -> None:
    seen: dict[str, str] = {}
    for unit in units:
        for tensor in unit.tensors:
            first = seen.setdefault(tensor.name, unit.name)
            if first != unit.name or sum(t.name == tensor.name for t in unit.tensors) > 1:
                raise RequestError(
                    "two tensors of the output would have this name",
                    tensor=tensor.name,
                    seen=f"from {first} and {unit.name}",
                    accepted="one tensor of each name",
                    fix="choose another target: its names do not tell these modules apart",
                )


def _unquantized(checkpoint: Checkpoint, units: list[Unit]) -> dict[str, tuple[int, ...]]:
    """The plain modules of which a declaration must speak, a head that the file shares with the embeddings too:
    engines build it as a linear layer, and would quantize it by class."""
    found = {u.name: u.tensors[0].shape for u in units if u.weight is None and u.linear}
    embeddings = next((u for u in units if u.name.endswith("embed_tokens")), None)
    if embeddings is not None and not any(u.name.rpartition(".")[2] == _HEAD for u in units):
        found[_HEAD] = embeddings.tensors[0].shape
    return found


def _bare_config(config: Mapping[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in config.items() if key not in BLOCK_KEYS}
    nested = bare.get("text_config")
    if isinstance(nested, Mapping):
        bare["text_config"] = {key: value for key, value in nested.items() if key not in BLOCK_KEYS}
    return bare


def _kept_configs(
    checkpoint: Checkpoint, units: list[Unit], configured: Mapping[str, Mapping[str, Any] | None]
) -> Mapping[str, Mapping[str, Any] | None]:
    """The files that the writer decides; the source's own where nothing changed at all."""
    if any(unit.fate is not Fate.KEPT or unit.left_out for unit in units):
        return configured
    own = {CONFIG: checkpoint.configs.config, HF_QUANT: checkpoint.configs.hf_quant}
    return {name: own.get(name, value) for name, value in configured.items()}


def _fingerprint(
    checkpoint: Checkpoint,
    units: list[Unit],
    shards: tuple[PlannedShard, ...],
    files: tuple[SideFile, ...],
    version: str,
) -> str:
    digest = hashlib.sha256(version.encode())
    for name, header in checkpoint.snapshot.shards.items():
        identity = header.identity
        state = (name, header.sha256, header.file_size, identity.mtime_ns if identity else 0)
        digest.update(json.dumps(state).encode())
    for unit in units:
        options = repr(unit.remake.options) + repr(unit.remake.partners) if unit.remake else ""
        digest.update(f"{unit.name} {unit.fate.value} {unit.after} {options}".encode())
    for shard in shards:
        digest.update(shard.header)
    for file in files:
        digest.update(f"{file.name} {file.sha256}".encode())
    return digest.hexdigest()
