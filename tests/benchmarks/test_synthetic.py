"""The synthetic checkpoints: the published layout to the byte, values that pass every check and stay finite."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import pytest
import synthetic
import synthetic_models
import synthetic_values
import torch
from synthetic_configs import configs
from synthetic_models import QWEN_27B, QWEN_35B, Model

import vtensors
from verify_tools import run
from vtensors_formats import FP8Weight, NVFP4Weight

REPOSITORIES = {
    "qwen3.6-27b": "nvidia--Qwen3.6-27B-NVFP4",
    "qwen3.6-35b-a3b": "nvidia--Qwen3.6-35B-A3B-NVFP4",
}
MODELS = pytest.mark.parametrize("model", [QWEN_27B, QWEN_35B], ids=lambda model: model.name)


@pytest.fixture(scope="module")
def values() -> synthetic_values.Values:
    return synthetic_values.Values(pool_elements=1_048_573)


def _tiny(model: Model) -> Model:
    return attrs.evolve(
        model,
        hidden=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=64,
        key_heads=2,
        value_heads=4,
        linear_dim=32,
        intermediate=64,
        experts=min(model.experts, 8),
        top_k=min(model.top_k, 2),
        vocab=512,
        vision_depth=1,
        vision_hidden=32,
        vision_intermediate=64,
        positions=1024,
    )


@pytest.mark.parametrize(
    ("model", "count", "total", "per_file"),
    [
        (QWEN_27B, 2_194, 21_921_428_072, [1043, 1089, 62]),
        (QWEN_35B, 124_468, 23_407_580_856, [51662, 63484, 9322]),
    ],
    ids=["27b", "35b"],
)
def test_tensors_and_bytes_are_those_of_the_published_files(
    model: Model, count: int, total: int, per_file: list[int]
) -> None:
    stored = list(synthetic_models.tensors(model))
    assert len({one.name for one in stored}) == len(stored) == count
    assert sum(one.nbytes for one in stored) == total
    assert [len(part) for part in synthetic_models.shards(model)] == per_file


def test_headers_are_as_long_as_the_published_ones() -> None:
    parts = synthetic_models.shards(QWEN_27B)
    headers = [synthetic.header_bytes(part) for part in parts]
    assert [len(header) - 8 for header in headers] == [126_504, 135_488, 7_096]
    sizes = [
        len(header) + sum(one.nbytes for one in part) for header, part in zip(headers, parts, strict=True)
    ]
    assert sizes == [9_965_652_512, 9_985_757_032, 1_970_287_640]


@MODELS
def test_names_and_configurations_equal_the_published_ones(model: Model, shared: Path) -> None:
    stem = REPOSITORIES[model.name]
    manifest = json.loads(gzip.decompress((shared / "manifests" / f"{stem}.json.gz").read_bytes()))["tensors"]
    ours = {one.name: [one.dtype, list(one.shape)] for one in synthetic_models.tensors(model)}
    assert list(ours.items()) == list(manifest.items())
    published = [
        json.loads((shared / "configs" / f"{stem}_{name}.json").read_text())
        for name in ("config", "hf_quant_config")
    ]
    assert list(configs(model)) == published


def test_an_eighth_of_the_depth_keeps_both_kinds_of_layers() -> None:
    for model, layers in ((QWEN_27B, 8), (QWEN_35B, 5)):
        shallow = synthetic_models.at_depth(model, 8)
        assert (shallow.layers, len(set(shallow.layer_types))) == (layers, 2)
        assert configs(shallow)[0]["text_config"]["num_hidden_layers"] == layers


@MODELS
def test_a_tiny_one_is_verified_and_runs(
    model: Model, values: synthetic_values.Values, tmp_path: Path
) -> None:
    tiny = _tiny(model)
    total = synthetic.write_checkpoint(tiny, tmp_path, values, threads=2)
    # What the publishers' own files are warned of: no scales for the FP8 cache, declarations that disagree.
    warned = {(finding.severity, finding.code) for finding in run(tmp_path).findings}
    assert warned <= {("warning", "missing-kv-scale"), ("warning", "declared-differs")}
    checkpoint = vtensors.open_checkpoint(tmp_path)
    assert {info.name: info.shape for info in checkpoint.snapshot.tensors.values()} == {
        one.name: one.shape for one in synthetic_models.tensors(tiny)
    }
    assert total == sum(one.nbytes for one in synthetic_models.tensors(tiny))
    logits = vtensors.load_model(tmp_path, device="cpu").logits(torch.arange(24)[None])
    assert bool(logits.isfinite().all())
    assert 0.5 < float(logits.std()) < 5
    # No tokenizer: prompts are token ids, and completions have no text.
    done_ids = vtensors.LLM(tmp_path, device="cpu").generate(
        [[1, 2, 3]], vtensors.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    )
    assert len(done_ids[0].token_ids) == 2


@MODELS
def test_dequantised_weights_have_the_deviation_that_was_wanted(
    model: Model, values: synthetic_values.Values, tmp_path: Path
) -> None:
    tiny = _tiny(model)
    synthetic.write_checkpoint(tiny, tmp_path, values, threads=1)
    checkpoint = vtensors.open_checkpoint(tmp_path)
    seen = set()
    for stored in synthetic_models.tensors(tiny):
        if stored.part != "weight" or stored.scheme == "bf16" or prod(stored.shape) < 4096:
            continue
        weight = checkpoint.read(stored.module)
        assert isinstance(weight, NVFP4Weight | FP8Weight)
        seen.add(weight.scheme)
        ratio = float(weight.dequantize(torch.float32).std()) / synthetic_values.standard_deviation(stored)
        assert 0.8 < ratio < 1.25, stored.name
    assert seen == {"nvfp4", "fp8-tensor"}


def test_experts_differ_from_one_another(values: synthetic_values.Values) -> None:
    starts = {
        bytes(next(values.pieces(stored))[:64])
        for stored in synthetic_models.tensors(synthetic_models.at_depth(QWEN_35B, 8))
        if ".experts." in stored.name and stored.part == "weight"
    }
    assert len(starts) == 5 * 256 * 3


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    def written(seed: int, threads: int) -> Mapping[str, Any]:
        folder = tmp_path / f"{seed}-{threads}"
        synthetic.write_checkpoint(
            _tiny(QWEN_27B), folder, synthetic_values.Values(seed, pool_elements=65_521), threads=threads
        )
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    assert written(0, 1) == written(0, 4)
    first, second = written(0, 1), written(1, 1)
    assert [name for name in first if first[name] != second[name]] == ["model-00001-of-00001.safetensors"]
