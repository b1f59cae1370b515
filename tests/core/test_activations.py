"""The table of activation precision: argument, then switch, then 16 bits."""

from __future__ import annotations

import pytest

from vtensors.activations import ActivationRequest, executed_activations
from vtensors.errors import RequestError
from vtensors.forms import Form
from vtensors.records import Claim, DeclaredScheme
from vtensors.tensors import TensorInfo

INFO = TensorInfo(name="x.input_scale", dtype="F32", shape=(), file="f", begin=0, end=4)
FORM = Form(scheme="nvfp4", tensors=(), formula="", source="")


def claim(convention: str, scheme: str, *, scale: bool) -> Claim:
    role = "input_divisor" if convention == "compressed-tensors" and scheme == "nvfp4" else "input_scale"
    roles = {role: INFO} if scale else {}
    return Claim(module="x", convention=convention, scheme=scheme, shape=(16, 16), roles=roles, form=FORM)


def declared(activations: str, algorithm: str = "A", *, weight: str = "nvfp4") -> DeclaredScheme:
    return DeclaredScheme(weight=weight, algorithm=algorithm, activations=activations, where="config.json")


NONE = ActivationRequest()
SIXTEEN = ActivationRequest(argument="16bit", modelopt_w4a4=True, fp8_w8a8=True)
DECLARED = ActivationRequest(argument="declared")
FP4 = ActivationRequest(argument="fp4")
SWITCH = ActivationRequest(modelopt_w4a4=True)
W8A8 = ActivationRequest(fp8_w8a8=True)
FP4_W8A8 = ActivationRequest(argument="fp4", fp8_w8a8=True)

MODELOPT, CT = "modelopt", "compressed-tensors"
TABLE = [
    # convention, scheme, declared, has an input scale, request, executed, warned
    (MODELOPT, "nvfp4", "fp4", True, NONE, "16bit", False),
    (MODELOPT, "nvfp4", "fp4", True, SIXTEEN, "16bit", False),
    (MODELOPT, "nvfp4", "fp4", True, DECLARED, "fp4", False),
    (MODELOPT, "nvfp4", "fp4", True, FP4, "fp4", False),
    (MODELOPT, "nvfp4", "fp4", True, SWITCH, "fp4", False),
    (MODELOPT, "nvfp4", "16bit", True, NONE, "16bit", False),
    (MODELOPT, "nvfp4", "16bit", True, DECLARED, "16bit", False),
    (MODELOPT, "nvfp4", "16bit", True, FP4, "fp4", True),
    (MODELOPT, "nvfp4", "16bit", True, SWITCH, "fp4", True),
    (MODELOPT, "nvfp4", "fp4", False, NONE, "16bit", False),
    (MODELOPT, "nvfp4", "fp4", False, DECLARED, "16bit", True),
    (MODELOPT, "nvfp4", "16bit", False, DECLARED, "16bit", False),
    (MODELOPT, "nvfp4", "fp4", False, FP4, "16bit", True),
    (MODELOPT, "nvfp4", "16bit", False, SWITCH, "16bit", True),
    (CT, "nvfp4", "fp4", True, NONE, "16bit", False),
    (CT, "nvfp4", "fp4", True, DECLARED, "fp4", False),
    (CT, "nvfp4", "fp4", True, FP4, "fp4", False),
    (CT, "nvfp4", "fp4", True, SWITCH, "16bit", False),
    (CT, "nvfp4", "16bit", False, FP4, "16bit", True),
    (MODELOPT, "fp8-tensor", "fp8-static", True, NONE, "16bit", False),
    (MODELOPT, "fp8-tensor", "fp8-static", True, DECLARED, "fp8-static", False),
    (MODELOPT, "fp8-tensor", "fp8-static", True, FP4, "16bit", False),
    (MODELOPT, "fp8-tensor", "fp8-static", True, FP4_W8A8, "fp8-static", False),
    (MODELOPT, "fp8-tensor", "fp8-static", True, W8A8, "fp8-static", False),
    (MODELOPT, "fp8-tensor", "fp8-static", True, SWITCH, "16bit", False),
    (MODELOPT, "fp8-tensor", "fp8-static", False, DECLARED, "fp8-dynamic", True),
    (CT, "fp8-row", "fp8-dynamic", False, W8A8, "fp8-dynamic", False),
    (CT, "fp8-row", "16bit", False, DECLARED, "16bit", False),
    (MODELOPT, "mxfp8", "fp8-dynamic", False, DECLARED, "fp8-dynamic", False),
    (MODELOPT, "bf16", "fp4", False, DECLARED, "16bit", False),
]


@pytest.mark.parametrize(("convention", "scheme", "says", "scale", "request_", "executed", "warned"), TABLE)
def test_each_cell_of_the_table_runs_at_the_precision_written_there(
    convention: str,
    scheme: str,
    says: str,
    scale: bool,
    request_: ActivationRequest,
    executed: str,
    warned: bool,
) -> None:
    found = executed_activations(claim(convention, scheme, scale=scale), declared(says), request_)
    assert found.activations == executed
    assert bool(found.warning) == warned


def test_w4a8_runs_fp8_activations_only_where_they_are_asked_for() -> None:
    weight = claim(MODELOPT, "nvfp4", scale=True)
    assert executed_activations(weight, declared("fp8-static"), DECLARED).activations == "fp8-static"
    assert executed_activations(weight, declared("fp8-static"), W8A8).activations == "fp8-static"
    assert executed_activations(weight, declared("fp8-static"), SWITCH).activations == "16bit"
    assert executed_activations(weight, declared("fp8-static"), NONE).activations == "16bit"


@pytest.mark.parametrize("says", ["fp8-static", "fp8-dynamic"])
@pytest.mark.parametrize("request_", [DECLARED, W8A8])
def test_w4a8_without_a_stored_scale_is_named(says: str, request_: ActivationRequest) -> None:
    found = executed_activations(claim(MODELOPT, "nvfp4", scale=False), declared(says), request_)
    assert (found.activations, "no stored scale" in found.warning) == ("16bit", True)


def test_the_divisor_of_4_bit_activations_is_no_scale_of_8_bit_ones() -> None:
    found = executed_activations(claim(CT, "nvfp4", scale=True), declared("fp8-static"), DECLARED)
    assert (found.activations, "no stored scale" in found.warning) == ("16bit", True)


@pytest.mark.parametrize("request_", [ActivationRequest(argument="fp4"), SWITCH])
def test_4_bit_activations_are_not_run_on_a_scale_of_8_bit_ones(request_: ActivationRequest) -> None:
    found = executed_activations(claim(MODELOPT, "nvfp4", scale=True), declared("fp8-static"), request_)
    assert (found.activations, "FP8 ones are declared" in found.warning) == ("16bit", True)


def test_an_unknown_word_is_refused_with_the_accepted_ones() -> None:
    with pytest.raises(RequestError, match="'w4a4'") as caught:
        ActivationRequest(argument="w4a4")
    assert "'declared'" in str(caught.value)


@pytest.mark.parametrize("says", ["fp8-static", "fp8-dynamic"])
@pytest.mark.parametrize("request_", [DECLARED, FP4, SWITCH, W8A8])
def test_activations_of_fp8_weights_are_not_run_on_nvfp4_ones(says: str, request_: ActivationRequest) -> None:
    found = executed_activations(claim(MODELOPT, "nvfp4", scale=True), declared(says, weight="fp8"), request_)
    assert (found.activations, "another kind" in found.warning) == ("16bit", True)
    found = executed_activations(claim(MODELOPT, "nvfp4", scale=True), declared(says, weight="fp8"), NONE)
    assert (found.activations, found.warning) == ("16bit", "")


@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8-row", "fp8-block", "mxfp8"])
def test_activations_of_nvfp4_weights_are_not_run_on_fp8_ones(scheme: str) -> None:
    found = executed_activations(claim(MODELOPT, scheme, scale=True), declared("fp4"), DECLARED)
    assert (found.activations, "another kind" in found.warning) == ("16bit", True)
    assert not executed_activations(claim(MODELOPT, scheme, scale=True), declared("fp4"), NONE).warning
