"""Dense layers whose products hand on their stages, through the CUDA runner: the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vtensors
from cuda_driving import run_alone, run_together
from vtensors_engine.cuda.runner import CudaRunner

pytestmark = pytest.mark.gpu
DATA = Path(__file__).parents[1] / "data"
SWITCH = ",".join(f"nvfp4:{op}_nvfp4_wgmma_segments" for op in ("norm_linear_swiglu", "linear_add"))


@pytest.mark.parametrize(
    "name",
    ["llamazero-modelopt-nvfp4", "qwen35-llmcompressor-mixed", "qwen3-modelopt-nvfp4-kvfp8"],
)
def test_rows_keep_their_bits_where_batches_begin_to_be_merged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products are of sm_90a alone")
    monkeypatch.setenv("VT_KERNELS", SWITCH)
    model = vtensors.load_model(DATA / name, device="cuda", dtype="bfloat16")
    assert any(record.merged == (17, 64, "wgmma_mlp") for record in model.decoder.selected)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, model.vocab_size, (3 + i % 5,), generator=generator).tolist() for i in range(64)
    ]
    runner = CudaRunner(model, max_sequences=64, max_tokens=64 * 128)
    alone = [run_alone(runner, prompt, 6) for prompt in prompts[:32]]
    for many in (16, 17, 24, 25, 32):
        for index, ours in enumerate(run_together(runner, prompts[:many], 6)):
            assert ours.same_as(alone[index]), f"row {index} of {many}"
    eager = CudaRunner(model, max_sequences=64, max_tokens=64 * 128, eager=True)
    for many in (33, 48, 64):
        wanted = run_together(eager, prompts[:many], 6)
        assert all(a.same_as(b) for a, b in zip(run_together(runner, prompts[:many], 6), wanted, strict=True))
