"""Seeds for every target, made from the checkpoints in tests/data: small, so that mutations reach everything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
KEPT = 8
_LATER = re.compile(r"layers\.[1-9]|experts\.[2-9]|experts\.\d\d|visual|blocks\.[1-9]")
_SIDE = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_PATTERNS = (
    r"re:.*mlp\.gate$",
    r"re:model\.layers\.\d+\.(mlp|self_attn)\..*_proj",
    "re:(a+)+$",
    "re:[[:alpha:]]{2,}[^]x]",
    r"re:(?i)\bLM_head{1,2}\Z",
    "model.layers.0*",
    "*mlp.gate",
    "*[!a-c]?.*",
    "lm_head",
)
_TEMPLATES = (
    "{{ messages[0].role | upper }}{{ bos_token }}",
    "{{ ''.__class__ }}{{ messages | attr('__init__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% set ns = namespace(x=1) %}{% if ns.x is defined %}{{ raise_exception('no') }}{% endif %}",
    "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}",
)


def seeds(target: str) -> list[bytes]:
    """The seeds of a target of that name."""
    return list(dict.fromkeys(_seeds(target)))


def documents(name: str) -> list[Any]:
    """The JSON documents of that name in tests/data, long lists and objects cut."""
    return [_cut(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(DATA.glob(f"*/{name}"))]


def headers() -> list[dict[str, Any]]:
    """The first tensors of every header in tests/data, with offsets from zero on."""
    return [_first_tensors(path) for path in sorted(DATA.glob("*/model.safetensors"))]


def _seeds(target: str) -> Iterator[bytes]:
    if target in ("header", "strict_json"):
        yield from (_dump(document) for document in headers())
    if target == "index":
        for found in headers():
            names = {name: "model.safetensors" for name in found if name != "__metadata__"}
            yield _dump({"metadata": {"total_size": 1}, "weight_map": names})
    if target == "strict_json":
        yield from (
            b"[1e999]",
            b'{"a":1,"a":2}',
            b'"\\ud800"',
            b"[NaN]",
            b"[-Infinity]",
            b"[1" + b"0" * 50 + b"]",
        )
    if target == "declarations":
        yield from (_dump(document) for document in documents("config.json"))
    if target in ("declarations", "checkpoint"):
        for folder in sorted(path.parent for path in DATA.glob("*/config.json")):
            yield _dump(_checkpoint(folder, with_tensors=target == "checkpoint"))
    if target == "side_files":
        for folder in sorted(path.parent for path in DATA.glob("*/config.json")):
            files = {name: folder / name for name in _SIDE if (folder / name).exists()}
            yield _dump({name: _cut(json.loads(path.read_text())) for name, path in files.items()})
    if target == "patterns":
        for pattern in _PATTERNS:
            yield f"{pattern.removeprefix('re:')}\nmodel.layers.0.mlp.gate".encode()
    if target == "chat_template":
        yield from (text.encode() for text in _TEMPLATES)
        yield from (path.read_bytes() for path in sorted(DATA.glob("*/chat_template.jinja")))


def _checkpoint(folder: Path, *, with_tensors: bool) -> dict[str, Any]:
    legacy = folder / "hf_quant_config.json"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {
        "config": config if with_tensors else _cut(config),
        "hf_quant": json.loads(legacy.read_text(encoding="utf-8")) if legacy.exists() else None,
    }
    if with_tensors:
        # Whole modules: those of the first layer, the first experts, and what lies outside of the layers.
        entries = _header(folder / "model.safetensors").items()
        kept = {name: entry for name, entry in entries if not _LATER.search(name)}
        found["tensors"] = {n: [e["dtype"], e["shape"]] for n, e in kept.items() if "dtype" in e}
    return found


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        content: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return content


def _first_tensors(path: Path) -> dict[str, Any]:
    kept, end = {}, 0
    for name, entry in list(_header(path).items())[: 2 * KEPT]:
        if name != "__metadata__":
            begin, stop = entry["data_offsets"]
            entry = {**entry, "data_offsets": [end, end + stop - begin]}
            end += stop - begin
        kept[name] = entry
    return kept


def _cut(value: Any) -> Any:
    if isinstance(value, list):
        return [_cut(item) for item in value[:KEPT]]
    if isinstance(value, dict):
        # Objects with a name per module are long; those with fixed keys stay whole.
        items = list(value.items())
        return {key: _cut(item) for key, item in (items if len(items) < 60 else items[:KEPT])}
    return value


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
