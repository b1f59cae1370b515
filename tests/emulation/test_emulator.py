"""The CPU emulator runs the project's kernels as their references do, and says what is wrong with broken ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import EmulationError, emulate, emulated_text, needs_compiler
from nvfp4_stream_cases import check
from vtensors_formats import NVFP4Weight
from vtensors_kernels.compiling.sources import Source, load_source
from vtensors_kernels.nvfp4.repack import row_scale
from vtensors_kernels.nvfp4.stream_form import choose_form
from vtensors_kernels.packed_tiles import row_tiles
from vtensors_kernels.reference.embedding import embedding
from vtensors_kernels.reference.linear import linear
from vtensors_kernels.reference.nvfp4_packing import pack_reference

pytestmark = needs_compiler
HALVES = [torch.bfloat16, torch.float16]


def weight_of(n: int, k: int, seed: int = 0) -> NVFP4Weight:
    source = torch.Generator().manual_seed(seed)
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=torch.randint(1, 127, (n, k // 16), generator=source, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        global_scale=torch.tensor(1 / 512),
    )


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [1, 31, 256, 1000])
def test_the_largest_key_is_picked(count: int, seed: int) -> None:
    keys = torch.randint(0, 2**62, (3, count), generator=torch.Generator().manual_seed(count))
    ids = torch.full((3,), -1, dtype=torch.int64)
    emulate("common/pick_largest.cu", "pick_largest", {}, (3,), (256,), [keys, ids, count], seed=seed)
    assert torch.equal(ids, 0xFFFFFFFF - (keys.max(-1).values & 0xFFFFFFFF))


@pytest.mark.parametrize("dtype", HALVES)
def test_embedding_rows_are_the_references(dtype: torch.dtype) -> None:
    weight, ids = weight_of(11, 2080), torch.tensor([10, 0, 3])
    out = poisoned(3, 2080, dtype=dtype)
    tensors = [ids, weight.codes, weight.block_scale, weight.global_scale, out]
    defines = {"VT_F16": int(dtype == torch.float16), "VT_DIVISOR": 0}
    emulate(
        "common/embedding_nvfp4.cu", "embedding_nvfp4", defines, (6,), (128,), [*tensors, 11, 2080, 16, 0]
    )
    assert torch.equal(out.view(torch.int16), embedding(ids, weight, dtype).view(torch.int16))


@pytest.mark.parametrize("arch", [800, 900])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (5, 37, 416), (8, 48, 1024)])
def test_a_linear_of_stored_weights_is_the_references(
    dtype: torch.dtype, m: int, n: int, k: int, arch: int
) -> None:
    weight, x = (
        weight_of(n, k, seed=k),
        torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype),
    )
    out = poisoned(m, n, dtype=dtype)
    defines = {"VT_F16": int(dtype == torch.float16), "VT_WARPS": 4, "VT_TOKEN_TILES": 1}
    tensors = [weight.codes, weight.block_scale, row_scale(weight)[:1].contiguous(), None, x, out, None]
    grid, name = (row_tiles(n),), "linear_nvfp4_stored"
    emulate(f"common/{name}.cu", name, defines, grid, (128,), [*tensors, n, k, m, 0], arch=arch)
    check(out, linear(x, weight), dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "arch"), [(3, 80, 1296, 900), (9, 48, 304, 800), (17, 16, 1024, 900)]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_of_packed_weights_is_the_references(
    dtype: torch.dtype, m: int, n: int, k: int, arch: int
) -> None:
    weight, x = (
        weight_of(n, k, seed=k),
        torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype),
    )
    packed = pack_reference([weight])
    form = choose_form(n, k, m, 2, "sm_120a")
    out, name = poisoned(m, n, dtype=dtype), "linear_nvfp4_stream"
    tensors = [packed.blocks, x, out, packed.row_scale, None, None, None, None]
    emulate(
        f"common/{name}.cu",
        name,
        {**form.defines, "VT_F16": int(dtype == torch.float16)},
        (form.grid,),
        (form.threads,),
        [*tensors, 0.0, m, n, k, form.stages, form.stage_blocks, form.slots],
        shared_bytes=form.shared_bytes,
        arch=arch,
        seed=m,
    )
    check(out, linear(x, weight), dtype)


def launch(
    text: str, threads: int = 64, *, arguments: int = 1, shared_bytes: int = 0, seed: int = 0
) -> Tensor:
    """out of a kernel `broken(int* out)` of the text."""
    out = torch.zeros(threads, dtype=torch.int32)
    source = Source(name="broken.cu", text=f'extern "C" __global__ void broken(int* out) {{ {text} }}')
    arrays = [out] * arguments
    emulate(source, "broken", {}, (1,), (threads,), arrays, shared_bytes=shared_bytes, seed=seed)
    return out


def test_a_deadlock_says_who_waits_where() -> None:
    wanted = r"deadlock .* threads 0-0: __syncthreads; threads 1-31: __syncwarp; threads 32-63: returned"
    with pytest.raises(EmulationError, match=wanted):
        launch("if (threadIdx.x < 32) { if (threadIdx.x) __syncwarp(); else __syncthreads(); }")


def test_lanes_that_meet_in_different_instructions_are_reported() -> None:
    with pytest.raises(EmulationError, match="different instructions"):
        launch("if (threadIdx.x % 2) __syncwarp(); else out[0] = __shfl_sync(~0u, 1, 0);")


def test_a_lane_outside_its_mask_is_reported() -> None:
    with pytest.raises(EmulationError, match="lacks the lane itself, 16"):
        launch("__syncwarp(0xffffu);")


def test_a_value_of_a_lane_outside_the_mask_is_reported() -> None:
    with pytest.raises(EmulationError, match=r"lane \d+ is read, which does not take part"):
        launch("if (threadIdx.x < 16) out[0] = __shfl_xor_sync(0xffffu, 1, 16);")


def test_memory_behind_a_tensor_is_reported() -> None:
    with pytest.raises(EmulationError, match=r"outside the tensors, .*thread \(63, 0, 0\)"):
        launch("out[threadIdx.x + 1] = 1;")


def test_a_shared_address_behind_the_end_is_reported() -> None:
    text = "extern __shared__ __align__(16) unsigned memory[]; out[0] = __cvta_generic_to_shared(memory + 8);"
    assert launch(text, shared_bytes=32)[0] == 1024 + 32


def test_shared_memory_starts_poisoned_and_belongs_to_its_block() -> None:
    text = "__shared__ int kept[64]; out[threadIdx.x] = kept[threadIdx.x]; kept[threadIdx.x] = 5;"
    assert launch(text).eq(-1).all()
    assert launch(text).eq(-1).all()


def test_another_number_of_arguments_is_refused() -> None:
    with pytest.raises(EmulationError, match="another number of parameters"):
        launch("", arguments=2)


def test_a_missing_barrier_shows_with_a_random_order() -> None:
    text = "__shared__ int a[64]; a[threadIdx.x] = threadIdx.x; %s out[threadIdx.x] = a[63 - threadIdx.x];"
    reversed_ids = torch.arange(63, -1, -1, dtype=torch.int32)
    assert torch.equal(launch(text % "__syncthreads();", seed=3), reversed_ids)
    assert not torch.equal(launch(text % "", seed=3), reversed_ids)


def test_a_missing_wait_for_a_group_of_copies_shows() -> None:
    copies = load_source("include/ptx.cuh").text + load_source("include/staged_copies_ptx.cuh").text
    text = """
    extern "C" __global__ void copied(const int* from, int* out) {
      __shared__ int stage[2][32];
      for (int i = 0; i < 2; ++i) {
        copy_or_zero<4>(shared_address(&stage[i][threadIdx.x]), from + threadIdx.x, threadIdx.x < 30);
        commit_copies();
      }
      wait_copies<%d>();
      for (int i = 0; i < 2; ++i) out[32 * i + threadIdx.x] = stage[i][threadIdx.x];
    }
    """
    numbers, out = torch.arange(1, 31, dtype=torch.int32), torch.zeros(2, 32, dtype=torch.int32)
    wanted = torch.cat([numbers, torch.zeros(2, dtype=torch.int32)])
    for groups in (0, 1):
        source = Source(name="copied.cu", text=copies.replace("#pragma once", "") + text % groups)
        emulate(source, "copied", {}, (1,), (32,), [numbers, out])
        assert torch.equal(out[0], wanted)
        assert torch.equal(out[1], wanted) == (groups == 0)


def test_functions_with_assembly_are_cut_out_line_for_line() -> None:
    source = load_source("common/linear_nvfp4_stream.cu")
    text, names = emulated_text(source)
    assert text.count("\n") == source.text.count("\n")
    assert {"load_shared_128", "copy_bulk", "wait_barrier", "multiply_pairs", "multiply_add_16x8x16"} <= set(
        names
    )
    assert "asm" not in text
