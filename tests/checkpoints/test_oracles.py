"""Every checkpoint against the publisher's own numbers: weights, logits, declared activations, greedy tokens.

Limits, for float32: weights bit for bit (the sign of a zero aside); logits within 1e-4 of the largest oracle
logit, four times what another correct forward differs by; declared activations within 1e-2, because a 4-bit
rounding flips at a tie; greedy tokens equal up to the first step whose margin lies inside 3e-4.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from oracle_cases import Case, all_cases
from safetensors.torch import load_file

import vtensors

CASES = [pytest.param(case, id=case.name) for case in all_cases()]
LOGITS, DECLARED, MARGIN = 1e-4, 1e-2, 3e-4


@pytest.mark.parametrize("case", CASES)
def test_every_matrix_is_the_publishers_own_bit_for_bit(case: Case) -> None:
    checkpoint = vtensors.open_checkpoint(case.path)
    wanted = case.oracle["weights_float32_sha256"]
    assert wanted
    for name, digest in wanted.items():
        matrix = checkpoint.read(name.removesuffix(".weight")).dequantize(torch.float32) + 0.0
        assert hashlib.sha256(matrix.contiguous().numpy().tobytes()).hexdigest() == digest, name


def _relative_error(ours: torch.Tensor, oracle: torch.Tensor) -> float:
    return ((ours.float() - oracle).abs().max() / oracle.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_oracles(case: Case) -> None:
    tensors = load_file(case.oracle_folder / "tensors.safetensors")
    model = vtensors.load_model(case.path, device="cpu", dtype=torch.float32, activations="16bit")
    assert _relative_error(model.logits(tensors["input_ids"]), tensors["logits"]) <= LOGITS
    if "logits_declared" in tensors:
        model = vtensors.load_model(case.path, device="cpu", dtype=torch.float32, activations="declared")
        assert _relative_error(model.logits(tensors["input_ids"]), tensors["logits_declared"]) <= DECLARED


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_oracles_up_to_a_near_tie(case: Case) -> None:
    oracle = case.oracle
    steps = oracle["greedy"]
    llm = vtensors.LLM(case.path, device="cpu", dtype=torch.float32, activations="16bit")
    params = vtensors.SamplingParams(temperature=0.0, max_tokens=len(steps[0]["token_ids"]), ignore_eos=True)
    outputs = llm.generate([step["prompt_ids"] for step in steps], params)
    compared = 0
    for step, output in zip(steps, outputs, strict=True):
        for ours, token, margin in zip(output.token_ids, step["token_ids"], step["margins"], strict=True):
            if margin < MARGIN * oracle["logits_absmax"]:
                break
            compared += 1
            assert ours == token
    assert compared >= 8


def test_ignoring_declared_activations_would_be_seen() -> None:
    case = next(case for case in all_cases() if case.name.startswith("kjv-dense-modelopt-mixed"))
    tensors = load_file(case.oracle_folder / "tensors.safetensors")
    model = vtensors.load_model(case.path, device="cpu", dtype=torch.float32, activations="16bit")
    assert _relative_error(model.logits(tensors["input_ids"]), tensors["logits_declared"]) > DECLARED
