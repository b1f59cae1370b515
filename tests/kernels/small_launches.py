"""What `launch_each_kernel.py` launches: every kernel on small shapes, each part by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight
from vtensors_formats.activations import FP4Activation, FP8StaticActivation
from vtensors_formats.dynamic_activations import FP8GroupActivation, FP8TokenActivation, MXFP8Activation
from vtensors_formats.plain import PlainWeight
from vtensors_kernels import widening
from vtensors_kernels.activation_quantizers.fp8 import FP8Quantizer, Written
from vtensors_kernels.activation_quantizers.linears import (
    QuantizedInputMatrix,
    QuantizedStream,
    quantized_first,
)
from vtensors_kernels.experts.launches import GroupedExperts
from vtensors_kernels.experts.packed import pack_experts
from vtensors_kernels.fp8.repack import pack_fp8
from vtensors_kernels.fp8.stacked import stack_fp8
from vtensors_kernels.fp8.w8a8 import W8A8Linear
from vtensors_kernels.nvfp4 import packed_widening, stored
from vtensors_kernels.nvfp4.block_scaled import BlockScaledLinear
from vtensors_kernels.nvfp4.block_scaled_packing import pack_block_scaled
from vtensors_kernels.nvfp4.embedding import bind_embedding
from vtensors_kernels.nvfp4.emulated_w4a4 import pack_emulated, widening_quantizer
from vtensors_kernels.nvfp4.quantize_activations import NVFP4Quantizer
from vtensors_kernels.nvfp4.repack import pack
from vtensors_kernels.nvfp4.stream import StreamArgmax, StreamLinear
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_mlp import WgmmaMlp
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.plain.probe import random_matrix
from vtensors_kernels.plain.small import SmallLinear
from vtensors_kernels.reference.paged_attention import AttentionShape
from vtensors_kernels.steps.embedding_rows import bind_embedding_rows
from vtensors_kernels.steps.gated_delta_net import GatedDeltaNetKernel
from vtensors_kernels.steps.next_token import NextToken
from vtensors_kernels.steps.norm_router import NormRouter
from vtensors_kernels.steps.paged_attention import PagedAttention
from vtensors_kernels.steps.paged_attention_probe import PagedCase
from vtensors_kernels.steps.rms_norm import RMSNormKernel
from vtensors_kernels.steps.router import RouterTopk
from vtensors_kernels.steps.sample_token import SampleToken

DTYPE = torch.bfloat16
# N and K that are no multiples of a tile, a step or a segment; MXFP8 takes K that are multiples of 32.
SHAPES = ((40, 288), (90, 1184), (16, 32))
# Rows M: one, and a tail of each tile of tokens.
FEW = (1, 3, 16, 29)


def nvfp4(n: int, k: int) -> NVFP4Weight:
    """Random codes; a few scales."""
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"),
        block_scale=torch.empty(n, k // 16, device="cuda").uniform_(1, 16).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1 / 64, device="cuda"),
        activation=FP4Activation(global_scale=torch.tensor(0.002, device="cuda")),
    )


def fp8(n: int, k: int, kind: str = "row") -> FP8Weight | MXFP8Weight:
    """Random codes under scales by `tensor`, `row`, `block` or `mx`."""
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    if kind == "mx":
        return MXFP8Weight(
            codes=codes, scale=torch.randint(120, 126, (n, k // 32), dtype=torch.uint8, device="cuda")
        )
    shape = {"tensor": (), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
    return FP8Weight(
        codes=codes,
        scale=torch.full(shape, 0.5, device="cuda"),
        block=(128, 128) if kind == "block" else None,
    )


def x_of(m: int, k: int) -> Tensor:
    """[m, k] of DTYPE."""
    return torch.randn(m, k, device="cuda").to(DTYPE)


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """On the device."""
    return torch.tensor(values, dtype=dtype, device="cuda")


def hopper() -> bool:
    """Whether the device has warpgroup products."""
    return torch.cuda.get_device_capability() == (9, 0)


def launch_nvfp4(n: int, k: int) -> None:
    """Linears of NVFP4 weights as packed and as stored, every epilogue; the gather of embeddings."""
    weight, other = nvfp4(n, k), nvfp4(n, k)
    packed, pairs = pack([weight]), pack([weight, other], paired=True)
    residual, gain = x_of(70, n), torch.ones(k, device="cuda")
    for m in FEW:
        x, added = x_of(m, k), residual[:m].contiguous()
        StreamLinear(packed, DTYPE)(x)
        StreamLinear(packed, DTYPE, "linear_add")(x, added)
        StreamLinear(pairs, DTYPE, "linear_swiglu", "norm")(x, None, gain, 1e-6)
        StreamArgmax(packed, DTYPE)(x)
        stored.bind_linear(weight, DTYPE)(x)
        stored.bind_linear_argmax(weight, DTYPE)(x)
    if hopper():
        WgmmaSegments(packed, DTYPE, "linear_add")(x_of(27, k), residual[:27].contiguous())
        WgmmaSegments(pairs, DTYPE, "linear_swiglu")(x_of(19, k))
        WgmmaSegments(pairs, DTYPE, "linear_swiglu").normed(x_of(30, k), gain, 1e-6)
        WgmmaLinear(packed, DTYPE)(x_of(61, k))
        behind = pack([nvfp4(k, 2 * n // 16 * 16)])
        before = [nvfp4(2 * n // 16 * 16, k) for _ in range(2)]
        mlp = WgmmaMlp(pack(before, paired=True), behind, DTYPE)
        for m in (23, 32, 41, 64):
            mlp(x_of(m, k), gain, 1e-6)
    packed_widening.bind_linear_add(packed, DTYPE)(x_of(70, k), residual)
    packed_widening.bind_linear_swiglu(pairs, DTYPE)(x_of(5, k))
    widening.bind_nvfp4(weight)(x_of(5, k))
    bind_embedding(weight)(integers(0, n - 1, dtype=torch.int64), DTYPE)


def launch_nvfp4_activations(n: int, k: int) -> None:
    """Quantizers of every source, and products of what they give."""
    weight, gain = nvfp4(n, k), torch.ones(k, device="cuda")
    activation, x = weight.activation, x_of(19, k)
    assert isinstance(activation, FP4Activation)
    NVFP4Quantizer(activation, k, DTYPE, output="codes")(x)
    NVFP4Quantizer(activation, k, DTYPE, source="swiglu")(x_of(5, 2 * k))
    NVFP4Quantizer(activation, k, DTYPE, source="pre_scale", pre_scale=gain)(x)
    emulated = pack_emulated([weight])
    StreamLinear(emulated.packed, DTYPE)(widening_quantizer(emulated, DTYPE, norm=True)(x, gain, 1e-6)[0])
    StreamLinear(emulated.packed, DTYPE)(widening_quantizer(emulated, DTYPE, norm=False)(x)[0])
    if torch.cuda.get_device_capability()[0] == 12:
        BlockScaledLinear(pack_block_scaled([weight]), DTYPE)(x)


def launch_fp8(n: int, k: int) -> None:
    """Linears of FP8 weights with every kind of scale."""
    for kind in ("tensor", "row", "block", "mx"):
        weight = fp8(n, k, kind)
        packed, pairs = pack_fp8([weight]), pack_fp8([weight, fp8(n, k, kind)], paired=True)
        for m in FEW[1:3]:
            StreamLinear(packed, DTYPE)(x_of(m, k))
        StreamLinear(pairs, DTYPE, "linear_swiglu", "norm")(
            x_of(29, k), None, torch.ones(k, device="cuda"), 1e-6
        )
        if hopper() and kind != "block":
            WgmmaSegments(packed, DTYPE, "linear_add")(x_of(27, k), x_of(27, n))
            before = [fp8(n // 16 * 32, k, kind) for _ in range(2)]
            mlp = WgmmaMlp(pack_fp8(before, paired=True), pack_fp8([fp8(k, n // 16 * 32, kind)]), DTYPE)
            mlp(x_of(45, k), torch.ones(k, device="cuda"), 1e-6)
        packed_widening.bind_linear(packed, DTYPE)(x_of(5, k))
        if isinstance(weight, FP8Weight) and weight.block is None:
            widening.bind_fp8(weight)(x_of(5, k))


def launch_fp8_activations(n: int, k: int) -> None:
    """Every quantizer, and products of what it gives."""
    weight, device = fp8(n, k), torch.device("cuda", 0)
    static, token = FP8StaticActivation(scale=torch.tensor(0.01, device=device)), FP8TokenActivation()
    for activation in (static, token, FP8GroupActivation(), MXFP8Activation()):
        FP8Quantizer(activation, k, DTYPE, device)(x_of(3, k))
        written = Written.VALUES if activation in (static, token) else Written.ROUNDED
        FP8Quantizer(activation, k, DTYPE, device, written)(x_of(3, k))
    whole = attrs.evolve(weight.rows(0, n // 16 * 16), activation=static)
    for activation in (static, token):
        matrix = QuantizedInputMatrix(packed=pack_fp8([weight]), activation=activation)
        QuantizedStream(matrix, DTYPE)(x_of(19, k))
        if torch.cuda.get_device_capability() >= (8, 9):
            stacked = stack_fp8([attrs.evolve(whole, activation=activation)])
            W8A8Linear(stacked, DTYPE, "linear_add")(x_of(5, k), x_of(5, n // 16 * 16))
    four_bits = QuantizedInputMatrix(packed=pack([nvfp4(n, k)]), activation=static)
    quantized_first(four_bits, DTYPE, lambda packed: StreamLinear(packed, DTYPE))(x_of(7, k))
    if hopper():
        block = attrs.evolve(fp8(128, 512, "block"), activation=FP8GroupActivation())
        W8A8Linear(stack_fp8([block]), DTYPE, "linear_add")(x_of(5, 512), x_of(5, 128))


def launch_plain(n: int, k: int) -> None:
    """Linears of 16-bit weights: a block or a cluster of them for a tile, and blocks of many rows."""
    gain = torch.ones(k, device="cuda")
    plain = random_matrix(n, k, DTYPE, "cuda", bias=True)
    for m in (1, 12, 40):
        SmallLinear(plain, DTYPE)(x_of(m, k), x_of(m, n))
        SmallLinear(plain, DTYPE, norm=True)(x_of(m, k), None, gain, 1e-6)
    SmallLinear(random_matrix(4104, 64, DTYPE, "cuda", bias=False), DTYPE)(x_of(19, 64))


def launch_experts(n: int, k: int) -> None:
    """Grouped experts and a shared one: few tokens, a batch, tokens that blocks find, tokens that are sorted."""
    hidden, width = k // 16 * 16, (n // 16 + 1) * 16
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    for make in (nvfp4, fp8):
        call = GroupedExperts(pack_experts([make(*shape) for _ in range(5) for shape in shapes], 4), DTYPE)
        for m in (1, 23, 40, 130):
            chosen = torch.rand(m, 4, device="cuda").argsort(-1)[:, :3].to(torch.int32)
            x = x_of(m, hidden)
            call(x, chosen, torch.full((m, 3), 1 / 3, device="cuda"), x[:, :1], None, x)


def launch_steps(n: int, k: int) -> None:
    """Norm, router, gather of embeddings, the next token: chosen and drawn."""
    normed = RMSNormKernel(torch.ones(k, device="cuda"), 1e-6, DTYPE)(x_of(5, k))
    RouterTopk(8, DTYPE)(x_of(5, 257)[:, :256])
    if hopper():
        NormRouter(random_matrix(2 * n + 1, k, DTYPE, "cuda"), 2 * n, 3)(
            x_of(11, k), torch.ones(k, device="cuda"), 1e-6
        )
    tokens, steps = integers(*[0] * 5, dtype=torch.int64), integers(1, 1, 0, 1, 1)
    largest = torch.zeros(5, device="cuda")
    logits = x_of(5, 32 * n + 7)
    NextToken("cuda", DTYPE)(logits, tokens, steps.clone(), steps, largest)
    settings = torch.tensor([[0.8, 7, 0.9, 0.01, 0.3]] * 5, dtype=torch.float64, device="cuda")
    SampleToken("cuda", DTYPE)(logits, settings, largest, steps, tokens)
    bind_embedding_rows(PlainWeight(tensor=normed))(integers(4, 0, 1, dtype=torch.int64), torch.float16)


def launch_gated_delta_net(_n: int, k: int) -> None:
    """A prompt in two pieces, then a step of three rows, one of them padding; slots full of NaN."""
    dim, values = (32, 6) if k < 512 else (128, 4)
    channels = 2 * 2 * dim + values * dim
    kernel = GatedDeltaNetKernel(
        key_heads=2,
        value_heads=values,
        conv=torch.randn(channels, 4, device="cuda"),
        decay=-torch.linspace(0.01, 4, values, device="cuda"),
        dt_bias=torch.randn(values, device="cuda"),
        norm=torch.ones(dim, device="cuda"),
        eps=1e-6,
        dtype=DTYPE,
    )
    history = torch.full((4, 4, channels), float("nan"), dtype=DTYPE, device="cuda")
    memory = torch.full((4, values, dim, dim), float("nan"), device="cuda")
    widths = (channels, values * dim, values, values)
    for start, count in ((0, 37), (37, 3)):
        rows = torch.split(x_of(count, sum(widths)), widths, dim=1)
        kernel.prefill(*rows, history, memory, integers(1), integers(start))
    rows = torch.split(x_of(3, sum(widths)), widths, dim=1)
    kernel.decode(*rows, history, memory, integers(1, 2, 0), integers(40, 0, 0))


def launch_attention(_n: int, k: int) -> None:
    """Steps of sequences of several lengths, a prompt, and a prompt behind others; a cache of 16 bits and of FP8."""
    device, gain = torch.device("cuda", 0), torch.ones(256, device="cuda")
    for dim, scales in ((32, None), (256, (0.5, 0.25))) if k < 512 else ((64, (0.5, 0.25)), (256, None)):
        shape = AttentionShape(
            heads=6,
            kv_heads=2,
            head_dim=dim,
            rotary_dim=dim // 2,
            gated=True,
            q_gain=gain[:dim],
            k_gain=gain[:dim],
            eps=1e-6,
            scale=dim**-0.5,
            dtype=DTYPE,
            kv_scales=scales,
        )
        fields = attrs.asdict(shape, recurse=False)
        attention = PagedAttention(**fields, max_positions=1024, device=device)
        PagedCase.make(shape, (0, 63, 64, 200), device).decode(attention)
        for start, new in ((0, 70), (65, 9)):
            PagedCase.make(shape, (start,), device, new=new).prefill(attention)


# In the order in which they are launched.
PARTS: Mapping[str, Callable[[int, int], None]] = {
    "nvfp4": launch_nvfp4,
    "nvfp4-activations": launch_nvfp4_activations,
    "fp8": launch_fp8,
    "fp8-activations": launch_fp8_activations,
    "plain": launch_plain,
    "experts": launch_experts,
    "steps": launch_steps,
    "gated-delta-net": launch_gated_delta_net,
    "attention": launch_attention,
}
