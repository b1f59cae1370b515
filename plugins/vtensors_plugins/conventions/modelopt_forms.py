"""What NVIDIA ModelOpt writes: the accepted tensors, dtypes and shapes of every supported algorithm."""

from __future__ import annotations

from vtensors.forms import FLOAT_DTYPES, Form, TensorForm
from vtensors_plugins.conventions.parts import BIAS, PER_BLOCK, PER_ROW, PER_TENSOR, STACKED_BIAS

SOURCE = "nvidia-modelopt 0.47 export/quant_utils.py, quantization/qtensor"

# Algorithm in lower case -> (weight family, declared activations).
ALGORITHMS: dict[str, tuple[str, str]] = {
    "fp8": ("fp8", "fp8-static"),
    "fp8_per_channel_per_token": ("fp8", "fp8-dynamic"),
    "fp8_pb_wo": ("fp8", "fp8-dynamic"),
    "fp8_pb_real": ("fp8", "fp8-dynamic"),
    "fp8_block_scales": ("fp8", "fp8-dynamic"),
    "nvfp4": ("nvfp4", "fp4"),
    "w4a16_nvfp4": ("nvfp4", "16bit"),
    "nvfp4_awq": ("nvfp4", "fp4"),
    "w4a8_nvfp4_fp8": ("nvfp4", "fp8-static"),
    "mxfp8": ("mxfp8", "fp8-dynamic"),
}
# Known to the writer, not supported here.
UNSUPPORTED = (
    "nvfp4_svd",
    "mxfp4",
    "w4a8_mxfp4_fp8",
    "w4a16_awq",
    "w4a8_awq",
    "int4_awq",
    "w8a16",
    "w8a8_sq_per_channel",
)

_NVFP4 = ("nvfp4", "w4a16_nvfp4", "nvfp4_awq", "w4a8_nvfp4_fp8")
_BLOCK = ("fp8_pb_wo", "fp8_pb_real", "fp8_block_scales")


def block_of(algorithm: object, group: object) -> tuple[int, int] | None:
    """Rows and columns of one scale where an FP8 block algorithm comes with group_size; None for all others."""
    is_block = str(algorithm).lower() in _BLOCK
    return (group, group) if is_block and type(group) is int and group > 0 else None


def _scalar(suffix: str, role: str, shapes: tuple[str, ...], required: bool = True) -> TensorForm:
    return TensorForm(
        suffix=suffix, dtypes=("F32",), shapes=shapes, role=role, sense="multiplies", required=required
    )


def _nvfp4(codes: str, scales: tuple[str, ...], scalars: tuple[str, ...], bias: TensorForm) -> Form:
    return Form(
        scheme="nvfp4",
        algorithms=_NVFP4,
        formula="e2m1(weight) * (weight_scale * weight_scale_2)",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("U8",), shapes=(codes,), role="codes"),
            TensorForm(
                suffix="weight_scale",
                dtypes=("F8_E4M3",),
                shapes=scales,
                role="block_scale",
                sense="multiplies",
            ),
            _scalar("weight_scale_2", "global_scale", scalars),
            _scalar("input_scale", "input_scale", scalars, required=False),
            TensorForm(
                suffix="pre_quant_scale",
                dtypes=FLOAT_DTYPES,
                shapes=("[K]",),
                role="pre_scale",
                sense="multiplies",
                required=False,
            ),
            bias,
        ),
    )


def _fp8(
    scheme: str,
    suffix: str,
    codes: str,
    scales: tuple[str, ...],
    algorithms: tuple[str, ...],
    bias: TensorForm,
) -> Form:
    return Form(
        scheme=scheme,
        algorithms=algorithms,
        formula=f"e4m3(weight) * {suffix}",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=(codes,), role="codes"),
            TensorForm(suffix=suffix, dtypes=FLOAT_DTYPES, shapes=scales, role="scale", sense="multiplies"),
            _scalar(
                "input_scale", "input_scale", (*PER_TENSOR, "[E]") if "E" in codes else PER_TENSOR, False
            ),
            bias,
        ),
    )


_BLOCK_4D = ("[ceil(N/BN), 1, ceil(K/BK), 1]", *PER_BLOCK, "one block: []", "one block: [1]")

FORMS: tuple[Form, ...] = (
    _nvfp4("[N, K/2]", ("[N, K/16]", "[N, K/32]"), PER_TENSOR, BIAS),
    _fp8("fp8-tensor", "weight_scale", "[N, K]", PER_TENSOR, ("fp8",), BIAS),
    _fp8("fp8-row", "weight_scale", "[N, K]", PER_ROW, ("fp8_per_channel_per_token",), BIAS),
    _fp8("fp8-block", "weight_scale", "[N, K]", _BLOCK_4D, _BLOCK, BIAS),
    _fp8("fp8-block", "weight_scale_inv", "[N, K]", _BLOCK_4D, _BLOCK, BIAS),
    Form(
        scheme="mxfp8",
        algorithms=("mxfp8",),
        formula="e4m3(weight) * 2^(weight_scale - 127)",
        source=SOURCE,
        tensors=(
            TensorForm(suffix="weight", dtypes=("F8_E4M3",), shapes=("[N, K]",), role="codes"),
            TensorForm(
                suffix="weight_scale",
                dtypes=("U8", "F8_E8M0"),
                shapes=("[N, K/32]",),
                role="scale",
                sense="multiplies",
            ),
            BIAS,
        ),
    ),
    _nvfp4("[E, N, K/2]", ("[E, N, K/16]", "[E, N, K/32]"), ("[E]", *PER_TENSOR), STACKED_BIAS),
    _nvfp4("[E, K/2, N]", ("[E, K/16, N]", "[E, K/32, N]"), ("[E]", *PER_TENSOR), STACKED_BIAS),
    _fp8("fp8-tensor", "weight_scale", "[E, N, K]", ("[E]", *PER_TENSOR), ("fp8",), STACKED_BIAS),
    _fp8(
        "fp8-row",
        "weight_scale",
        "[E, N, K]",
        ("[E, N, 1]", "[E, N]"),
        ("fp8_per_channel_per_token",),
        STACKED_BIAS,
    ),
)
