"""Zero-centred norms: the one is added once, in float32, whatever else the checkpoint holds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import load, logits, plain_tensors, write_model
from torch import Tensor

import vtensors
from tiny_decoders import tiny_config

CONFIG = tiny_config("qwen3_5")
ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")
MTP = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.input_layernorm.weight": (32,)}


def with_norms(value: float, *, gated: float = 1.0) -> dict[str, Tensor]:
    """The tiny Qwen3.5 with every zero-centred norm at value and the delta net's plain norm at gated."""
    tensors = plain_tensors(CONFIG)
    for name, tensor in tensors.items():
        if name.removesuffix(".weight").endswith(ZERO_CENTRED):
            tensors[name] = torch.full_like(tensor, value)
        elif name.endswith("linear_attn.norm.weight"):
            tensors[name] = torch.full_like(tensor, gated)
    return tensors


def mtp(value: float) -> dict[str, Tensor]:
    """Multi-token prediction tensors, all of one value."""
    return {name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in MTP.items()}


@pytest.mark.fault("B19")
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_gain_does_not_depend_on_the_presence_of_mtp_tensors(tmp_path: Path, value: float) -> None:
    without = write_model(tmp_path / "without", CONFIG, with_norms(0.0))
    beside = write_model(tmp_path / "beside", CONFIG, {**with_norms(0.0), **mtp(value)})
    assert torch.equal(logits(without), logits(beside))


@pytest.mark.fault("B19")
def test_a_zero_norm_weight_is_gain_one_in_a_loaded_model(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, CONFIG, with_norms(0.0)))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    decoder = model._model
    for norm in (
        decoder.norm,
        *(part for layer in decoder.layers for part in (layer.input_norm, layer.post_norm)),
    ):
        assert torch.allclose(norm(x), plain)


@pytest.mark.fault("B19")
def test_the_delta_nets_gated_norm_is_plain(tmp_path: Path) -> None:
    one, zero = (
        logits(write_model(tmp_path / str(gated), CONFIG, with_norms(0.0, gated=gated)))
        for gated in (1.0, 0.0)
    )
    # A plain norm of zero silences the delta net: the same as a zero output projection.
    tensors = with_norms(0.0)
    out = "model.layers.0.linear_attn.out_proj.weight"
    tensors[out] = torch.zeros_like(tensors[out])
    assert torch.equal(zero, logits(write_model(tmp_path / "silent", CONFIG, tensors)))
    assert not torch.allclose(one, zero, atol=1e-2)


@pytest.mark.fault("B19")
@pytest.mark.parametrize(("value", "warned"), [(0.0, False), (0.5, False), (1.0, True), (1.05, True)])
def test_norms_that_look_converted_already_are_warned_of_with_their_mean(
    tmp_path: Path, value: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, CONFIG, with_norms(value))
    with caplog.at_level(logging.WARNING, "vtensors"):
        load(folder)
    told = [r.getMessage() for r in caplog.records if "norm weights" in r.getMessage()]
    assert len(told) == warned
    if warned:
        assert f"mean {value:.2f}" in told[0]


@pytest.mark.fault("B20")
def test_a_gain_smaller_than_a_bfloat16_step_survives_a_bfloat16_model(tmp_path: Path) -> None:
    small = float(torch.tensor(0.003, dtype=torch.bfloat16))
    model = vtensors.load_model(
        write_model(tmp_path, CONFIG, with_norms(0.003)), device="cpu", dtype=torch.bfloat16
    )
    assert model.dtype == torch.bfloat16
    ones = torch.ones(1, 32)
    gain = (1 + small) / (1 + 1e-6) ** 0.5
    decoder = model._model
    norms = [decoder.norm, *(n for layer in decoder.layers for n in (layer.input_norm, layer.post_norm))]
    for norm in norms:
        assert torch.allclose(norm(ones), torch.full((1, 32), gain), rtol=1e-6)
    attention = decoder.layers[1].mixer
    for norm in (attention.q_norm, attention.k_norm):
        assert torch.allclose(norm(torch.ones(1, 16)), torch.full((1, 16), gain), rtol=1e-6)
