"""Launches every NVFP4, FP8 and BF16 linear once or twice on shapes with tails, for a sanitizer to watch.

compute-sanitizer --report-api-errors no --tool memcheck python tests/kernels/launch_each_kernel.py
compute-sanitizer --report-api-errors no --tool racecheck python tests/kernels/launch_each_kernel.py --every-lane

--every-lane compiles the streaming kernels so that each lane arrives at a barrier for itself: racecheck credits an
arrival to the thread that makes it alone, and reports what one lane announces for its warp after __syncwarp.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

import attrs
import torch

from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_formats.activations import FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.plain import PlainWeight
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Written
from vtensors_kernels.activation_quantizers.linears import QuantizedInputMatrix, QuantizedStream
from vtensors_kernels.compiling import functions, nvrtc
from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.experts.packed import pack_experts
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear
from vtensors_kernels.nvfp4 import packed_widening, stored
from vtensors_kernels.nvfp4.embedding import bind_embedding
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.plain.probe import random_matrix
from vtensors_kernels.plain.small import SmallLinear
from vtensors_kernels.steps.embedding_rows import bind_embedding_rows
from vtensors_kernels.steps.next_token import NextToken
from vtensors_kernels.steps.rms_norm import RMSNormKernel
from vtensors_kernels.steps.router import RouterTopk

DTYPE = torch.bfloat16
# N and K that are no multiples of a tile, a step or a segment.
SHAPES = ((40, 272), (333, 2064), (16, 16))
# Features of x and of an expert.
EXPERTS = (1168, 48)


def nvfp4(n: int, k: int) -> NVFP4Weight:
    """Random codes; a few scales."""
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        block_scale=torch.empty(n, k // 16, device="cuda").uniform_(1, 16).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 64, device="cuda"),
    )


def x_of(m: int, k: int) -> torch.Tensor:
    """[m, k] of DTYPE."""
    return torch.randn(m, k, device="cuda").to(DTYPE)


def launch(n: int, k: int) -> None:
    """Every kernel on one shape."""
    weight, other = nvfp4(n, k), nvfp4(n, k)
    packed, pairs = pack([weight]), pack([weight, other], paired=True)
    residual, gain = x_of(32, n), torch.ones(k, device="cuda")
    for m in (1, 3, 16, 29):
        x = x_of(m, k)
        StreamLinear(packed, DTYPE)(x)
        StreamLinear(packed, DTYPE, "linear_add")(x, residual[:m].contiguous())
        StreamLinear(pairs, DTYPE, "linear_swiglu", "norm")(x, None, gain, 1e-6)
        StreamArgmax(packed, DTYPE)(x)
        stored.bind_linear(weight, DTYPE)(x)
    if torch.cuda.get_device_capability() == (9, 0):
        WgmmaSegments(packed, DTYPE)(x_of(27, k))
        WgmmaLinear(packed, DTYPE)(x_of(61, k))
    packed_widening.bind_linear(packed, DTYPE)(x_of(70, k))
    bind_embedding(weight)(torch.tensor([0, n - 1], device="cuda"), DTYPE)
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    normed = RMSNormKernel(gain, 1e-6, DTYPE)(x_of(5, k))
    RouterTopk(8, DTYPE)(normed[:, :256])
    tokens, positions = (
        torch.zeros(5, dtype=torch.int64, device="cuda"),
        torch.zeros(5, dtype=torch.int32, device="cuda"),
    )
    NextToken("cuda", DTYPE)(normed, tokens, positions, positions.clone(), torch.zeros(5, device="cuda"))
    bind_embedding_rows(PlainWeight(tensor=normed))(tokens, torch.float16)
    fp8 = FP8Weight(codes=codes, scale=torch.full((n, 1), 0.5, device="cuda"))
    StreamLinear(pack_fp8([fp8]), DTYPE)(x_of(3, k))
    launch_fp8_activations(fp8)
    plain = random_matrix(n, k, DTYPE, "cuda", bias=True)
    for m in (1, 12, 40):
        SmallLinear(plain, DTYPE)(x_of(m, k), x_of(m, n))
        SmallLinear(plain, DTYPE, norm=True)(x_of(m, k), None, gain, 1e-6)
    torch.cuda.synchronize()


def launch_fp8_activations(weight: FP8Weight) -> None:
    """Every quantizer, and products of what it gives."""
    (n, k), device = weight.shape, weight.device
    static, token = FP8StaticActivation(scale=torch.tensor(0.01, device=device)), FP8TokenActivation()
    for activation in (static, token, FP8GroupActivation(), MXFP8Activation()):
        FP8Quantizer(activation, k, DTYPE, device)(x_of(3, k))
        FP8Quantizer(activation, k, DTYPE, device, Written.ROUNDED)(x_of(3, k))
    for activation in (static, token):
        matrix = QuantizedInputMatrix(packed=pack_fp8([weight]), activation=activation)
        QuantizedStream(matrix, DTYPE)(x_of(19, k))
        whole = attrs.evolve(weight.rows(0, n // 16 * 16), activation=activation)
        if torch.cuda.get_device_capability() >= (8, 9):
            W8A8Linear(stack_fp8([whole]), DTYPE, "linear_add")(x_of(5, k), x_of(5, n // 16 * 16))


def launch_experts(hidden: int, width: int) -> None:
    """Grouped experts and a shared one: few tokens, tokens that blocks find, tokens that are sorted."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    call = GroupedExperts(pack_experts([nvfp4(*shape) for _ in range(5) for shape in shapes], 4), DTYPE)
    for m in (1, 40, 130):
        chosen = torch.rand(m, 4, device="cuda").argsort(-1)[:, :3].to(torch.int32)
        x = x_of(m, hidden)
        call(x, chosen, torch.full((m, 3), 1 / 3, device="cuda"), x[:, :1].contiguous(), None, x)
    torch.cuda.synchronize()


def let_every_lane_arrive() -> None:
    """Add VT_EVERY_LANE to the options of every kernel compiled from now on."""
    plain = nvrtc.options_of

    def options(target: str, defines: Mapping[str, int]) -> tuple[str, ...]:
        return plain(target, {**defines, "VT_EVERY_LANE": 1})

    for module in (nvrtc, functions):
        setattr(module, "options_of", options)  # noqa: B010 (modules are not declared to be assigned to)


def main() -> None:
    """Launch everything on the first shapes."""
    parser = argparse.ArgumentParser(description="Launch every kernel once or twice.")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--every-lane", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"needs a CUDA device and a torch that sees it; torch {torch.__version__} sees none",
            file=sys.stderr,
        )
        raise SystemExit(2)
    toolkit = nvrtc.find_toolkit()
    if isinstance(toolkit, str):
        print(f"needs a compiler for the device: {toolkit}", file=sys.stderr)
        raise SystemExit(2)
    if args.every_lane:
        let_every_lane_arrive()
    torch.manual_seed(0)
    for shape in SHAPES[: args.shapes]:
        launch(*shape)
        launch_experts(*EXPERTS)
        print("launched every kernel on", shape, flush=True)


if __name__ == "__main__":
    main()
