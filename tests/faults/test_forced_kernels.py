"""A kernel that is forced, or that says it can: other layers are left alone, and what fails is told and replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, fp8, load, modelopt_layers, nvfp4, plain_tensors, quantised, write_model

from fake_plugins import candidate, module
from kernel_specs import failing, kernel
from tiny_decoders import tiny_config
from vtensors.errors import RequestError, VtensorsError
from vtensors.manager import Plugins
from vtensors.records import KernelRequest, KernelSpec

CONFIG = tiny_config("llama")
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def _fast(name: str, scheme: str, **fields: Any) -> KernelSpec:
    """A linear on the CPU that computes what the reference does."""

    def bind(weight: Any, asked: KernelRequest) -> Callable[..., Any]:
        return lambda x: x @ weight.dequantize(torch.float32).t()

    return kernel(name, schemes=(scheme,), targets=("cpu",), bind=fields.pop("bind", bind), **fields)


def _mixed(tmp_path: Path) -> Path:
    """A model with one NVFP4 and one FP8 layer, the others plain."""
    tensors = plain_tensors(CONFIG)
    layers = {
        DOWN: nvfp4(DOWN, tensors[f"{DOWN}.weight"]),
        UP: fp8(UP, tensors[f"{UP}.weight"]),
    }
    return write_model(
        tmp_path / "m",
        CONFIG,
        quantised(tensors, layers),
        quantization=modelopt_layers({DOWN: "NVFP4", UP: "FP8"}),
    )


def _plugins(*kernels: KernelSpec) -> Plugins:
    plugin = module("fast", {"vtensors_kernels": lambda: list(kernels)})
    return Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})


def _kernels_of(model: Any) -> dict[str, str]:
    return {record.module: record.kernel for record in model.selected}


@pytest.mark.fault("B87")
def test_a_kernel_is_forced_for_one_scheme_and_other_layers_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = _plugins(_fast("linear_cheap", "nvfp4", cost=1.0), _fast("linear_wanted", "nvfp4", cost=2.0))
    folder = _mixed(tmp_path)
    assert _kernels_of(load(folder, plugins=plugins))[DOWN] == "linear_cheap"
    monkeypatch.setenv("VT_KERNELS", "nvfp4:linear_wanted")
    found = _kernels_of(load(folder, plugins=plugins))
    assert found[DOWN] == "linear_wanted"
    assert found[UP] == "linear_reference"


@pytest.mark.fault("B87")
def test_layers_that_a_kernel_forced_for_all_cannot_serve_fall_back_with_a_line_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = _plugins(_fast("linear_wanted", "nvfp4"))
    folder = _mixed(tmp_path)
    monkeypatch.setenv("VT_KERNELS", "*:linear_wanted")
    with caplog.at_level(logging.WARNING, "vtensors"):
        assert _kernels_of(load(folder, plugins=plugins))[DOWN] == "linear_wanted"
    told = "VT_KERNELS: '*:linear_wanted' has no kernel for fp8-tensor weights; others are used"
    assert sum(told in line for line in caplog.messages) == 1
    monkeypatch.setenv("VT_STRICT", "fallbacks")
    with pytest.raises(RequestError, match="has no kernel for fp8-tensor weights"):
        load(folder, plugins=plugins)


@pytest.mark.fault("B87")
def test_a_rule_for_a_scheme_that_the_model_lacks_is_told_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VT_KERNELS", "mxfp8:linear_reference")
    monkeypatch.setenv("VT_STRICT", "fallbacks")
    with caplog.at_level(logging.WARNING, "vtensors"):
        load(_mixed(tmp_path))
    assert "VT_KERNELS: 'mxfp8:linear_reference' matches no scheme of this model" in caplog.messages


@pytest.mark.fault("B88")
def test_a_kernel_that_says_yes_and_whose_launch_raises_loses_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = failing("expected scalar type Half but found BFloat16")
    plugins = _plugins(_fast("linear_new", "nvfp4", cost=1.0, probe=launch), _fast("linear_old", "nvfp4"))
    folder = _mixed(tmp_path)
    with caplog.at_level(logging.WARNING, "vtensors"):
        model = load(folder, plugins=plugins)
    (record,) = [record for record in model.selected if record.module == DOWN]
    assert record.kernel == "linear_old"
    assert "expected scalar type Half" in dict(record.rejected)["linear_new"]
    assert any("linear_new failed its self-test" in line and "linear_old" in line for line in caplog.messages)
    torch.testing.assert_close(model.logits(IDS), load(folder).logits(IDS), rtol=0, atol=1e-4)
    monkeypatch.setenv("VT_KERNELS", "nvfp4:linear_new")
    with pytest.raises(VtensorsError, match="no kernel computes 'linear' on nvfp4") as caught:
        load(folder, plugins=plugins)
    assert "linear_old: VT_KERNELS asks for nvfp4:linear_new" in str(caught.value)


@pytest.mark.fault("B87")
def test_an_unknown_name_in_the_switch_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VT_KERNELS", "nvfp4:linear_refrence")
    with pytest.raises(VtensorsError, match="did you mean linear_reference"):
        load(_mixed(tmp_path))
