"""One target per parser of untrusted input: bytes in, and only a `VtensorsError` may come out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2

from vtensors.checkpoint import Checkpoint
from vtensors.configs import ConfigFiles
from vtensors.declaring import read_declarations
from vtensors.errors import DeclarationError, VtensorsError
from vtensors.header import parse_header
from vtensors.inspection import inspection
from vtensors.manager import Plugins, default_plugins
from vtensors.matching import glob_entry, regex_entry, suffix_entry
from vtensors.patterns import MatchBudget
from vtensors.provenance import Provenance
from vtensors.shard_files import ShardSelection, parse_index, select_shards
from vtensors.snapshot import assemble
from vtensors.strict_json import parse_json
from vtensors.tensors import expected_nbytes
from vtensors_engine.chat import open_chat_template_source
from vtensors_engine.chat_environment import new_environment
from vtensors_engine.chat_worker import answer
from vtensors_engine.text import end_token_ids, named_tokens

FILE = "model.safetensors"
NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.experts.3.gate_proj",
    "model.language_model.layers.1.linear_attn.in_proj_qkv",
    "lm_head",
    "model.visual.blocks.0.attn.qkv",
    "model.embed_tokens",
)


def header(data: bytes) -> None:
    """A header of these bytes in a file of the size that it asks for, and in one that ends with it."""
    blob = len(data).to_bytes(8, "little") + data
    for size in (len(blob), len(blob) + _promised(data)):
        with contextlib.suppress(VtensorsError):
            parse_header(FILE, blob, size)
    with contextlib.suppress(VtensorsError):
        parse_header(FILE, data, len(data))


def strict_json(data: bytes) -> None:
    """Accepted JSON is what the standard library reads, too."""
    for infinity in (False, True):
        with contextlib.suppress(VtensorsError):
            value = parse_json(data, file="x", what="content", allow_infinity=infinity)
            if value != json.loads(data):
                raise AssertionError("read differently")


def index(data: bytes) -> None:
    """An index, and the shards it names."""
    with contextlib.suppress(VtensorsError):
        for file in set(parse_index(data).values()):
            if "/" in file or file.startswith("."):
                raise AssertionError("a file outside of the directory")
        select_shards("x", [FILE], data)


def declarations(data: bytes) -> None:
    """config.json and hf_quant_config.json through every convention, every name asked for."""
    with contextlib.suppress(VtensorsError):
        configs = _configs(_object(data))
        claimants, warnings = read_declarations(configs, _plugins(), "x")
        _refuse_broken(warnings)
        for claimant in claimants:
            if claimant.declaration is not None:
                for name in NAMES:
                    claimant.declaration.scheme_of(name)
    with contextlib.suppress(VtensorsError):
        config = _object(data)
        for owned in _plugins().registry.architectures.values():
            owned.record.matches(config)
            with contextlib.suppress(VtensorsError):
                owned.record.plan(config, NAMES)


def checkpoint(data: bytes) -> None:
    """`{"config", "hf_quant", "tensors": {name: [dtype, shape]}}` opened, inspected and checked."""
    with contextlib.suppress(VtensorsError):
        document = _object(data)
        tensors = document.get("tensors")
        raw, size = _header_of(tensors if isinstance(tensors, dict) else {})
        shard = parse_header(FILE, raw, size)
        configs = _configs(document)
        claimants, warnings = read_declarations(configs, _plugins(), "x")
        _refuse_broken(warnings)
        opened = Checkpoint(
            snapshot=assemble(
                None,
                Provenance(source="x"),
                ShardSelection(files=(FILE,), weight_map=None, strays=()),
                {FILE: shard},
            ),
            configs=configs,
            plugins=_plugins(),
            switches=_plugins().read_switches({}),
            claimants=claimants,
        )
        try:
            json.dumps(inspection(opened))
        finally:
            _refuse_broken(opened.claims.warnings)
        opened.check()


def side_files(data: bytes) -> None:
    """tokenizer_config.json, generation_config.json, config.json and special_tokens_map.json in one object."""
    with contextlib.suppress(VtensorsError):
        files = _SideFiles(_object(data))
        with contextlib.suppress(VtensorsError):
            named_tokens(files)
        with contextlib.suppress(VtensorsError):
            end_token_ids(files, None)
        with contextlib.suppress(VtensorsError):
            open_chat_template_source(files)


def patterns(data: bytes) -> None:
    """First line: an entry of an ignore list. Second: a name. Every kind of list is asked in bounded time."""
    text, _, name = data.decode("utf-8", "replace").partition("\n")
    for make in (glob_entry, regex_entry, suffix_entry):
        for entry in (text, f"re:{text}"):
            with contextlib.suppress(VtensorsError):
                made = make(entry, "x", MatchBudget(seconds=0.2, match_seconds=0.1))
                for asked in (name[:64], *NAMES):
                    made.matches(asked)


def chat_template(data: bytes) -> None:
    """Template text: parsed; rendered too where nothing in it can loop or multiply."""
    source = data.decode("utf-8", "replace")
    environment = new_environment()
    if any(
        mark in source for mark in ("for", "*", "%d", "format", "range", "<<", "macro", "ljust", "center")
    ):
        with contextlib.suppress(jinja2.TemplateSyntaxError, RecursionError):
            environment.parse(source)
        return
    values = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True, "tools": None}
    found = answer(environment, source, values)
    if not {"text", "error", "refused"} & found.keys():
        raise AssertionError("no answer")


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (
        header,
        strict_json,
        index,
        declarations,
        checkpoint,
        side_files,
        patterns,
        chat_template,
    )
}


class _SideFiles:
    """The side files in one JSON object, by name."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def read_json(self, name: str) -> dict[str, object] | None:
        value = self._files.get(name)
        return value if isinstance(value, dict) else None

    def read_bytes(self, name: str) -> bytes | None:
        value = self._files.get(name)
        return value.encode("utf-8", "replace") if isinstance(value, str) else None


@cache
def _plugins() -> Plugins:
    return default_plugins()


def _object(data: bytes) -> dict[str, Any]:
    value = parse_json(data, file="x", what="content", error=DeclarationError, allow_infinity=True)
    if not isinstance(value, dict):
        raise DeclarationError("not an object")
    return value


def _configs(document: dict[str, Any]) -> ConfigFiles:
    config, other = document.get("config", document), document.get("hf_quant")
    return ConfigFiles(
        config=config if isinstance(config, dict) else None,
        hf_quant=other if isinstance(other, dict) else None,
    )


def _refuse_broken(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        if "failed and was left out" in warning:
            raise AssertionError(warning)


def _header_of(tensors: dict[str, Any]) -> tuple[bytes, int]:
    """A header over the tensors, with the offsets that their dtypes and shapes ask for; and the file's size."""
    entries, end = {}, 0
    for name, value in tensors.items():
        dtype, shape = value if isinstance(value, list) and len(value) == 2 else (value, [])
        nbytes = 0
        if isinstance(dtype, str) and isinstance(shape, list) and all(type(n) is int for n in shape):
            nbytes = expected_nbytes(dtype, tuple(shape)) or 0
        nbytes = nbytes if 0 <= nbytes < 2**60 else 0
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    blob = json.dumps(entries).encode("utf-8", "surrogatepass")
    return len(blob).to_bytes(8, "little") + blob, 8 + len(blob) + end


def _promised(data: bytes) -> int:
    """Where the last offset of a header points, 0 where that cannot be said."""
    try:
        ends = [entry["data_offsets"][1] for entry in json.loads(data).values() if "data_offsets" in entry]
        return max((end for end in ends if type(end) is int and 0 <= end < 2**62), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return 0
