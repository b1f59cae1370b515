"""Peak memory of loading and running a BF16 model on a CPU, against its file size; or of loading to a CUDA device.

    python benchmarks/load_memory.py                 # writes a Llama of about 1 GB to a temporary directory
    python benchmarks/load_memory.py --layers 4 --json result.json
    python benchmarks/load_memory.py --device cuda --checkpoint /models/27b --json result.json

On CUDA a checkpoint (see `synthetic.py`) is loaded twice, each time by a fresh process: first whatever compiling and
testing of kernels its cache lacks is done too, then only loading. Host memory is told beyond that of a process with
torch and a CUDA context; reading ahead needs its slots (read_ahead.py) and no more.

On a CPU unquantized weights are views of the memory map, so that the peak should be the interpreter with torch, plus
the pages of the file that were touched, plus one block of at most 64 MiB when the model computes in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = r"""
import re, sys, torch
import vtensors
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
base = peak()
model = vtensors.load_model(sys.argv[1], device="cpu", dtype=sys.argv[2])
loaded = peak()
model.logits(torch.arange(8)[None])
print(base, loaded, peak())
"""

CUDA_CHILD = r"""
import logging, re, sys, time, torch
import vtensors
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
logging.basicConfig(level=logging.ERROR)
torch.zeros(1, device="cuda")
torch.empty(1 << 20, pin_memory=True)
base, begin = peak(), time.perf_counter()
checkpoint = vtensors.open_checkpoint(sys.argv[1])
checkpoint.check()
opened = time.perf_counter()
model = vtensors.load_model(sys.argv[1], device="cuda")
torch.cuda.synchronize()
end = time.perf_counter()
waived = checkpoint.accounting.waived_modules
used = sum(
    info.nbytes
    for name, module in checkpoint.modules.items()
    if name not in waived
    for info in module.claim.roles.values()
)
print(base, peak(), opened - begin, end - opened, used)
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
"""


def write_llama(folder: Path, layers: int, hidden: int = 2048, vocab: int = 32000) -> int:
    """Write a BF16 Llama with random weights; returns the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    width, kv = hidden * 3, hidden // 4
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes |= {
            f"{base}input_layernorm": (hidden,),
            f"{base}post_attention_layernorm": (hidden,),
            f"{base}self_attn.q_proj": (hidden, hidden),
            f"{base}self_attn.k_proj": (kv, hidden),
            f"{base}self_attn.v_proj": (kv, hidden),
            f"{base}self_attn.o_proj": (hidden, hidden),
            f"{base}mlp.gate_proj": (width, hidden),
            f"{base}mlp.up_proj": (width, hidden),
            f"{base}mlp.down_proj": (hidden, width),
        }
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": hidden // 16,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.numel() * 2 for tensor in tensors.values())


def measure(folder: Path, dtype: str) -> dict[str, float]:
    """MB of a fresh process: before loading, after loading, at the peak of a forward pass over 8 tokens."""
    command = [sys.executable, "-c", CHILD, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    base, loaded, peak = (int(word) / 1e6 for word in done.stdout.split())
    return {"base_mb": base, "loaded_mb": loaded, "peak_mb": peak}


def measure_cuda(source: str) -> dict[str, float]:
    """Of a fresh process: MB of the host, seconds to open and to load (opening again), GB/s, GB on the device."""
    done = subprocess.run(
        [sys.executable, "-c", CUDA_CHILD, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    base, peak, opened, loaded, used, kept, most = (float(word) for word in done.stdout.split()[-7:])
    return {
        "base_mb": base / 1e6,
        "peak_mb": peak / 1e6,
        "grown_mb": (peak - base) / 1e6,
        "open_s": opened,
        "load_s": loaded,
        "weights_gb": used / 1e9,
        "gb_per_s": used / 1e9 / loaded,
        "device_gb": kept / 1e9,
        "device_peak_gb": most / 1e9,
    }


def on_cuda(source: str) -> dict[str, object]:
    """Both loads, each told as it ends."""
    found: dict[str, object] = {}
    for case in ("first", "again"):
        found[case] = one = measure_cuda(source)
        print(
            f"{case}: {one['weights_gb']:.2f} GB in {one['load_s']:.1f} s ({one['gb_per_s']:.2f} GB/s), opened in "
            f"{one['open_s']:.1f} s; host {one['base_mb']:.0f} MB before, {one['peak_mb']:.0f} MB at the peak; "
            f"device {one['device_gb']:.2f} GB, {one['device_peak_gb']:.2f} GB at the peak",
            flush=True,
        )
    return found


def on_cpu(layers: int) -> dict[str, object]:
    """Both dtypes, each told as it ends."""
    with tempfile.TemporaryDirectory() as name:
        weights = write_llama(Path(name), layers) / 1e6
        result: dict[str, object] = {"weights_mb": weights}
        for dtype in ("bfloat16", "float32"):
            result[dtype] = found = measure(Path(name), dtype)
            extra = found["peak_mb"] - found["base_mb"]
            print(
                f"{dtype}: weights {weights:.0f} MB; process before {found['base_mb']:.0f} MB, after load "
                f"{found['loaded_mb']:.0f} MB, peak {found['peak_mb']:.0f} MB "
                f"= before + {extra / weights:.2f} x weights"
            )
    return result


def main() -> None:
    """Measure, print and optionally save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint", help="what to load to a CUDA device")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not args.checkpoint:
        parser.error("--device cuda needs --checkpoint")
    result = on_cuda(args.checkpoint) if args.device == "cuda" else on_cpu(args.layers)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
