"""The entries of a safetensors header: each alone, then all together against the data section."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter

from vtensors.counts import agreeing, counted
from vtensors.errors import CheckpointError
from vtensors.tensors import TensorInfo, expected_nbytes

_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))
# Sizes are 64-bit in every reader of the format.
_SIZE_LIMIT = 2**63
# Published names have at most 12 components and 120 characters; names are cut at every dot many times over.
MAX_NAME = 1024
MAX_COMPONENTS = 64
# The most dimensions that numpy and torch can index.
MAX_RANK = 64
# Of one file; the largest published checkpoints hold about as many in all their files together.
MAX_TENSORS = 300_000

_FIX = "download the file again; if it was published so, its writer made a header that is not safetensors"


def read_metadata(file: str, value: object) -> dict[str, str]:
    """The strings under `__metadata__`; empty where the header has none. Raises CheckpointError otherwise."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(
            "__metadata__ is not an object",
            file=file,
            seen=type(value).__name__,
            accepted="an object of strings",
            fix=_FIX,
        )
    for key, text in value.items():
        if not isinstance(text, str):
            raise CheckpointError(
                f"__metadata__ holds {key!r}, which is not a string",
                file=file,
                seen=type(text).__name__,
                accepted="strings only",
                fix=_FIX,
            )
    return value


def read_entries(file: str, content: dict[str, object], data_begin: int) -> tuple[TensorInfo, ...]:
    """One record per tensor, in the order of the header, offsets made absolute by `data_begin`.

    Raises CheckpointError naming the tensor for a malformed entry or a byte count that contradicts dtype and
    shape.
    """
    # Most of 100,000 tensors share few dtypes and shapes: keep one copy and check each pair once.
    sizes: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int | None]] = {}
    infos = []
    if len(content) > MAX_TENSORS:
        raise CheckpointError(
            "the header has too many tensors",
            file=file,
            seen=counted(len(content), "tensor"),
            accepted=f"at most {MAX_TENSORS}",
            fix=_FIX,
        )
    for name, entry in content.items():
        if not name:
            raise CheckpointError(
                "a tensor has an empty name",
                file=file,
                seen="''",
                accepted="names of at least one character",
                fix=_FIX,
            )
        if len(name) > MAX_NAME or name.count(".") >= MAX_COMPONENTS:
            raise CheckpointError(
                "a tensor's name is too long",
                file=file,
                tensor=_short(name),
                seen=f"{counted(len(name), 'character')}, {counted(name.count('.') + 1, 'component')}",
                accepted=f"at most {MAX_NAME} characters and {MAX_COMPONENTS} components",
                fix=_FIX,
            )
        if type(entry) is not dict or entry.keys() != _ENTRY_KEYS:
            raise _bad_entry(file, name, entry)
        dtype, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or not dtype:
            raise CheckpointError(
                "dtype is not a name",
                file=file,
                tensor=name,
                seen=_short(dtype),
                accepted="a name such as 'BF16'",
                fix=_FIX,
            )
        # bool is an int to Python and True == 1 as a dictionary key, so types are compared exactly.
        if type(dims) is not list or any([type(dim) is not int or dim < 0 for dim in dims]):  # noqa: C419
            raise CheckpointError(
                "shape is not a list of non-negative integers",
                file=file,
                tensor=name,
                seen=_short(dims),
                accepted="[rows, columns], [] for a scalar",
                fix=_FIX,
            )
        if len(dims) > MAX_RANK:
            raise CheckpointError(
                "shape has too many dimensions",
                file=file,
                tensor=name,
                seen=f"{len(dims)}",
                accepted=f"at most {MAX_RANK}",
                fix=_FIX,
            )
        key = (dtype, tuple(dims))
        known = sizes.get(key)
        if known is None:
            _check_element_count(file, name, key[1])
            known = sizes[key] = (*key, expected_nbytes(*key))
        dtype, shape, expected = known
        if type(offsets) is not list or len(offsets) != 2:
            raise _bad_offsets(file, name, offsets)
        begin, end = offsets
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _SIZE_LIMIT:
            raise _bad_offsets(file, name, offsets)
        if expected is not None and end - begin != expected:
            raise CheckpointError(
                "dtype and shape need another number of bytes than the offsets hold",
                file=file,
                tensor=name,
                seen=f"{dtype} {list(shape)} over {counted(end - begin, 'byte')}",
                accepted=counted(expected, "byte"),
                fix=_FIX,
            )
        infos.append(
            TensorInfo(
                name=name, dtype=dtype, shape=shape, file=file, begin=data_begin + begin, end=data_begin + end
            )
        )
    return tuple(infos)


def check_layout(file: str, tensors: tuple[TensorInfo, ...], data_begin: int, file_size: int) -> None:
    """Check that the tensors cover the data section from its begin to its end, each byte once.

    Tensors without elements may stand at any border. Raises CheckpointError for an overlap, a gap, missing
    bytes (with their number) and trailing bytes.
    """
    ordered = sorted(tensors, key=attrgetter("begin", "end"))
    data_end = ordered[-1].end if ordered else data_begin
    if ordered and ordered[0].begin != data_begin:
        raise _gap(file, "the end of the header", ordered[0].name, data_begin, ordered[0].begin)
    for before, after in pairwise(ordered):
        if after.begin > before.end:
            raise _gap(file, before.name, after.name, before.end, after.begin)
        if after.begin < before.end:
            raise CheckpointError(
                f"the bytes of this tensor overlap those of {before.name!r}",
                file=file,
                tensor=after.name,
                seen=f"bytes {after.begin}..{after.end} and {before.begin}..{before.end} of the file",
                accepted="bytes of its own for every tensor",
                fix=_FIX,
            )
    short = data_end - file_size
    if short > 0:
        raise CheckpointError(
            f"{counted(short, 'byte')} {agreeing(short, 'is', 'are')} missing at the end of the file: "
            "incomplete download",
            file=file,
            seen=f"{file_size} bytes",
            accepted=f"{data_end} bytes, header and data together",
            fix="download the file again",
        )
    if short < 0:
        raise CheckpointError(
            f"{counted(-short, 'trailing byte')} {agreeing(-short, 'follows', 'follow')} the last tensor",
            file=file,
            seen=f"{file_size} bytes",
            accepted=f"{data_end} bytes, header and data together",
            fix="the file was appended to or its header was edited: download it again",
        )


def _gap(file: str, before: str, after: str, begin: int, end: int) -> CheckpointError:
    gap = end - begin
    return CheckpointError(
        f"{counted(gap, 'byte')} between {before!r} and {after!r} {agreeing(gap, 'belongs', 'belong')} to no tensor",
        file=file,
        seen=f"bytes {begin}..{end} of the file",
        accepted="tensors that cover the data section without a gap",
        fix="download the file again; if it was published so, its writer made a header that is not safetensors",
    )


def _check_element_count(file: str, name: str, shape: tuple[int, ...]) -> None:
    count = 1
    for dim in shape:
        count *= dim
        if count >= _SIZE_LIMIT or dim >= _SIZE_LIMIT:
            raise CheckpointError(
                "shape has too many elements",
                file=file,
                tensor=name,
                seen=_short(list(shape)),
                accepted="fewer than 2**63 elements",
                fix=_FIX,
            )


def _bad_entry(file: str, name: str, entry: object) -> CheckpointError:
    seen = f"the keys {sorted(entry)}" if isinstance(entry, dict) else type(entry).__name__
    return CheckpointError(
        "the entry does not describe a tensor",
        file=file,
        tensor=name,
        seen=_short(seen),
        accepted="an object with exactly dtype, shape and data_offsets",
        fix=_FIX,
    )


def _bad_offsets(file: str, name: str, offsets: object) -> CheckpointError:
    return CheckpointError(
        "data_offsets do not name a range of bytes",
        file=file,
        tensor=name,
        seen=_short(offsets),
        accepted="[begin, end] with 0 <= begin <= end < 2**63",
        fix=_FIX,
    )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
