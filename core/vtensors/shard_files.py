"""Which files of a directory or repository are the checkpoint: the index decides, never a glob."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import attrs

from vtensors.counts import agreeing, counted
from vtensors.errors import CheckpointError
from vtensors.header import ShardHeader
from vtensors.strict_json import parse_json
from vtensors.tensors import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"

# Suffixes of weights in other containers, to say what was found instead.
_OTHER_WEIGHTS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch pickle",
    ".pt": "PyTorch pickle",
    ".pth": "PyTorch pickle",
    ".ckpt": "PyTorch pickle",
    ".onnx": "ONNX",
    ".h5": "HDF5",
    ".msgpack": "Flax msgpack",
}
_NAMED_AT_MOST = 5


@attrs.frozen(kw_only=True)
class ShardSelection:
    """files: the shards to read, sorted. weight_map: tensor to file as the index says, None without an index.
    strays: other `.safetensors` files beside them, sorted; they are not read."""

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    strays: tuple[str, ...]


def select_shards(where: str, names: Collection[str], index: bytes | None) -> ShardSelection:
    """The shards among the file names of one directory or repository.

    where: named in messages. names: base names. index: content of `INDEX_NAME`, None where there is none.

    With an index exactly its files; without one `model.safetensors`, else the only `.safetensors` file.
    Raises CheckpointError for an index that is malformed, empty or names files that are absent or elsewhere,
    for several candidates, and for a directory without safetensors files.
    """
    present = {name for name in names if name.endswith(SUFFIX) and not name.startswith(".")}
    weight_map: Mapping[str, str] | None = None
    if index is not None:
        weight_map = parse_index(index)
        files = set(weight_map.values())
        absent = sorted(files.difference(names))
        if absent:
            raise CheckpointError(
                f"of {counted(len(files), 'file')} that the index names, {len(absent):,} "
                f"{agreeing(len(absent), 'is', 'are')} missing: {listed(absent)}",
                file=f"{where}/{INDEX_NAME}",
                accepted="every file that the index names",
                fix="incomplete download: download the missing files",
            )
    elif SINGLE_NAME in present:
        files = {SINGLE_NAME}
    elif len(present) == 1:
        files = present
    elif present:
        raise CheckpointError(
            f"several .safetensors files and no index to say which to read: {listed(sorted(present))}",
            file=where,
            accepted=f"{INDEX_NAME}, {SINGLE_NAME}, or one .safetensors file",
            fix=f"download {INDEX_NAME} too, or open one of the files by its own path",
        )
    else:
        raise CheckpointError(
            "no .safetensors file here",
            file=where,
            seen=_what_is_there(names),
            accepted="safetensors checkpoints",
            fix="give the directory that holds the .safetensors files, or convert the weights to safetensors",
        )
    return ShardSelection(
        files=tuple(sorted(files)), weight_map=weight_map, strays=tuple(sorted(present.difference(files)))
    )


def parse_index(data: bytes) -> dict[str, str]:
    """The `weight_map` of an index. Raises CheckpointError for anything but plain names of .safetensors
    files."""
    content = parse_json(data, file=INDEX_NAME, what="index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map",
            file=INDEX_NAME,
            seen="no such key, or no object",
            accepted='{"weight_map": {tensor: file}}',
            fix="download it again",
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(
                "the index maps this tensor to something that is not a file name",
                file=INDEX_NAME,
                tensor=name,
                seen=type(file).__name__,
                accepted="a file name",
                fix="download the index again",
            )
    for file in sorted(set(weight_map.values())):
        _check_file_name(file)
    return weight_map


def join_headers(
    headers: Mapping[str, ShardHeader], weight_map: Mapping[str, str] | None
) -> Mapping[str, TensorInfo]:
    """All tensors of the shards by name, checked against the index in both directions.

    Raises CheckpointError naming tensor and files for: one name in two files, a tensor that the index
    promises and no header has, one that lies in another file than the index says, one that the index does not
    know.
    """
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for info in header.tensors:
            first = tensors.setdefault(info.name, info)
            if first is not info:
                raise CheckpointError(
                    "two files hold a tensor of this name",
                    file=f"{first.file} and {info.file}",
                    tensor=info.name,
                    seen=f"{first.describe()} and {info.describe()}",
                    fix="the files come from different exports: download them all again",
                )
    if weight_map is not None:
        _check_index(tensors, weight_map)
    return MappingProxyType(tensors)


def _check_index(tensors: Mapping[str, TensorInfo], weight_map: Mapping[str, str]) -> None:
    for name, file in weight_map.items():
        found = tensors.get(name)
        if found is None:
            lost = [other for other in weight_map if other not in tensors]
            raise CheckpointError(
                "the index names this tensor, the file's header does not have it" + _others(lost),
                file=file,
                tensor=name,
                fix=f"{INDEX_NAME} and the file come from different exports: download both again",
            )
        if found.file != file:
            raise CheckpointError(
                "the tensor lies in another file than the index says",
                file=INDEX_NAME,
                tensor=name,
                seen=f"the header of {found.file} has it, the index says {file}",
                fix=f"{INDEX_NAME} is stale: download it again",
            )
    if len(tensors) != len(weight_map):
        extra = [name for name in tensors if name not in weight_map]
        raise CheckpointError(
            f"the header has this tensor, {INDEX_NAME} does not name it" + _others(extra),
            file=tensors[extra[0]].file,
            tensor=extra[0],
            fix=f"{INDEX_NAME} is stale: download it again",
        )


def listed(names: Collection[str]) -> str:
    """The names for a message: the first few, then how many more."""
    shown = ", ".join(list(names)[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"{shown} and {len(names) - _NAMED_AT_MOST} more"


def _others(names: list[str]) -> str:
    return f" ({counted(len(names), 'such tensor')}: {listed(names)})" if len(names) > 1 else ""


def _check_file_name(file: str) -> None:
    if any(mark in file for mark in ("/", "\\", ":", "\0")) or file.startswith("."):
        raise CheckpointError(
            f"the index names the file {file!r}, which may lie outside of the checkpoint's directory",
            file=INDEX_NAME,
            accepted="plain file names in the same directory",
            fix="download the index again; one that names other places is not read",
        )
    if not file.endswith(SUFFIX):
        raise CheckpointError(
            f"the index names the file {file!r}, which is not a .safetensors file",
            file=INDEX_NAME,
            accepted="names that end with .safetensors",
            fix="download the safetensors files and their index",
        )


def _what_is_there(names: Collection[str]) -> str:
    other = [
        f"{name} ({kind})"
        for name in sorted(names)
        for suffix, kind in _OTHER_WEIGHTS.items()
        if name.endswith(suffix)
    ]
    if other:
        return listed(other)
    return listed(sorted(names)) if names else "nothing"
