"""What linears with FP8 activations are made of, timed apart on a CUDA device: quantizers, products, whole calls.

    python benchmarks/w8a8_products.py [--shapes gate_up,down] [--tokens 1,16,64,512]

Of `torch._scaled_mm`: float32 or bfloat16 sums, fast accumulation or not, scales per row or per block in its hands.
Then whole calls of `W8A8Linear`. Errors are against float32 products of the same codes. Times as in linear.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import linear_goals as table
import torch
from cuda_device import require_cuda
from graph_timing import copies_of, relative_error, time_calls
from torch import Tensor

from vtensors_formats import FP8Weight
from vtensors_formats.activations import ActivationQuantizer, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Written
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear

_BLOCK, _MOST_ROWS = 128, 34816


def main() -> None:
    """One line a measurement; a form that the device or torch does not have is told with its reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="gate_up,down,o_out")
    parser.add_argument("--tokens", default="1,16,64,512")
    arguments = parser.parse_args()
    require_cuda()
    for shape in arguments.shapes.split(","):
        n, k = table.SHAPES[shape]
        for m in map(int, arguments.tokens.split(",")):
            _measure(shape, min(n, _MOST_ROWS), k, m)


def _measure(shape: str, n: int, k: int, m: int) -> None:
    x = torch.randn(m, k, device="cuda").bfloat16()
    weight = FP8Weight(
        codes=torch.empty(n, k, device="cuda").uniform_(-200, 200).to(torch.float8_e4m3fn),
        scale=torch.tensor(2.0**-11, device="cuda"),
    )
    copies = copies_of(n * k)
    codes = [weight.codes, *(weight.codes.clone() for _ in range(copies - 1))]
    static = FP8StaticActivation(scale=torch.tensor(2.0**-6, device="cuda"))
    quantizers: dict[str, ActivationQuantizer] = {
        "static": static,
        "token": FP8TokenActivation(),
        "group": FP8GroupActivation(),
        "mx": MXFP8Activation(),
    }
    for name, activation in quantizers.items():
        for written in (Written.CODES, Written.ROUNDED):
            if (name, written) != ("static", Written.ROUNDED):
                call = partial(FP8Quantizer(activation, k, x.dtype, x.device, written), x)
                _tell(
                    shape,
                    m,
                    f"quantizer {name} {written.name.lower()}",
                    lambda call=call: call().rows,
                    copies,
                )
    quantized = FP8Quantizer(static, k, x.dtype, x.device)(x).rows
    sums = quantized.float() @ weight.codes.float().T
    one = torch.ones((), device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        for fast in (False, True):
            calls = [partial(_product, quantized, each, one, one, dtype, fast) for each in codes]
            what = f"scaled_mm tensor {str(dtype)[6:]}{' fast' if fast else ''}"
            _tell(shape, m, what, calls, copies, wanted=sums)
    rows, tokens = torch.ones(1, n, device="cuda"), torch.ones(m, 1, device="cuda")
    for fast in (False, True):
        calls = [partial(_product, quantized, each, tokens, rows, torch.bfloat16, fast) for each in codes]
        _tell(shape, m, f"scaled_mm row bfloat16{' fast' if fast else ''}", calls, copies, wanted=sums)
    _tell_blocks(shape, m, quantized, codes, sums)
    scales = torch.full((n, 1), 2.0**-11, device="cuda") * torch.linspace(0.5, 1.5, n, device="cuda").reshape(
        n, 1
    )
    for name in ("static", "token"):
        for what, scale in (("tensor", weight.scale), ("row", scales)):
            whole = attrs.evolve(weight, scale=scale, activation=quantizers[name])
            bound = [W8A8Linear(stack_fp8([attrs.evolve(whole, codes=each)]), x.dtype) for each in codes]
            wanted = quantizers[name](x.float()) @ whole.dequantize().T
            calls = [partial(call, x) for call in bound]
            _tell(shape, m, f"W8A8Linear {name} activations, {what} weight", calls, copies, wanted=wanted)


def _tell_blocks(shape: str, m: int, quantized: Tensor, codes: list[Tensor], sums: Tensor) -> None:
    (n, k), padded = codes[0].shape, -(-m // 4) * 4
    x = torch.zeros(padded, k, dtype=torch.uint8, device="cuda")
    x[:m] = quantized.view(torch.uint8)
    groups = torch.ones(k // _BLOCK, padded, device="cuda").t()
    blocks = torch.ones(-(-n // _BLOCK), k // _BLOCK, device="cuda").t()
    args = x.view(torch.float8_e4m3fn)
    calls = [
        lambda each=each: _product(args, each, groups, blocks, torch.bfloat16, False)[:m] for each in codes
    ]
    _tell(shape, m, "scaled_mm block bfloat16", calls, len(codes), wanted=sums)


def _product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    found: Tensor = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    return found


def _tell(shape: str, m: int, what: str, calls: Any, copies: int, *, wanted: Tensor | None = None) -> None:
    several: list[Callable[[], Tensor]] = calls if isinstance(calls, list) else [calls] * copies
    try:
        error = "" if wanted is None else f", relative error {relative_error(several[0](), wanted):.1e}"
        times = time_calls(several, graph_us=3000.0, replays=7)
    except Exception as problem:  # what torch or the device lacks is the measurement
        print(
            f"{shape} M={m} {what}: {type(problem).__name__}: {str(problem).splitlines()[0][:160]}",
            flush=True,
        )
        return
    print(f"{shape} M={m} {what}: {times.median:.2f} us (spread {times.spread:.0%}){error}", flush=True)


if __name__ == "__main__":
    main()
