"""One small damaged checkpoint for every code of `vtensors verify`, and how to verify it.

Import as `from verify_cases import CASES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from builders import write_safetensors
from tiny_checkpoints import Tiny
from verify_tools import (
    DOWN,
    EXPERT,
    GATE,
    SECOND,
    SHARD,
    UP,
    K,
    Q,
    V,
    append,
    both,
    config,
    duplicate,
    edited,
    hub_cache,
    on_disk,
    overwritten_blob,
    poke,
    put,
    stale_index,
    to_link,
)


@attrs.frozen(kw_only=True)
class Case:
    """make: folder -> the checkpoint to verify. tensor: what the finding must name. options: of `verify`.

    against: folder -> the reference.
    """

    make: Callable[[Path], Path]
    tensor: str
    seen: str = ""
    options: dict[str, Any] = attrs.field(factory=dict)
    against: Callable[[Path], Path] | None = None


def _unknown_hash(folder: Path) -> Path:
    snapshot = hub_cache(folder)
    (snapshot / "notes.txt").write_text("mine")
    return snapshot


INF = torch.tensor([float("inf")])


def _kv(k: float | None, v: float | None) -> Callable[[Tiny], None]:
    def edit(tiny: Tiny) -> None:
        for layer in range(2):
            for what, value in (("k", k), ("v", v)):
                if value is not None:
                    name = f"model.layers.{layer}.self_attn.{what}_proj.{what}_scale"
                    tiny.tensors[name] = torch.tensor(value)

    return edit


def _shifted(tiny: Tiny) -> None:
    for name, tensor in tiny.tensors.items():
        if "norm" in name and "linear_attn" not in name:
            tiny.tensors[name] = tensor + 1


def _tied_head(tiny: Tiny) -> None:
    tiny.config["tie_word_embeddings"] = True


def _f16(name: str) -> Callable[[Tiny], None]:
    def edit(tiny: Tiny) -> None:
        tiny.tensors[name] = tiny.tensors[name].half()

    return edit


def _raw_fp8(tiny: Tiny) -> None:
    tiny.tensors["lm_head.weight"] = tiny.tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def _zero_row_scale(tiny: Tiny) -> None:
    poke(f"{DOWN}.weight_scale", 0, place=5)(tiny)
    poke(f"{DOWN}.weight", 0x11, place=5 * 8)(tiny)


def _repeated(tiny: Tiny) -> None:
    _kv(0.02, 0.02)(tiny)
    tiny.tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.02)


def _pre_scale(tiny: Tiny) -> None:
    tiny.config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    tiny.tensors[f"{DOWN}.pre_quant_scale"] = torch.ones(48, dtype=torch.bfloat16)


def _plain(folder: Path) -> Path:
    return Tiny.plain_model().save(folder)


def _noisy(tiny: Tiny) -> None:
    # Half of the codes' magnitudes moved by one: still the same weight, 6 dB worse.
    codes = tiny.tensors[f"{DOWN}.weight"]
    low = codes & 0x07
    tiny.tensors[f"{DOWN}.weight"] = (codes & 0xF8) | torch.where(low > 0, (low + 1).clamp(max=7), low)


LLAMA, NVFP4, FP8 = Tiny.plain_model, Tiny.modelopt, lambda: Tiny.modelopt("FP8")

CASES: dict[str, Case] = {
    "missing-file": Case(make=on_disk(lambda f: (f / SECOND).unlink(), shards=2), tensor=SECOND),
    "broken-link": Case(make=on_disk(to_link), tensor=SHARD, seen="outside"),
    "truncated-file": Case(
        make=on_disk(lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size - 10)),
        tensor=SHARD,
        seen="10 bytes are missing",
    ),
    "trailing-bytes": Case(make=on_disk(lambda f: append(f, b"x" * 16)), tensor=SHARD, seen="16 trailing"),
    "damaged-header": Case(make=on_disk(lambda f: (f / SHARD).write_bytes(b"\7" * 99)), tensor=SHARD),
    "damaged-index": Case(
        make=on_disk(lambda f: (f / "model.safetensors.index.json").write_text("{"), shards=2),
        tensor="model.safetensors.index.json",
    ),
    "index-differs": Case(make=on_disk(stale_index, shards=2), tensor="gone.weight"),
    "duplicate-tensor": Case(make=on_disk(duplicate, shards=2), tensor="model.embed_tokens.weight"),
    "ambiguous-files": Case(
        make=on_disk(lambda f: (f / "model.safetensors.index.json").unlink(), shards=2), tensor=""
    ),
    "unreadable-tensor": Case(
        make=on_disk(lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size - 10)),
        tensor="model.norm.weight",
    ),
    "content-differs": Case(make=overwritten_blob, tensor=SHARD, options={"hashes": True}),
    "unknown-hash": Case(make=_unknown_hash, tensor="notes.txt", options={"hashes": True}),
    "damaged-config": Case(
        make=on_disk(lambda f: (f / "config.json").write_text("{'")), tensor="config.json"
    ),
    "refused-declaration": Case(
        make=edited(LLAMA, config(quantization_config={"quant_method": "of-nobody"})),
        tensor="config.json: quantization_config",
        seen="of-nobody",
    ),
    "refused-model": Case(make=edited(LLAMA, config(hidden_act="gelu")), tensor="config.json", seen="gelu"),
    "unscaled-fp8": Case(make=edited(LLAMA, _raw_fp8), tensor="lm_head.weight"),
    "undeclared-quantization": Case(
        make=edited(NVFP4, lambda t: t.config.pop("quantization_config")), tensor=f"{DOWN}.weight"
    ),
    "claimed-twice": Case(make=_plain, tensor=f"{DOWN}.weight"),
    "unread-tensor": Case(make=edited(NVFP4, put(f"{DOWN}.weight_scale_2", None)), tensor=f"{DOWN}.weight"),
    "repeated-tensor": Case(make=edited(LLAMA, _repeated), tensor="model.layers.0.self_attn.k_scale"),
    "missing-weight": Case(make=edited(LLAMA, put(f"{DOWN}.weight", None)), tensor=f"{DOWN}.weight"),
    "unexpected-tensor": Case(
        make=edited(LLAMA, put("adapter.weight", torch.ones(2, 2).bfloat16())), tensor="adapter.weight"
    ),
    "wrong-shape": Case(make=edited(LLAMA, config(intermediate_size=64)), tensor=f"{DOWN}.weight"),
    "missing-bias": Case(make=edited(LLAMA, config(attention_bias=True)), tensor=f"{Q}.bias"),
    "unexpected-bias": Case(
        make=edited(LLAMA, put(f"{Q}.bias", torch.ones(64).bfloat16())), tensor=f"{Q}.bias"
    ),
    "mixed-16-bit": Case(make=edited(LLAMA, _f16("model.norm.weight")), tensor="model.norm.weight"),
    "missing-pre-scale": Case(
        make=edited(NVFP4, _pre_scale), tensor="model.layers.1.mlp.down_proj.pre_quant_scale"
    ),
    "kv-scale-dtype": Case(
        make=edited(LLAMA, both(_kv(0.02, 0.02), put(f"{K}.k_scale", torch.ones((), dtype=torch.uint8)))),
        tensor=f"{K}.k_scale",
    ),
    "nan-code": Case(
        make=edited(FP8, poke(f"{DOWN}.weight", 0xFF, place=50)),
        tensor=f"{DOWN}.weight",
        seen="first at [1, 2]",
    ),
    "not-finite": Case(
        make=edited(LLAMA, put("model.norm.weight", torch.full((32,), float("inf")).bfloat16())),
        tensor="model.norm.weight",
        seen="32 of 32",
    ),
    "scale-not-finite": Case(
        make=edited(Tiny.compressed, put(f"{DOWN}.input_global_scale", INF)),
        tensor=f"{DOWN}.input_global_scale",
        seen="inf",
    ),
    "scale-out-of-range": Case(
        make=edited(NVFP4, put(f"{DOWN}.weight_scale_2", torch.tensor(2.0**120))),
        tensor=f"{DOWN}.weight_scale_2",
        seen="1.329227995784916e+36, which multiplies",
    ),
    "scale-negative": Case(
        make=edited(NVFP4, poke(f"{DOWN}.weight_scale", 0xB8, place=4)),
        tensor=f"{DOWN}.weight_scale",
        seen="-1.0; the first at [1, 1]",
    ),
    "scale-zero": Case(
        make=edited(NVFP4, _zero_row_scale), tensor=f"{DOWN}.weight_scale", seen="first at [1, 2]"
    ),
    "zero-point": Case(
        make=edited(Tiny.compressed, put(f"{DOWN}.weight_zero_point", torch.ones(32, 3, dtype=torch.int8))),
        tensor=f"{DOWN}.weight_zero_point",
    ),
    "kv-scale-infinite": Case(make=edited(LLAMA, _kv(float("inf"), 0.02)), tensor=f"{K}.k_scale"),
    "kv-scale-sentinel": Case(make=edited(LLAMA, _kv(-1.0, 0.02)), tensor=f"{K}.k_scale", seen="-1.0"),
    "kv-scale-shape": Case(
        make=edited(LLAMA, both(_kv(0.02, 0.02), put(f"{K}.k_scale", torch.ones(2, 1, 1)))),
        tensor=f"{K}.k_scale",
    ),
    "stray-file": Case(
        make=on_disk(lambda f: write_safetensors(f / "old.safetensors", {"x": ("U8", (1,), b"1")})),
        tensor="old.safetensors",
    ),
    "unknown-architecture": Case(
        make=edited(LLAMA, config(model_type="of-nobody", architectures=None)), tensor="config.json"
    ),
    "declared-differs": Case(
        make=edited(NVFP4, lambda t: t.config["quantization_config"]["ignore"].append(DOWN)),
        tensor=DOWN,
    ),
    "stale-entry": Case(
        make=edited(
            NVFP4, lambda t: t.config["quantization_config"]["ignore"].append("model.layers.0.mpl.down_proj")
        ),
        tensor="model.layers.0.mpl.down_proj",
    ),
    "missing-activation-scale": Case(
        make=edited(lambda: Tiny.modelopt("NVFP4", "qwen3_5_moe"), put(f"{EXPERT}.input_scale", None)),
        tensor=f"{EXPERT}.input_scale",
    ),
    "missing-kv-scale": Case(
        make=edited(
            lambda: Tiny.modelopt("NVFP4", kv_cache_scheme="FP8"),
            both(_kv(0.02, 0.02), put(f"{K}.k_scale", None), put(f"{V}.v_scale", None)),
        ),
        tensor="model.layers.0.self_attn",
    ),
    "lone-kv-scale": Case(make=edited(LLAMA, _kv(None, 0.02)), tensor=f"{V}.v_scale"),
    "shifted-norm": Case(
        make=edited(lambda: Tiny.plain_model("qwen3_5"), _shifted), tensor="model.norm.weight"
    ),
    "reciprocal-scale": Case(
        make=edited(NVFP4, put(f"{DOWN}.weight_scale_2", torch.tensor(10000.0))),
        tensor=f"{DOWN}.weight_scale_2",
    ),
    "fused-scales-differ": Case(
        make=edited(
            NVFP4,
            both(
                put(f"{GATE}.weight_scale_2", torch.tensor(1 / 256)),
                put(f"{UP}.weight_scale_2", torch.tensor(1 / 384)),
            ),
        ),
        tensor=UP,
        seen="by 1.5 (relative error 0.5)",
    ),
    "fused-input-scales-differ": Case(
        make=edited(NVFP4, put(f"{GATE}.input_scale", torch.tensor(0.006))), tensor=UP, seen="by 2"
    ),
    "never-calibrated": Case(
        make=edited(
            lambda: Tiny.compressed("qwen3_5_moe"), put(f"{EXPERT}.input_global_scale", torch.ones(1))
        ),
        tensor=f"{EXPERT}.input_global_scale",
    ),
    "tied-but-different": Case(make=edited(LLAMA, _tied_head), tensor="lm_head.weight", seen="40 of 40 rows"),
    "all-zero": Case(
        make=edited(NVFP4, put(f"{DOWN}.weight", torch.zeros(32, 24, dtype=torch.uint8))),
        tensor=f"{DOWN}.weight",
    ),
    "different-weight": Case(
        make=edited(NVFP4, lambda t: put(f"{DOWN}.weight", t.tensors[f"{DOWN}.weight"].flip(1))(t)),
        against=_plain,
        tensor=f"{DOWN}.weight",
    ),
    "worse-than-scheme": Case(make=edited(NVFP4, _noisy), against=_plain, tensor=f"{DOWN}.weight"),
    "plain-differs": Case(
        make=edited(NVFP4, lambda t: put("model.norm.weight", t.tensors["model.norm.weight"] * 1.02)(t)),
        against=_plain,
        tensor="model.norm.weight",
    ),
    "shape-differs": Case(
        make=edited(LLAMA, put("model.norm.weight", torch.ones(16).bfloat16())),
        against=_plain,
        tensor="model.norm",
    ),
    "missing-here": Case(
        make=edited(LLAMA, put("model.norm.weight", None)), against=_plain, tensor="model.norm"
    ),
    "missing-there": Case(
        make=edited(LLAMA, put("extra.weight", torch.ones(4, 4).bfloat16())), against=_plain, tensor="extra"
    ),
}
