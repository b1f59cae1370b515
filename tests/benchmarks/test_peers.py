"""What the linear benchmark is compared with: Marlin from a folder, else its published times."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linear_goals as goals
import pytest
import torch
from peers import marlin
from peers.published import scaled_marlin_us

from vtensors_formats import NVFP4Weight

# Written here in the shape of the wheel's modules: what they import, what they define.
HELPER = """
import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.scalar_type import scalar_types
from vllm.utils.math_utils import round_up
from .quant_utils import pack_cols
logger = init_logger(__name__)
held: RoutedExperts | None = None
def prepare_fp4_layer_for_marlin(layer):
    logger.warning_once("words")
    assert not envs.VLLM_MARLIN_USE_ATOMIC_ADD
    layer.workspace = round_up(5, 4)
def apply_fp4_marlin_linear(**given):
    return ops.marlin_gemm, scalar_types.name, given
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    utils = tmp_path / marlin.UTILS.replace(".", "/")
    utils.mkdir(parents=True)
    (tmp_path / "vllm" / "scalar_type.py").write_text("class scalar_types:\n    name = 'e2m1'\n")
    for name in ("marlin_utils", "marlin_utils_fp4", "marlin_utils_fp8"):
        (utils / f"{name}.py").write_text(HELPER)
    (tmp_path / "VERSION").write_text("vllm 0.0.0\n")
    return tmp_path


def _weight() -> NVFP4Weight:
    return NVFP4Weight(
        codes=torch.zeros(2, 16, dtype=torch.uint8),
        block_scale=torch.ones(2, 2).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(1.0),
    )


def test_helpers_find_stand_ins_and_leave_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marlin, "_load_library", lambda folder: None)
    before = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm", before)  # type: ignore[arg-type]
    loaded = marlin.load_marlin(folder)
    assert isinstance(loaded, marlin.Marlin), loaded
    assert loaded.version == "vllm 0.0.0"
    assert [name for name in sys.modules if name.split(".")[0] == "vllm"] == ["vllm"]
    assert sys.modules["vllm"] is before  # type: ignore[comparison-overlap]
    operator, kind, given = loaded.bind_nvfp4(_weight())("x")  # type: ignore[arg-type, misc]
    assert operator is marlin._gemm
    assert kind == "e2m1"
    assert (given["input"], given["size_n"], given["size_k"], given["workspace"]) == ("x", 2, 32, 8)


def test_the_operator_gets_its_arguments_in_the_order_of_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    operators = SimpleNamespace(_C=SimpleNamespace(marlin_gemm=lambda *given: taken.extend(given)))
    monkeypatch.setattr(marlin, "torch", SimpleNamespace(ops=operators))
    tensors = [
        "a",
        "c",
        "b_q_weight",
        "b_bias",
        "b_scales",
        "a_scales",
        "global_scale",
        "b_zeros",
        "g_idx",
        "perm",
        "workspace",
    ]
    marlin._gemm(
        **{name: name for name in tensors},  # type: ignore[arg-type]
        b_q_type=SimpleNamespace(id=7),
        size_m=1,
        size_n=2,
        size_k=3,
        use_atomic_add=False,
        use_fp32_reduce=True,
    )
    assert taken == [*tensors, 7, 1, 2, 3, True, False, True, False]


def test_a_library_without_the_operators_is_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / marlin.LIBRARY).write_bytes(b"")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(marlin, "OPERATORS", ("no_such_operator",))
    assert marlin.load_marlin(folder) == "AttributeError: the library does not register no_such_operator"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (f"{marlin.LIBRARY}.xz", b"not xz", "LZMAError"),
        (marlin.LIBRARY, b"not a library", "OSError"),
        ("other", b"", "FileNotFoundError"),
    ],
)
def test_a_folder_without_a_library_is_a_reason(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    told = marlin.load_marlin(tmp_path)
    assert isinstance(told, str)
    assert told.startswith(reason)


def test_no_folder_is_a_reason(tmp_path: Path) -> None:
    assert marlin.load_marlin(None) == "no folder was given (--marlin DIR)"
    assert str(marlin.load_marlin(tmp_path / "absent")).endswith("absent is no folder")


def test_published_times_scale_with_cublas_of_the_run() -> None:
    assert scaled_marlin_us("lm_head", 1, 597.3) == pytest.approx(278.4)
    assert scaled_marlin_us("lm_head", 1, 597.3 / 2) == pytest.approx(139.2)


def test_what_was_not_published_has_no_time() -> None:
    assert scaled_marlin_us("gate_up", 32, 90.0) is None
    assert scaled_marlin_us("35b_2048x512", 1, 5.0) is None


def test_every_shape_of_the_27b_was_published_at_every_other_m() -> None:
    for shape in goals.SHAPES_27B:
        for m in set(goals.TOKENS) - {32}:
            assert scaled_marlin_us(shape, m, 10.0) is not None, (shape, m)
