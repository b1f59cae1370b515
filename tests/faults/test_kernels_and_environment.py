"""Plugins, kernels and toolkits that fail: named, passed over, never fatal and never silent."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import IDS, load, modelopt_layers, nvfp4, plain_tensors, quantised, write_model

from fake_plugins import candidate, module
from tiny_decoders import tiny_config
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec

CONFIG = tiny_config("llama")
DOWN = "model.layers.0.mlp.down_proj"
CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-llmcompressor-nvfp4a16"


def _kernel(bind: Callable[[Any, KernelRequest], Callable[..., Any]]) -> KernelSpec:
    return KernelSpec(
        name="linear_fast",
        op="linear",
        schemes=("nvfp4",),
        targets=("cpu",),
        numerics="bitwise",
        refuse=lambda request: None,
        bind=bind,
        cost=1.0,
    )


def _model(tmp_path: Path) -> Path:
    tensors = plain_tensors(CONFIG)
    tensors = quantised(tensors, {DOWN: nvfp4(DOWN, tensors[f"{DOWN}.weight"])})
    return write_model(tmp_path / "m", CONFIG, tensors, quantization=modelopt_layers({DOWN: "NVFP4"}))


@pytest.mark.fault("B88")
def test_a_kernel_that_says_yes_and_fails_to_bind_loses_with_its_reason(tmp_path: Path) -> None:
    def bind(weight: Any, request: KernelRequest) -> Callable[..., Any]:
        raise RuntimeError("no image for this device")

    plugin = module("fast", {"vtensors_kernels": lambda: [_kernel(bind)]})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    folder = _model(tmp_path)
    model = load(folder, plugins=plugins)
    (record,) = [r for r in model.selected if r.module == DOWN]
    assert record.kernel == "linear_reference"
    assert ("linear_fast", "failed to bind: RuntimeError: no image for this device") in record.rejected
    assert model.logits(IDS).equal(load(folder).logits(IDS))


@pytest.mark.fault("B87")
def test_a_kernel_of_one_format_leaves_layers_of_another_to_the_next_with_a_reason(tmp_path: Path) -> None:
    plugin = module("fast", {"vtensors_kernels": lambda: [_kernel(lambda weight, request: _unused)]})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    chosen = {record.module: record for record in load(_model(tmp_path), plugins=plugins).selected}
    assert chosen[DOWN].kernel == "linear_fast"
    other = chosen["model.layers.0.mlp.up_proj"]
    assert other.kernel == "linear_reference"
    assert ("linear_fast", "computes nvfp4, not bf16") in other.rejected


def _unused(*_: Any) -> Any:
    raise AssertionError("nothing is computed here")


@pytest.mark.fault("B100")
def test_a_kernel_plugin_that_fails_to_register_is_named_and_the_model_says_what_it_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[KernelSpec]:
        raise OSError("libfast.so: cannot open shared object file")

    failing = candidate("fast", module("fast", {"vtensors_kernels": broken}))
    with caplog.at_level(logging.WARNING, "vtensors"):
        plugins = Plugins.discover(third_parties=[failing], environ={})
        model = load(_model(tmp_path), plugins=plugins)
    assert "fast-dist 1.2" in caplog.text
    assert "libfast.so: cannot open shared object file" in caplog.text
    assert {record.kernel for record in model.selected} == {"linear_reference", "embedding_reference"}


@pytest.mark.fault("B78")
def test_import_env_inspect_and_load_need_no_compiler(tmp_path: Path) -> None:
    unset = ("PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "LD_LIBRARY_PATH")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ["PATH"] = str(tmp_path)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "nvcc" not in done.stderr
        return done.stdout

    assert json.loads(run("-m", "vtensors", "env", "--json"))["versions"]["vtensors"]
    assert json.loads(run("-m", "vtensors", "inspect", str(CHECKPOINT), "--json"))["unclaimed"] == []
    text = f"import vtensors; print(vtensors.load_model({str(CHECKPOINT)!r}, device='cpu').vocab_size)"
    assert int(run("-c", text)) > 0
