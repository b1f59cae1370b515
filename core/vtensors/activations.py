"""At which activation precision a module runs: argument, then switch, then 16 bits."""

from __future__ import annotations

import attrs

from vtensors.errors import RequestError
from vtensors.records import Claim, DeclaredScheme

MODES = ("16bit", "declared", "fp4")
INPUT_ROLES = ("input_scale", "input_divisor")


@attrs.frozen(kw_only=True)
class ActivationRequest:
    """What the user asked for.

    argument: None, `16bit`, `declared` or `fp4`. modelopt_w4a4: `VT_MODELOPT_W4A4`. fp8_w8a8: `VT_FP8_W8A8`.
    """

    argument: str | None = None
    modelopt_w4a4: bool = False
    fp8_w8a8: bool = False

    def __attrs_post_init__(self) -> None:
        if self.argument is not None and self.argument not in MODES:
            raise RequestError(
                "unknown activations",
                seen=repr(self.argument),
                accepted="None, " + ", ".join(repr(mode) for mode in MODES),
                fix="pass one of these",
            )


@attrs.frozen(kw_only=True)
class Executed:
    """activations: `16bit`, `fp4`, `fp8-static` or `fp8-dynamic`. warning: a kind of surprise, or ``."""

    activations: str
    warning: str = ""


_SIXTEEN = Executed(activations="16bit")
_NO_SCALE_DECLARED = Executed(
    activations="16bit",
    warning="4-bit activations are declared, but there is no input_scale: run with 16-bit activations",
)
_NO_SCALE_ASKED = Executed(
    activations="16bit",
    warning="4-bit activations were asked for, but there is no input scale: run with 16-bit activations",
)
_NO_FP8_SCALE = Executed(
    activations="16bit",
    warning="FP8 activations of NVFP4 weights are declared, but there is no stored scale for them: run with 16-bit "
    "activations",
)
_FP8_SCALE = Executed(
    activations="16bit",
    warning="4-bit activations were asked for, but FP8 ones are declared: run with 16-bit activations",
)
_OTHER_WEIGHTS = Executed(
    activations="16bit",
    warning="activations are declared for weights of another kind than the file holds: run with 16-bit activations",
)
_FP4_ON_WEIGHT_ONLY = Executed(
    activations="fp4",
    warning="weight-only (W4A16) is declared; 4-bit activations run because they were asked for",
)


def executed_activations(
    claim: Claim, declared: DeclaredScheme | None, request: ActivationRequest
) -> Executed:
    """The activation precision of one module under the request, as the table in the design says."""
    wanted = declared.activations if declared is not None else "16bit"
    if claim.scheme == "nvfp4":
        if declared is not None and declared.weight in ("fp8", "mxfp8") and wanted != "16bit":
            return _OTHER_WEIGHTS if _fp8_asked(request) or _fp4_asked(claim, request) else _SIXTEEN
        return _nvfp4(claim, request, wanted)
    if wanted == "16bit" or claim.scheme in ("bf16", "f16", "f32"):
        return _SIXTEEN
    if not _fp8_asked(request):
        return _SIXTEEN
    if wanted == "fp4":
        return _OTHER_WEIGHTS
    if wanted == "fp8-static" and "input_scale" not in claim.roles:
        return Executed(
            activations="fp8-dynamic",
            warning="static FP8 activations are declared, but there is no input_scale: scaled per token",
        )
    return Executed(activations=wanted)


def _fp8_asked(request: ActivationRequest) -> bool:
    return request.argument == "declared" or (request.argument in (None, "fp4") and request.fp8_w8a8)


def _fp4_asked(claim: Claim, request: ActivationRequest) -> bool:
    by_switch = request.argument is None and request.modelopt_w4a4 and claim.convention == "modelopt"
    return request.argument == "fp4" or by_switch


def _nvfp4(claim: Claim, request: ActivationRequest, wanted: str) -> Executed:
    has_scale = any(role in claim.roles for role in INPUT_ROLES)
    if wanted in ("fp8-static", "fp8-dynamic"):
        if not _fp8_asked(request):
            return _FP8_SCALE if _fp4_asked(claim, request) else _SIXTEEN
        # Only a stored scale goes with NVFP4 weights (W4A8_NVFP4_FP8).
        stored = wanted == "fp8-static" and "input_scale" in claim.roles
        return Executed(activations="fp8-static") if stored else _NO_FP8_SCALE
    if _fp4_asked(claim, request):
        if not has_scale:
            return _NO_SCALE_ASKED
        return _FP4_ON_WEIGHT_ONLY if wanted == "16bit" else Executed(activations="fp4")
    if request.argument == "declared" and wanted == "fp4":
        return Executed(activations="fp4") if has_scale else _NO_SCALE_DECLARED
    return _SIXTEEN
