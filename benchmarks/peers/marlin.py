"""vLLM's Marlin kernels, called from a folder that holds what its wheel ships; nothing of it lies in this repository.

The folder has `_C_stable_libtorch.abi3.so` (or that as `.so.xz`) and, below `vllm/`, the wheel's own `scalar_type.py`
and `model_executor/layers/quantization/utils/marlin_utils{,_fp4,_fp8}.py`, unmodified. These prepare the weight
and call the operator; the rest of vLLM that they import is replaced by stand-ins while they are loaded.
"""

from __future__ import annotations

import importlib.util
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor

from vtensors_formats import FP8Weight, NVFP4Weight

Call = Callable[[Tensor], Tensor]
LIBRARY = "_C_stable_libtorch.abi3.so"
UTILS = "vllm.model_executor.layers.quantization.utils"
# In the order in which they import one another.
HELPERS = ("vllm.scalar_type", *(f"{UTILS}.marlin_utils{kind}" for kind in ("", "_fp4", "_fp8")))
OPERATORS = ("gptq_marlin_repack", "marlin_gemm")


@attrs.frozen(kw_only=True)
class Marlin:
    """The loaded kernels. version: of the wheel. fp4, fp8: the wheel's helper modules."""

    version: str
    fp4: ModuleType
    fp8: ModuleType

    def bind_nvfp4(self, weight: NVFP4Weight) -> Call:
        """call(x [M, K] bfloat16) -> [M, N]; the weight is repacked into memory of its own."""
        n, k = weight.shape
        layer = _layer(n, k)
        layer.weight, layer.weight_scale = weight.codes, weight.block_scale
        layer.weight_global_scale = weight.global_scale
        self.fp4.prepare_fp4_layer_for_marlin(layer)
        return lambda x: self.fp4.apply_fp4_marlin_linear(
            input=x,
            weight=layer.weight,
            weight_scale=layer.weight_scale,
            weight_global_scale=layer.weight_global_scale,
            workspace=layer.workspace,
            size_n=n,
            size_k=k,
        )

    def bind_fp8(self, weight: FP8Weight) -> Call:
        """call(x [M, K] bfloat16) -> [M, N] for one scale per tensor; 16-bit activations."""
        n, k = weight.shape
        layer = _layer(n, k)
        layer.weight, layer.weight_scale = weight.codes, weight.scale.reshape(1)
        self.fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
        return lambda x: self.fp8.apply_fp8_marlin_linear(
            input=x,
            weight=layer.weight,
            weight_scale=layer.weight_scale,
            workspace=layer.workspace,
            size_n=n,
            size_k=k,
            bias=None,
        )


def load_marlin(folder: Path | None) -> Marlin | str:
    """The kernels of that folder, or the reason why they cannot be had."""
    if folder is None:
        return "no folder was given (--marlin DIR)"
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        _load_library(folder)
        helpers = _load_helpers(folder)
    except (OSError, lzma.LZMAError, ImportError, AttributeError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {problem}"
    version = folder / "VERSION"
    return Marlin(
        version=version.read_text().strip() if version.is_file() else "unknown",
        fp4=helpers[f"{UTILS}.marlin_utils_fp4"],
        fp8=helpers[f"{UTILS}.marlin_utils_fp8"],
    )


def _layer(n: int, k: int) -> SimpleNamespace:
    """What the helpers expect of a layer; they add `workspace` and replace weight and scales."""
    return SimpleNamespace(
        output_size_per_partition=n,
        input_size_per_partition=k,
        params_dtype=torch.bfloat16,
        orig_dtype=torch.bfloat16,
        bias=None,
    )


def _load_library(folder: Path) -> None:
    """Register the operators with torch. Errors: OSError from the loader, AttributeError naming what is missing."""
    library = folder / LIBRARY
    if library.is_file():
        torch.ops.load_library(str(library))
    else:
        # Once loaded, the file's pages stay mapped though its name is gone.
        with tempfile.TemporaryDirectory() as scratch:
            unpacked = Path(scratch) / LIBRARY
            unpacked.write_bytes(lzma.decompress((folder / f"{LIBRARY}.xz").read_bytes()))
            torch.ops.load_library(str(unpacked))
    missing = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
    if missing:
        raise AttributeError(f"the library does not register {', '.join(missing)}")


def _load_helpers(folder: Path) -> dict[str, ModuleType]:
    """The helper modules by name, loaded with stand-ins for the rest of the package."""
    loaded = {}
    with _stand_ins():
        for name in HELPERS:
            path = folder / f"{name.replace('.', '/')}.py"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} cannot be imported")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            loaded[name] = module
    return loaded


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Modules of the names that the helpers import, in `sys.modules` until the block ends."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    try:
        for name, members in _members().items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                package = ".".join(parts[:end])
                if package not in sys.modules:
                    sys.modules[package] = ModuleType(package)
                    sys.modules[package].__path__ = []
            vars(sys.modules[name]).update(members)
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def _members() -> dict[str, dict[str, Any]]:
    """What the helpers need at import or in the calls made here; the rest only has to exist."""
    named = type("Named", (), {})
    return {
        "vllm.envs": {"VLLM_MARLIN_USE_ATOMIC_ADD": False, "VLLM_MARLIN_INPUT_DTYPE": None},
        "vllm._custom_ops": {"gptq_marlin_repack": _repack, "marlin_gemm": _gemm},
        "vllm.distributed.utils": {"verify_group_size_divides_partition": named},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning_once=_silent, info_once=_silent)},
        "vllm.model_executor.layers.fused_moe": {"RoutedExperts": named},
        "vllm.model_executor.layers.fused_moe.routed_experts": {"RoutedExperts": named},
        "vllm.model_executor.layers.linear": {"LinearBase": named},
        "vllm.model_executor.layers.quantization.input_quant_fp8": {"QuantFP8": named},
        f"{UTILS}.int8_utils": {"per_token_quant_int8": named},
        f"{UTILS}.quant_utils": {"GroupShape": named, "pack_cols": named, "unpack_cols": named},
        "vllm.model_executor.utils": {"replace_parameter": setattr},
        "vllm.platforms": {"current_platform": named()},
        "vllm.utils.math_utils": {"round_up": lambda value, step: -(-value // step) * step},
        "vllm.utils.platform_utils": {"num_compute_units": _multiprocessors},
    }


def _silent(*_: object) -> None:
    """Takes the place of log calls."""


def _multiprocessors(device: int | None) -> int:
    return torch.cuda.get_device_properties(device or 0).multi_processor_count


def _repack(
    b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Tensor:
    packed: Tensor = torch.ops._C.gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)
    return packed


def _gemm(
    *,
    a: Tensor,
    c: Tensor | None,
    b_q_weight: Tensor,
    b_bias: Tensor | None,
    b_scales: Tensor,
    a_scales: Tensor | None,
    global_scale: Tensor | None,
    b_zeros: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    workspace: Tensor,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    use_atomic_add: bool,
    use_fp32_reduce: bool,
) -> Tensor:
    """The operator of 0.26 takes the type as a number and four flags: full K, atomics, float32 sums, float zeros."""
    tensors = (a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, g_idx, perm, workspace)
    sizes = (size_m, size_n, size_k)
    flags = (True, use_atomic_add, use_fp32_reduce, False)
    product: Tensor = torch.ops._C.marlin_gemm(*tensors, b_q_type.id, *sizes, *flags)
    return product
