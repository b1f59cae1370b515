"""Heads that are tied, repeated or quantised, and the prefixes under which checkpoints keep their text model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import IDS, fp8, load, logits, modelopt_layers, nvfp4, plain_tensors, quantised, write_model

from tiny_decoders import tiny_config
from vtensors.errors import ArchitectureError, VtensorsError

TIED = tiny_config("llama", tie_word_embeddings=True)
UNTIED = tiny_config("llama")
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.mark.fault("B53")
@pytest.mark.parametrize("stored", [False, True], ids=["no-head", "equal-head"])
def test_a_tied_head_shares_the_embeddings_whether_the_file_repeats_them_or_not(
    tmp_path: Path, stored: bool
) -> None:
    tensors = plain_tensors(TIED, head=None)
    head = {"lm_head.weight": tensors[EMBEDDINGS].clone()}
    untied = write_model(tmp_path / "untied", UNTIED, {**tensors, **head})
    tied = write_model(tmp_path / "tied", TIED, {**tensors, **(head if stored else {})})
    model = load(tied)
    assert torch.equal(model.logits(IDS), load(untied).logits(IDS))
    # One buffer, not two: the head is computed on the embeddings.
    computed = {(record.op, record.module) for record in model.selected}
    assert ("linear", "model.embed_tokens") in computed
    assert all(module != "lm_head" for _, module in computed)


@pytest.mark.fault("B53")
@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "fp8"])
def test_a_head_of_its_own_is_used_and_said_although_the_config_ties_it(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = plain_tensors(TIED)
    block = None
    if scheme != "bf16":
        encode = {"nvfp4": nvfp4, "fp8": fp8}[scheme]
        tensors = quantised(tensors, {"lm_head": encode("lm_head", tensors["lm_head.weight"])})
        block = modelopt_layers({"lm_head": scheme.upper()})
    tied = write_model(tmp_path / "tied", TIED, tensors, quantization=block)
    untied = write_model(tmp_path / "untied", UNTIED, tensors, quantization=block)
    with caplog.at_level(logging.WARNING, "vtensors"):
        model = load(tied)
    assert "the checkpoint holds 'lm_head': the file's head is used" in caplog.text
    assert torch.equal(model.logits(IDS), load(untied).logits(IDS))
    assert model.checkpoint.modules["lm_head"].scheme.startswith(scheme)
    without = write_model(tmp_path / "without", TIED, plain_tensors(TIED, head=None))
    assert not torch.allclose(model.logits(IDS), load(without).logits(IDS), atol=0.1)


@pytest.mark.fault("B52")
def test_a_model_whose_values_are_its_keys_is_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    config = tiny_config("llama", attention_k_eq_v=True)
    tensors = {n: t for n, t in plain_tensors(UNTIED).items() if ".v_proj" not in n}
    key = "model.layers.0.self_attn.k_proj"
    tensors = quantised(tensors, {key: nvfp4(key, tensors[f"{key}.weight"])})
    folder = write_model(tmp_path / "m", config, tensors, quantization=modelopt_layers({key: "NVFP4"}))
    with pytest.raises(ArchitectureError, match="attention_k_eq_v = True"):
        load(folder)


@pytest.mark.fault("B55")
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_every_known_prefix_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    found = [
        logits(write_model(tmp_path / str(number), config, plain_tensors(config, prefix=prefix)))
        for number, prefix in enumerate(("", "model.", "model.language_model.", "language_model.model."))
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.fault("B55")
def test_a_repeated_wrapper_prefix_is_refused_with_the_known_ones_at_load(tmp_path: Path) -> None:
    tensors = plain_tensors(UNTIED, prefix="model.language_model.language_model.")
    with pytest.raises(
        VtensorsError, match=r"unknown prefix 'model\.language_model\.language_model\.', known: ''"
    ):
        load(write_model(tmp_path / "m", UNTIED, tensors))


@pytest.mark.fault("B55")
def test_two_prefixes_that_give_one_name_are_refused_at_load(tmp_path: Path) -> None:
    name = "layers.0.mlp.down_proj.weight"
    tensors = plain_tensors(UNTIED)
    tensors |= {f"model.language_model.{name}": tensors[f"model.{name}"].clone()}
    with pytest.raises(VtensorsError, match="two prefixes give the same weights") as caught:
        load(write_model(tmp_path / "m", UNTIED, tensors))
    assert "model.language_model.layers.0.mlp.down_proj" in str(caught.value)
