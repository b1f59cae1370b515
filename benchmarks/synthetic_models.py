"""The layout of the two published Qwen3.6 NVFP4 checkpoints: the name, dtype and shape of every tensor.

Names, shapes and the 10 GB limit of a shard are those of nvidia/Qwen3.6-27B-NVFP4 at 0893e160 and of
nvidia/Qwen3.6-35B-A3B-NVFP4 at 491c2f1e; a test compares them with the published manifests where these are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import attrs

BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
SHARD_LIMIT = 10_000_000_000  # bytes of payload; the writer opens the next file before it would pass this
PREFIX = "model.language_model"


@attrs.frozen(kw_only=True)
class Model:
    """The sizes of one model; experts 0 is a dense MLP of width `intermediate`, otherwise the width of an expert."""

    name: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    linear_dim: int
    intermediate: int
    experts: int = 0
    top_k: int = 0
    vocab: int = 248_320
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_intermediate: int = 4304
    positions: int = 262_144

    @property
    def layer_types(self) -> list[str]:
        """Three layers of linear attention, one of full attention, and so on."""
        return ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(self.layers)]


QWEN_27B = Model(
    name="qwen3.6-27b",
    model_type="qwen3_5",
    hidden=5120,
    layers=64,
    heads=24,
    kv_heads=4,
    head_dim=256,
    key_heads=16,
    value_heads=48,
    linear_dim=128,
    intermediate=17_408,
)
QWEN_35B = Model(
    name="qwen3.6-35b-a3b",
    model_type="qwen3_5_moe",
    hidden=2048,
    layers=40,
    heads=16,
    kv_heads=2,
    head_dim=256,
    key_heads=16,
    value_heads=32,
    linear_dim=128,
    intermediate=512,
    experts=256,
    top_k=8,
)
MODELS = {model.name: model for model in (QWEN_27B, QWEN_35B)}


@attrs.frozen(kw_only=True)
class Stored:
    """One tensor of the file. part: `weight`, `weight_scale`, ... of a module; scheme: nvfp4, fp8 or bf16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scheme: str
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stored data."""
        return BYTES[self.dtype] * prod(self.shape)

    @property
    def module(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def part(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def at_depth(model: Model, part: int) -> Model:
    """The model with a `part`-th of its layers (64 -> 8, 40 -> 5 for 8), the vision tower too."""
    return attrs.evolve(model, layers=model.layers // part, vision_depth=-(-model.vision_depth // part))


def tensors(model: Model) -> Iterator[Stored]:
    """Every tensor, in the order of the published files."""
    yield from _vision(model)
    yield _plain(f"{PREFIX}.embed_tokens.weight", model.vocab, model.hidden)
    for layer, kind in enumerate(model.layer_types):
        yield from _layer(model, f"{PREFIX}.layers.{layer}", kind)
    yield _plain(f"{PREFIX}.norm.weight", model.hidden)
    yield from _nvfp4("lm_head", model.vocab, model.hidden)
    yield from _mtp(model)


def shards(model: Model) -> list[list[Stored]]:
    """The tensors by file, and there by dtype, then name: so the safetensors library lays them out."""
    files: list[list[Stored]] = [[]]
    filled = 0
    for stored in tensors(model):
        if files[-1] and filled + stored.nbytes > SHARD_LIMIT:
            files.append([])
            filled = 0
        files[-1].append(stored)
        filled += stored.nbytes
    order = {dtype: place for place, dtype in enumerate(("F32", "BF16", "F8_E4M3", "U8"))}
    return [sorted(part, key=lambda stored: (order[stored.dtype], stored.name)) for part in files]


def _plain(name: str, *shape: int) -> Stored:
    return Stored(name=name, dtype="BF16", shape=shape, scheme="bf16", k=prod(shape[1:]) or 1)


def _scalars(module: str, scheme: str, k: int, *parts: str) -> Iterator[Stored]:
    for part in parts:
        yield Stored(name=f"{module}.{part}", dtype="F32", shape=(), scheme=scheme, k=k)


def _nvfp4(module: str, n: int, k: int) -> Iterator[Stored]:
    yield Stored(name=f"{module}.weight", dtype="U8", shape=(n, k // 2), scheme="nvfp4", k=k)
    yield Stored(name=f"{module}.weight_scale", dtype="F8_E4M3", shape=(n, k // 16), scheme="nvfp4", k=k)
    yield from _scalars(module, "nvfp4", k, "weight_scale_2", "input_scale")


def _fp8(module: str, n: int, k: int) -> Iterator[Stored]:
    yield Stored(name=f"{module}.weight", dtype="F8_E4M3", shape=(n, k), scheme="fp8", k=k)
    yield from _scalars(module, "fp8", k, "weight_scale", "input_scale")


def _layer(model: Model, base: str, kind: str) -> Iterator[Stored]:
    hidden = model.hidden
    if kind == "linear_attention":
        yield from _linear_attention(model, f"{base}.linear_attn")
    else:
        yield from _attention_linears(model, f"{base}.self_attn")
        yield _plain(f"{base}.self_attn.q_norm.weight", model.head_dim)
        yield _plain(f"{base}.self_attn.k_norm.weight", model.head_dim)
    if model.experts:
        yield _plain(f"{base}.mlp.gate.weight", model.experts, hidden)
        yield from _experts(f"{base}.mlp.experts", model)
        yield from _mlp(f"{base}.mlp.shared_expert", hidden, model.intermediate)
        yield _plain(f"{base}.mlp.shared_expert_gate.weight", 1, hidden)
    else:
        yield from _mlp(f"{base}.mlp", hidden, model.intermediate)
    yield _plain(f"{base}.input_layernorm.weight", hidden)
    yield _plain(f"{base}.post_attention_layernorm.weight", hidden)


def _mlp(base: str, hidden: int, width: int) -> Iterator[Stored]:
    yield from _nvfp4(f"{base}.gate_proj", width, hidden)
    yield from _nvfp4(f"{base}.up_proj", width, hidden)
    yield from _nvfp4(f"{base}.down_proj", hidden, width)


def _experts(base: str, model: Model) -> Iterator[Stored]:
    for expert in range(model.experts):
        yield from _nvfp4(f"{base}.{expert}.gate_proj", model.intermediate, model.hidden)
        yield from _nvfp4(f"{base}.{expert}.up_proj", model.intermediate, model.hidden)
    for expert in range(model.experts):
        yield from _nvfp4(f"{base}.{expert}.down_proj", model.hidden, model.intermediate)


def _linear_attention(model: Model, base: str) -> Iterator[Stored]:
    values = model.value_heads * model.linear_dim
    channels = 2 * model.key_heads * model.linear_dim + values
    yield _plain(f"{base}.dt_bias", model.value_heads)
    yield _plain(f"{base}.A_log", model.value_heads)
    yield _plain(f"{base}.conv1d.weight", channels, 1, 4)
    yield _plain(f"{base}.norm.weight", model.linear_dim)
    yield from _fp8(f"{base}.out_proj", model.hidden, values)
    yield from _fp8(f"{base}.in_proj_qkv", channels, model.hidden)
    yield from _fp8(f"{base}.in_proj_z", values, model.hidden)
    yield _plain(f"{base}.in_proj_b.weight", model.value_heads, model.hidden)
    yield _plain(f"{base}.in_proj_a.weight", model.value_heads, model.hidden)


def attention_shapes(model: Model) -> dict[str, tuple[int, int]]:
    """q (twice as wide: queries and output gates), k, v and o -> (N, K)."""
    width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "q_proj": (2 * width, model.hidden),
        "k_proj": (kv, model.hidden),
        "v_proj": (kv, model.hidden),
        "o_proj": (model.hidden, width),
    }


def _attention_linears(model: Model, base: str) -> Iterator[Stored]:
    for name, (n, k) in attention_shapes(model).items():
        yield from _fp8(f"{base}.{name}", n, k)


def _mtp(model: Model) -> Iterator[Stored]:
    hidden, width, base = model.hidden, model.intermediate, "mtp.layers.0"
    yield _plain("mtp.fc.weight", hidden, 2 * hidden)
    for norm in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        yield _plain(f"{norm}.weight", hidden)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _plain(f"{base}.{norm}.weight", hidden)
    for name, shape in attention_shapes(model).items():
        yield _plain(f"{base}.self_attn.{name}.weight", *shape)
    for norm in ("q_norm", "k_norm"):
        yield _plain(f"{base}.self_attn.{norm}.weight", model.head_dim)
    mlp = f"{base}.mlp"
    if model.experts:
        yield _plain(f"{mlp}.gate.weight", model.experts, hidden)
        yield _plain(f"{mlp}.experts.gate_up_proj", model.experts, 2 * width, hidden)
        yield _plain(f"{mlp}.experts.down_proj", model.experts, hidden, width)
        mlp = f"{mlp}.shared_expert"
    yield _plain(f"{mlp}.gate_proj.weight", width, hidden)
    yield _plain(f"{mlp}.up_proj.weight", width, hidden)
    yield _plain(f"{mlp}.down_proj.weight", hidden, width)
    if model.experts:
        yield _plain(f"{base}.mlp.shared_expert_gate.weight", 1, hidden)


def _vision(model: Model) -> Iterator[Stored]:
    width, inner, base = model.vision_hidden, model.vision_intermediate, "model.visual"
    yield _plain(f"{base}.patch_embed.proj.weight", width, 3, 2, 16, 16)
    yield _plain(f"{base}.patch_embed.proj.bias", width)
    yield _plain(f"{base}.pos_embed.weight", 2304, width)
    for block in range(model.vision_depth):
        yield from _affine(f"{base}.blocks.{block}.norm1", width)
        yield from _affine(f"{base}.blocks.{block}.norm2", width)
        yield from _affine(f"{base}.blocks.{block}.attn.qkv", 3 * width, width)
        yield from _affine(f"{base}.blocks.{block}.attn.proj", width, width)
        yield from _affine(f"{base}.blocks.{block}.mlp.linear_fc1", inner, width)
        yield from _affine(f"{base}.blocks.{block}.mlp.linear_fc2", width, inner)
    yield from _affine(f"{base}.merger.norm", width)
    yield from _affine(f"{base}.merger.linear_fc1", 4 * width, 4 * width)
    yield from _affine(f"{base}.merger.linear_fc2", model.hidden, 4 * width)


def _affine(module: str, *shape: int) -> Iterator[Stored]:
    yield _plain(f"{module}.weight", *shape)
    yield _plain(f"{module}.bias", shape[0])


def declarations(model: Model) -> dict[str, Any]:
    """The module -> algorithm table of both quantization files: experts of one layer are one entry."""
    layers: dict[str, Any] = {}
    for stored in tensors(model):
        if stored.scheme == "bf16" or stored.part != "weight":
            continue
        module = stored.module
        if ".experts." in module:
            module = module.partition(".experts.")[0] + ".experts"
        fp8 = stored.scheme == "fp8"
        layers[module] = {"quant_algo": "FP8"} if fp8 else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return layers
