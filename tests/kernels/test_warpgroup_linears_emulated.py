"""Linears by warpgroup products on a CPU: what their launchers pass to the kernels, run in the emulator.

Codes, scales and x are small integers and powers of two, so that every order of sums gives the same bits.
"""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_launches import EmulatedFunction, EmulatedLaunch
from emulation.emulator import at_the_end_of_memory, needs_compiler
from vtensors_formats import FP8Weight, NVFP4Weight
from vtensors_kernels.fp8.packed import PackedFP8
from vtensors_kernels.nvfp4 import staging, wgmma, wgmma_launches
from vtensors_kernels.nvfp4.packed import PackedNVFP4
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm
from vtensors_kernels.nvfp4.wgmma_segments_form import SegmentsForm, compiled_forms
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.packed_tiles import row_tiles
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference, unpack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference, unpack_reference

pytestmark = needs_compiler


def _compiled(
    source: str, name: str, _index: int, defines: dict[str, int], _shared: int = 0
) -> EmulatedFunction:
    return EmulatedFunction(source=source, name=name, defines=tuple(sorted(defines.items())))


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staging, wgmma_launches):
        monkeypatch.setattr(module, "Launch", EmulatedLaunch)
        monkeypatch.setattr(module, "compiled_function", _compiled)
    monkeypatch.setattr(wgmma_launches, "current_stream", lambda device: 0)


def _weight(kind: str, n: int, k: int, pre_scale: bool) -> Any:
    source = torch.Generator().manual_seed(n * 7919 + k)
    if kind == "fp8":
        values = torch.randint(-3, 4, (n, k), generator=source).float()
        return FP8Weight(codes=values.to(torch.float8_e4m3fn), scale=torch.tensor(0.5))
    scale = 2.0 ** torch.randint(0, 3, (n, k // 16), generator=source)
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=scale.to(torch.float8_e4m3fn),
        global_scale=torch.tensor(0.25),
        pre_scale=2.0 ** torch.randint(-1, 2, (k,), generator=source) if pre_scale else None,
    )


def _workspace(form: Any, nbytes: int, n: int) -> Any:
    """Its memory full of NaN but for the counters."""
    bytes_ = form.node_bytes if isinstance(form, SegmentsForm) else form.partial_bytes
    return SimpleNamespace(
        staged=torch.full((nbytes,), 255, dtype=torch.uint8),
        partials=torch.full((bytes_,), 255, dtype=torch.uint8),
        counters=torch.zeros(row_tiles(n), dtype=torch.int32),
        turn=Lock(),
    )


def _run(kernel: tuple[str, str] | None, form: Any, packed: PackedMatrix, x: Tensor) -> Tensor:
    assert kernel is not None
    made = wgmma_launches.make_launches(*kernel, form, packed, x.dtype, 0)
    out = torch.full((x.shape[0], packed.shape[0]), float("nan"), dtype=x.dtype)
    work = _workspace(form, made.staging.nbytes, packed.shape[0])
    for _ in range(2):  # counters are left as zeros
        made.run(x, None, out, work)
        assert not work.counters.any()
    return out


def _x(m: int, k: int, pitch: int, dtype: torch.dtype) -> Tensor:
    """Rows that lie `pitch` elements apart, NaN between them; what follows the last is no memory of the process."""
    whole = at_the_end_of_memory(((m - 1) * pitch + k) * dtype.itemsize).view(dtype)
    x = whole.as_strided((m, k), (pitch, 1))
    x.copy_(torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(m)))
    return x


def _wanted(packed: PackedMatrix, x: Tensor) -> Tensor:
    unpacked = unpack_fp8_reference(packed) if isinstance(packed, PackedFP8) else None
    if isinstance(packed, PackedNVFP4):
        unpacked = unpack_reference(packed)
    assert unpacked is not None
    scale = torch.ones(x.shape[1]) if packed.pre_scale is None else packed.pre_scale
    return (x.double() * scale.double() @ unpacked.double().T).to(x.dtype)


SEGMENTS = [
    # kind, pre_scale, tokens of the form, M, N, K, blocks
    ("nvfp4", False, 24, 17, 136, 272, 2),
    ("nvfp4", True, 32, 31, 136, 1168, 3),
    ("fp8", False, 24, 24, 130, 2064, 5),
    ("fp8", False, 32, 32, 16, 16, 1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "pre_scale", "tokens", "m", "n", "k", "blocks"), SEGMENTS)
def test_segments_of_rows_give_the_product(
    kind: str, pre_scale: bool, tokens: int, m: int, n: int, k: int, blocks: int, dtype: torch.dtype
) -> None:
    weight = _weight(kind, n, k, pre_scale)
    packed: Any = pack_fp8_reference([weight]) if kind == "fp8" else pack_reference([weight])
    form = SegmentsForm(
        tokens=tokens,
        warpgroups=2,
        cluster=1,
        blocks=blocks,
        chunk=2,
        slots=2,
        block_bytes=packed.format.block_bytes,
    ).fitted(n)
    x = _x(m, k, k + 24 if pre_scale or n == 130 else k, dtype)
    assert torch.equal(_run(packed.format.segments, form, packed, x), _wanted(packed, x))


@pytest.mark.parametrize(("tokens", "m", "blocks"), [(48, 43, 3), (64, 64, 4)])
def test_ranges_of_rows_give_the_product(tokens: int, m: int, blocks: int) -> None:
    packed = pack_reference([_weight("nvfp4", 280, 656, False)])
    form = WgmmaForm(tokens=tokens, warpgroups=2, cluster=1, blocks=blocks, chunk=2, slots=2)
    x = _x(m, 656, 664, torch.bfloat16)
    ours = _run((wgmma.LINEAR, wgmma.FUNCTION), form.fitted(*packed.shape), packed, x)
    assert torch.equal(ours, _wanted(packed, x))


def test_the_largest_form_gives_the_product() -> None:
    packed = pack_fp8_reference([_weight("fp8", 40, 5136, False)])
    *_, form = compiled_forms(32, packed.format.block_bytes)
    x = _x(29, 5136, 5136, torch.bfloat16)
    assert torch.equal(_run(packed.format.segments, form, packed, x), _wanted(packed, x))
