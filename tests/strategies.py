"""hypothesis strategies for checkpoints' files, well-formed and damaged.

Import as `from strategies import headers, damaged_documents`.
"""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

from builders import header_bytes
from fuzz.seeds import documents
from fuzz.seeds import headers as published_headers
from json_mutations import ODD_VALUES, mutate_json

_DTYPES = (("U8", 8), ("BF16", 16), ("F32", 32), ("F8_E4M3", 8), ("I64", 64), ("F4", 4))
_NAMES = st.lists(
    st.sampled_from(("model", "layers", "0", "7", "mlp", "q_proj", "weight", "weight_scale", "é")),
    min_size=1,
    max_size=6,
).map(".".join)


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A well-formed header with its length bytes, and the size of the file that it belongs to."""
    content: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(_NAMES, unique=True, max_size=8)):
        dtype, bits = draw(st.sampled_from(_DTYPES))
        shape = draw(st.lists(st.integers(0, 64), max_size=4))
        count = 1
        for dim in shape:
            count *= dim
        if count * bits % 8:
            shape, count = [2, *shape], count * 2
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count * bits // 8]}
        end += count * bits // 8
    if draw(st.booleans()):
        content["__metadata__"] = draw(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
    blob = header_bytes(content)
    return blob, len(blob) + end


@st.composite
def damaged_headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header of a published file with one to three values of another kind, and a size that may fit it."""
    content = draw(st.sampled_from(published_headers()))
    size = max((e["data_offsets"][1] for n, e in content.items() if n != "__metadata__"), default=0)
    blob = header_bytes(_mutated(draw, content))
    return blob, len(blob) + size + draw(st.sampled_from((0, 0, 1, -1)))


@st.composite
def damaged_indexes(draw: st.DrawFn) -> bytes:
    """An index of `model.safetensors` with values of another kind."""
    names = [name for name in draw(st.sampled_from(published_headers())) if name != "__metadata__"]
    content = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    return json.dumps(_mutated(draw, content)).encode()


@st.composite
def damaged_documents(draw: st.DrawFn, name: str) -> Any:
    """A published file of that name, such as `config.json`, with one to three values of another kind."""
    return _mutated(draw, draw(st.sampled_from(documents(name))))


def json_values() -> st.SearchStrategy[Any]:
    """Any small JSON value, and the odd ones that readers stumble over."""
    leaves = st.one_of(st.sampled_from(ODD_VALUES), st.text(max_size=4), st.integers(), st.floats(width=32))
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )


def _mutated(draw: st.DrawFn, content: Any) -> Any:
    return mutate_json(content, random.Random(draw(st.integers(0, 2**32))), times=draw(st.integers(1, 3)))
