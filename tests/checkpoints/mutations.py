"""A checkpoint in memory, and the damage that a bad export, merge or download does to it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from builders import Tensors, safetensors_bytes, write_index

Entry = tuple[str, tuple[int, ...], bytes]
INDEX = "model.safetensors.index.json"
SIZES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
# Other dtypes of the same size: the bytes fit, the values are others.
TWINS = {
    "BF16": ("F16", "I16", "U16"),
    "F32": ("I32", "U32"),
    "U8": ("I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    "F8_E4M3": ("U8", "I8", "F8_E5M2"),
}
# Kept as they are: the text model does not use them.
_WAIVED = ("model.visual.", "mtp.")


@attrs.frozen(kw_only=True)
class Stored:
    """shards: file -> tensor -> (dtype, shape, bytes). indexed: an index names the files."""

    shards: Mapping[str, Mapping[str, Entry]]
    indexed: bool

    def tensors(self) -> dict[str, Entry]:
        """All tensors by name."""
        return {name: entry for shard in self.shards.values() for name, entry in shard.items()}

    def with_tensor(self, name: str, entry: Entry | None) -> Stored:
        """A copy where the tensor is replaced, added to the first shard, or (None) gone."""
        shards = {file: dict(shard) for file, shard in self.shards.items()}
        owner = next((shard for shard in shards.values() if name in shard), next(iter(shards.values())))
        if entry is None:
            del owner[name]
        else:
            owner[name] = entry
        return attrs.evolve(self, shards=shards)


@attrs.frozen(kw_only=True)
class Damage:
    """One damaged copy. what: for messages of the test. named: what the refusal must name."""

    what: str
    named: str
    stored: Stored


def read_stored(folder: Path) -> Stored:
    """The safetensors files of a checkpoint, whole."""
    indexed = (folder / INDEX).exists()
    shards: dict[str, dict[str, Entry]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        shards[path.name] = {
            name: (
                entry["dtype"],
                tuple(entry["shape"]),
                data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]],
            )
            for name, entry in header.items()
        }
    return Stored(shards=shards, indexed=indexed)


def write_stored(stored: Stored, source: Path, target: Path) -> None:
    """The checkpoint in a fresh directory `target`, its small files copied from `source`."""
    target.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    for file, shard in stored.shards.items():
        tensors: Tensors = shard
        (target / file).write_bytes(safetensors_bytes(tensors))
    if stored.indexed:
        write_index(target, {name: file for file, shard in stored.shards.items() for name in shard})


# --- what may happen to a checkpoint, except for what is legal ----------------------------------------------


def removals(stored: Stored) -> list[str]:
    """Tensors that must not be missing.

    Legal: input scales (the module then runs with 16-bit or per-token activations, and says so), KV-cache
    scales (one serves both, without any it is 1.0), and what is waived.
    A pre_quant_scale that no module of the same name has in another layer: writers fold it into the layer
    before and then leave it out, so that only a gap among equals shows.
    """
    tensors = stored.tensors()
    legal = re.compile(r"\.(input_scale|input_global_scale|k_scale|v_scale)$")
    lonely = {name for name in tensors if name.endswith(".pre_quant_scale") and not _twin(name, tensors)}
    return [n for n in tensors if not (legal.search(n) or n in lonely or n.startswith(_WAIVED))]


def _twin(name: str, tensors: Mapping[str, Entry]) -> bool:
    tail = name.split(".")[-2:]
    return any(other != name and other.split(".")[-2:] == tail for other in tensors)


def additions(stored: Stored) -> list[str]:
    """Names of tensors that the checkpoint does not have: beside the parts of a module, below it, new modules.

    Legal, so left out: an input scale where the activation table has a place for it, KV-cache scales, and
    anything under a waived prefix.
    """
    tensors = stored.tensors()
    found: dict[str, None] = {"extra": None, "lm_head.bias": None, "adapter.weight": None}
    for name in tensors:
        owner, _, last = name.rpartition(".")
        if name.startswith(_WAIVED) or last in ("k_scale", "v_scale"):
            continue
        for suffix in ("extra", "bias", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight"):
            found[f"{owner}.{suffix}"] = None
        found[f"{owner}_copy.weight"] = None
        if last not in ("weight", "bias"):
            found[f"{name}.weight"] = None
    return [name for name in found if name not in tensors]


def added_entries(name: str, stored: Stored) -> Iterator[Entry]:
    """Payloads for an added tensor: of the shape that a bias would have, one value, no dimension."""
    rows = next((e[1][:1] for n, e in stored.tensors().items() if n.startswith(name.rpartition(".")[0])), ())
    for shape in dict.fromkeys(((*rows,), (1,), ())):
        for dtype in ("F32", "BF16", "U8", "F8_E4M3"):
            yield dtype, shape, bytes([0x38]) * (SIZES[dtype] * math.prod(shape))


def retypings(stored: Stored) -> list[tuple[str, str]]:
    """(tensor, dtype of the same size) that must be refused.

    Legal: E8M0 bytes of MXFP8 block scales under their two dtype names, and what is waived.
    """
    found = []
    for name, (dtype, shape, _) in stored.tensors().items():
        exponents = dtype == "U8" and name.endswith("weight_scale") and len(shape) == 2
        for twin in TWINS.get(dtype, ()):
            if not name.startswith(_WAIVED) and not (exponents and twin == "F8_E8M0"):
                found.append((name, twin))
    return found


def transposals(stored: Stored) -> list[str]:
    """Tensors whose shape changes when their last two dimensions are exchanged; waived ones are left alone."""
    return [
        name
        for name, (_, shape, _) in stored.tensors().items()
        if len(shape) > 1 and shape[-1] != shape[-2] and not name.startswith(_WAIVED)
    ]


# --- doing it ---------------------------------------------------------------------------------------------


def removed(stored: Stored, name: str) -> Damage:
    """Without the tensor."""
    return Damage(what=f"without {name}", named=name, stored=stored.with_tensor(name, None))


def added(stored: Stored, name: str, entry: Entry) -> Damage:
    """With one tensor more."""
    what = f"with {name} {entry[0]} {list(entry[1])}"
    return Damage(what=what, named=name, stored=stored.with_tensor(name, entry))


def retyped(stored: Stored, name: str, dtype: str) -> Damage:
    """The tensor's bytes under another dtype."""
    _, shape, data = stored.tensors()[name]
    changed = stored.with_tensor(name, (dtype, shape, data))
    return Damage(what=f"{name} as {dtype}", named=name, stored=changed)


def transposed(stored: Stored, name: str) -> Damage:
    """The tensor with its last two dimensions exchanged; the bytes stay, which nothing looks at."""
    dtype, shape, data = stored.tensors()[name]
    turned = (*shape[:-2], shape[-1], shape[-2])
    changed = stored.with_tensor(name, (dtype, turned, data))
    return Damage(what=f"{name} as {list(turned)}", named=name, stored=changed)


def repeated(stored: Stored, name: str) -> Damage:
    """A second indexed file that holds the tensor too, beside one that only it has."""
    other = "model-other.safetensors"
    shards = {**stored.shards, other: {name: stored.tensors()[name], "only.here": ("U8", (1,), b"\0")}}
    return Damage(what=f"{name} in two files", named=name, stored=Stored(shards=shards, indexed=True))
