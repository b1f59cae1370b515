"""`import vtensors` and the commands that read headers only start fast and load nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from builders import write_json, write_safetensors

HEAVY = ("torch", "cupy", "numpy", "huggingface_hub", "tokenizers", "safetensors", "rich", "click")

# Runs the command line in this process and tells on stderr which of the named modules it imported.
COMMAND = """
import sys
sys.argv = ["vtensors", *sys.argv[1:]]
from vtensors.cli import main
try:
    status = main()
except SystemExit as stop:
    status = stop.code
print("heavy:", *(name for name in ("torch", "cupy") if name in sys.modules), file=sys.stderr)
sys.exit(status)
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VT_")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_importing_vtensors_loads_no_heavy_library() -> None:
    result = _python("-X", "importtime", "-c", "import vtensors")
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "vtensors" in imported
    assert imported & set(HEAVY) == set()


def test_importing_vtensors_takes_under_300_ms() -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        assert _python("-c", code).returncode == 0
        return time.perf_counter() - start

    seconds("import vtensors")  # writes the .pyc files
    pairs = [(seconds("import vtensors"), seconds("pass")) for _ in range(5)]
    assert median(ours - bare for ours, bare in pairs) < 0.3


@pytest.mark.parametrize(
    "arguments",
    ["--help", "inspect --help", "conventions", "conventions --markdown", "plugins", "plugins --json", "env"],
)
def test_a_command_that_reads_no_weight_does_not_import_torch(arguments: str) -> None:
    result = _python("-c", COMMAND, *arguments.split())
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1].strip() == "heavy:"


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--tree",), ("--module", "mlp")])
def test_inspect_of_a_checkpoint_does_not_import_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = _python("-c", COMMAND, "inspect", str(_llama(tmp_path)), *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1].strip() == "heavy:"


def _llama(folder: Path) -> Path:
    """A complete BF16 Llama checkpoint of one layer and width four."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        layer + "input_layernorm.weight": (4,),
        layer + "post_attention_layernorm.weight": (4,),
        **{f"{layer}self_attn.{part}_proj.weight": (4, 4) for part in "qkvo"},
        **{f"{layer}mlp.{part}_proj.weight": (4, 4) for part in ("gate", "up", "down")},
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    tensors = {}
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        tensors[name] = ("BF16", shape, bytes(2 * count))
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4,
            "intermediate_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 2,
            "vocab_size": 8,
            "max_position_embeddings": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    )
    return folder
