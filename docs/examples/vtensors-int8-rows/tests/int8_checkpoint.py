"""Writes a Llama of one tiny layer whose linear layers are INT8 with a scale per row."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LINEAR = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "int8-rows",
        "ignore": ["lm_head", "model.embed_tokens", "*norm"],
    },
}


def write_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Write config.json and model.safetensors; the INT8 modules with their values, float32 [N, K]."""
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(32, 16, generator=random).to(torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.ones(16, dtype=torch.bfloat16),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(16, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(16, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(32, 16, generator=random).to(torch.bfloat16),
    }
    expected = {}
    for name, (rows, columns) in LINEAR.items():
        module = f"model.layers.0.{name}"
        codes = torch.randint(-127, 128, (rows, columns), generator=random, dtype=torch.int8)
        scale = torch.rand(rows, 1, generator=random) / 100 + 1e-4
        tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scale}
        expected[module] = codes.to(torch.float32) * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return expected
