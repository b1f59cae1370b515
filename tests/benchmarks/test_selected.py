"""The linear that the benchmarks bind is the one that a load would bind."""

from __future__ import annotations

import attrs
import pytest
import selected
import torch

from vtensors.errors import VtensorsError
from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.launch import Launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_plans() -> None:
    selected.plan_linear.cache_clear()


def _weight(n: int, k: int) -> NVFP4Weight:
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        block_scale=torch.ones(n, k // 16).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(0.5),
    )


def test_on_a_cpu_the_reference_is_bound_for_any_number_of_rows() -> None:
    weight = _weight(32, 64)
    bound = selected.bind_linear([weight], "linear", torch.float32, CPU)
    x = torch.randn(3, 64)
    assert torch.allclose(bound.call(x), x @ weight.dequantize(torch.float32).T, atol=1e-4)
    assert bound.kernel_for(1) == bound.kernel_for(4096) == "linear_reference"


def test_a_request_says_what_a_layer_says() -> None:
    request = selected.request_for([(8, 64), (4, 64)], "nvfp4", "linears", torch.bfloat16, CPU)
    assert (request.shape, request.parts, request.tokens) == ((12, 64), (8, 4), (1, None))
    assert (request.activations, request.dtype, request.capability) == ("16bit", "bfloat16", None)


def test_the_switch_acts_as_in_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    request = selected.request_for([(32, 64)], "nvfp4", "linear", torch.bfloat16, CPU)
    request = attrs.evolve(request, device="cuda:0", capability=(9, 0))
    assert selected.plan_linear(request).segments
    selected.plan_linear.cache_clear()
    monkeypatch.setenv("VT_KERNELS", "nvfp4:!linear_*")
    with pytest.raises(VtensorsError, match="VT_KERNELS forbids it"):
        selected.plan_linear(request)


def test_the_kernel_of_a_row_count_is_that_of_its_range() -> None:
    linear = selected.SelectedLinear(
        call=lambda x: x, kernels=((1, 32, "few"), (33, None, "many")), rejected=(), prepared_bytes=0
    )
    assert [linear.kernel_for(m) for m in (1, 32, 33, 9999)] == ["few", "few", "many", "many"]


def test_launches_are_told_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Launch.call
    monkeypatch.setattr(Launch, "call", lambda self, stream, *arguments: None)
    launch = Launch.__new__(Launch)
    launch.function, launch.dependent = attrs.make_class("F", ["name"])("kernel"), True
    with selected.launches_seen() as seen:
        launch.call(0)
    launch.call(0)
    assert seen == [("kernel", True)]
    monkeypatch.undo()
    assert Launch.call is plain


def test_dependent_launches_are_off_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    config, dependent, cluster = (
        driver.CUlaunchConfig(),
        driver.CUlaunchAttribute(),
        driver.CUlaunchAttribute(),
    )
    ids = driver.CUlaunchAttributeID
    dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [cluster, dependent], 2
    seen: list[tuple[int, int]] = []

    def allowed() -> tuple[int, int]:
        held = config.attrs
        return held[1].value.programmaticStreamSerializationAllowed, held[0].value.clusterDim.x

    monkeypatch.setattr(Launch, "call", lambda self, stream, *arguments: seen.append(allowed()))
    launch = Launch.__new__(Launch)
    launch._config = config
    with selected.no_dependent_launches():
        launch.call(0)
    launch.call(0)
    assert seen == [(0, 1), (1, 1)]
