"""The built-in schemes as records: name, what it is, size, and the class that holds it. Torch-free."""

from __future__ import annotations

from vtensors.records import Scheme

BUILTIN_SCHEMES: tuple[Scheme, ...] = (
    Scheme(
        name="nvfp4",
        summary="E2M1 codes, an E4M3 scale per 16 elements of K and a float32 global scale.",
        bits_per_weight="4.5",
        weight_class="vtensors_formats.nvfp4:NVFP4Weight",
        encoder="vtensors_formats.encoders:NVFP4",
    ),
    Scheme(
        name="fp8-tensor",
        summary="E4M3 codes and one scale for the whole matrix.",
        bits_per_weight="8",
        weight_class="vtensors_formats.fp8:FP8Weight",
        encoder="vtensors_formats.encoders:FP8_TENSOR",
    ),
    Scheme(
        name="fp8-row",
        summary="E4M3 codes and a scale per output row.",
        bits_per_weight="8 + 32/K",
        weight_class="vtensors_formats.fp8:FP8Weight",
        encoder="vtensors_formats.encoders:FP8_ROW",
    ),
    Scheme(
        name="fp8-block",
        summary="E4M3 codes and a scale per block of rows and columns, usually 128 x 128.",
        bits_per_weight="8.002",
        weight_class="vtensors_formats.fp8:FP8Weight",
        encoder="vtensors_formats.encoders:FP8_BLOCK",
    ),
    Scheme(
        name="mxfp8",
        summary="E4M3 codes and an E8M0 (power of two) scale per 32 elements of K.",
        bits_per_weight="8.25",
        weight_class="vtensors_formats.mxfp8:MXFP8Weight",
        encoder="vtensors_formats.encoders:MXFP8",
    ),
    Scheme(
        name="bf16",
        summary="bfloat16, not quantized.",
        bits_per_weight="16",
        weight_class="vtensors_formats.plain:PlainWeight",
    ),
    Scheme(
        name="f16",
        summary="IEEE half precision, not quantized.",
        bits_per_weight="16",
        weight_class="vtensors_formats.plain:PlainWeight",
    ),
    Scheme(
        name="f32",
        summary="IEEE single precision, not quantized.",
        bits_per_weight="32",
        weight_class="vtensors_formats.plain:PlainWeight",
    ),
)
