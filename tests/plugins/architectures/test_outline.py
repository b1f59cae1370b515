"""The outline of a model: what a load would bind, told from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vtensors
from fake_plugins import candidate, module
from vtensors.errors import ArchitectureError, RequestError
from vtensors.manager import Plugins
from vtensors.reading import TensorReader
from vtensors.records import KernelRequest, KernelSpec
from vtensors_plugins.architectures.groups import PlannedGroup
from vtensors_plugins.architectures.outline import outline

DATA = Path(__file__).parents[2] / "data"
CHECKPOINTS = sorted(folder.name for folder in DATA.iterdir() if (folder / "model.safetensors").is_file())
QUANTIZED_HEAD = "qwen35vl-modelopt-mixed-w4a16mlp-fp8attn"
FUSED = ("linears", "norm_linears", "norm_linear_swiglu", "linear_add")


def _fused_kernel(op: str, **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": f"{op}_mine",
        "op": op,
        "schemes": ("*",),
        "targets": ("cpu",),
        "numerics": "bitwise",
        "refuse": lambda request: None,
        "bind": lambda prepared, request: lambda *arguments: None,
        "cost": 10.0,
    }
    return KernelSpec(**(fields | changes))


def _plugins(*kernels: KernelSpec) -> Plugins:
    plugin = candidate("mine", module("mine", {"vtensors_kernels": lambda: list(kernels)}))
    return Plugins.discover(third_parties=[plugin], environ={})


def _told(group: PlannedGroup) -> tuple[object, ...]:
    kernels = tuple((*segment.tokens, segment.kernel.name) for segment in group.plan.segments)
    request = group.request
    return (
        group.modules,
        group.asked,
        request.op,
        request.scheme,
        request.activations,
        group.declared,
        kernels,
        group.not_fused,
    )


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("activations", [None, "declared"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_outline_is_what_a_load_binds(name: str, activations: str | None, fused: bool) -> None:
    plugins = _plugins(*(_fused_kernel(op) for op in FUSED if fused))
    groups = outline(
        vtensors.open_checkpoint(DATA / name, plugins=plugins), activations=activations, dtype="float32"
    )
    model = vtensors.load_model(
        DATA / name, device="cpu", dtype="float32", activations=activations, plugins=plugins
    )
    records = {(record.module, record.op): record for record in model.selected}
    bound = [
        (
            record.group,
            record.asked,
            record.op,
            record.scheme,
            record.executed,
            tuple(records[member, record.op].declared for member in record.group),
            record.kernels,
            record.not_fused,
        )
        for record in model.selected
        if record.module == record.group[0]
    ]
    # Only values can tell whether input scales are equal; there the outline says what it took for granted.
    assumed = {member for group in groups if group.assumes for member in group.modules}
    assert [_told(group) for group in groups if assumed.isdisjoint(group.modules)] == [
        entry for entry in bound if assumed.isdisjoint(entry[0])
    ]
    assert any(len(group.modules) > 1 and group.request.op != "experts" for group in groups) is fused
    if activations is None:
        assert not assumed


def test_no_weight_byte_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("bytes of a tensor were asked for")

    for reads in ("bytes_view", "read_copy", "read_part"):
        monkeypatch.setattr(TensorReader, reads, never)
    for name in CHECKPOINTS:
        assert outline(vtensors.open_checkpoint(DATA / name))


def test_a_device_that_is_not_there_is_planned_for() -> None:
    seen: list[KernelRequest] = []

    def refuse(request: KernelRequest) -> str | None:
        seen.append(request)
        return None

    hopper = _fused_kernel("linear", targets=("sm_90a",), refuse=refuse, schemes=("nvfp4",), cost=0.0)
    checkpoint = vtensors.open_checkpoint(DATA / "llama-llmcompressor-nvfp4a16", plugins=_plugins(hopper))
    kernels = {
        (device, capability): {
            group.plan.segments[0].kernel.name
            for group in outline(checkpoint, device=device, capability=capability, assumed=True)
            if group.request.scheme == "nvfp4"
        }
        for device, capability in (("cuda:0", (9, 0)), ("cuda:0", (12, 1)), ("cpu", None))
    }
    assert "linear_mine" in kernels["cuda:0", (9, 0)]
    assert all("linear_mine" not in names for place, names in kernels.items() if place[1] != (9, 0))
    assert {(request.device, request.dtype, request.assumed) for request in seen} == {
        ("cuda:0", "bfloat16", True)
    }


def test_the_outline_follows_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {}
    for flag in ("0", "1"):
        monkeypatch.setenv("VT_LMHEAD_QUANTIZED", flag)
        checkpoint = vtensors.open_checkpoint(DATA / QUANTIZED_HEAD)
        (head,) = [group for group in outline(checkpoint) if group.modules == ("lm_head",)]
        schemes[flag] = head.request.scheme
    assert schemes == {"0": "f32", "1": "nvfp4"}
    monkeypatch.setenv("VT_KERNELS", "*:!linear_add_*")
    plugins = _plugins(_fused_kernel("linear_add"))
    groups = outline(vtensors.open_checkpoint(DATA / QUANTIZED_HEAD, plugins=plugins))
    reasons = [
        reason
        for group in groups
        if group.asked == "linear_add"
        for kernel, reason in group.not_fused
        if kernel == "linear_add_mine"
    ]
    assert reasons
    assert all("VT_KERNELS forbids it" in reason for reason in reasons)


def test_a_convention_that_looks_at_values_is_given_zeros(tmp_path: Path) -> None:
    source = DATA / "llama-llmcompressor-nvfp4a16"
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight_scale"))
    zeros = torch.zeros(tensors[name].shape, dtype=torch.int8)
    tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    groups = outline(vtensors.open_checkpoint(tmp_path))
    (down,) = [group for group in groups if group.modules == (name.removesuffix(".weight_scale"),)]
    assert down.request.scheme == "nvfp4"


def test_what_cannot_be_outlined_is_refused(tmp_path: Path) -> None:
    checkpoint = vtensors.open_checkpoint(DATA / CHECKPOINTS[0])
    with pytest.raises(RequestError, match="the device and its capability do not fit"):
        outline(checkpoint, device="cuda:0")
    with pytest.raises(RequestError, match="models do not compute in this dtype"):
        outline(checkpoint, dtype="float64")
    (tmp_path / "config.json").write_text('{"model_type": "of-nobody"}')
    save_file({"w.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ArchitectureError, match="no architecture plugin knows this model"):
        outline(vtensors.open_checkpoint(tmp_path))
