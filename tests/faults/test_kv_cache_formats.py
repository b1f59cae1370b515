"""The format of the KV cache: the same on every card, read as it was written, tested on the card before it is used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import IDS, load, plain_tensors, write_model

import vtensors
from emulation.emulator import needs_compiler
from paged_attention_emulated import attention_of, attention_shape, emulate_attention
from tiny_decoders import tiny_config
from vtensors.cli import main
from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.steps.paged_attention import PagedAttention
from vtensors_kernels.steps.paged_attention_probe import PagedCase, probe_paged_attention

CONFIG = tiny_config("llama")
# Values of E4M3 at these scales, so that both formats hold them exactly.
SCALES = {"16 bits": None, "fp8": (0.25, 0.5)}
DEVICES: list[Any] = [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)]


def _swizzled(self: PagedAttention, *args: Any, **options: Any) -> Any:
    """Writes values whose groups of 16 have changed places, as for a reader on another card."""
    q, k, v, *rest = args
    groups = v.reshape(v.shape[0], -1, 2, 16)
    return _DECODE(self, q, k, groups.flip(2).reshape(v.shape).contiguous(), *rest, **options)


_DECODE = PagedAttention.decode


@pytest.mark.fault("B24")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SCALES)
def test_what_a_page_gives_back_is_what_was_written(
    cache: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token whose values are another constant in each group of 16 dimensions: it attends to itself alone."""
    if device == "cpu":
        emulate_attention(monkeypatch)
    shape = attention_shape(2, 2, 64, rotary=0, gated=False, kv_scales=SCALES[cache], device=device)
    case = PagedCase.make(shape, (0, 0), torch.device(device))
    constants = torch.arange(1.0, 17.0).view(2, 8).repeat_interleave(16, dim=1).to(case.v)
    case.v.copy_(constants)
    out, _, v_pages = case.decode(attention_of(shape, device=device))
    assert torch.equal(out, constants)
    written = torch.stack([v_pages[int(page), :, 0].float().flatten() for page in case.page_table[:, 0]])
    assert torch.equal(written * (SCALES[cache] or (1.0, 1.0))[1], constants.float())


@pytest.mark.fault("B24")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", SCALES)
def test_the_self_test_sees_a_page_that_is_written_in_another_order(
    cache: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        emulate_attention(monkeypatch)
    shape = attention_shape(2, 2, 32, kv_scales=SCALES[cache], device=device)
    attention = attention_of(shape, device=device)
    monkeypatch.setattr(PagedAttention, "decode", _swizzled)
    with pytest.raises(VtensorsError, match="the self-test of paged attention failed"):
        probe_paged_attention(attention)


@pytest.mark.fault("B24")
@pytest.mark.gpu
def test_a_card_that_reads_pages_otherwise_runs_the_model_without_them_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama", head_dim=32)
    folder = write_model(tmp_path / "m", config, plain_tensors(config))
    model: Any = vtensors.load_model(folder, device="cuda", dtype="bfloat16")
    monkeypatch.setattr(PagedAttention, "decode", _swizzled)
    with caplog.at_level(logging.WARNING, "vtensors"):
        llm = vtensors.LLM(model, max_sequences=2, max_tokens=256)
    print(caplog.messages)
    assert any("the self-test of paged attention failed" in line for line in caplog.messages)
    params = vtensors.SamplingParams(temperature=0.0, max_tokens=4)
    (answer,) = llm.generate([IDS[0].tolist()], params)
    assert answer.token_ids[0] == int(model.logits(IDS.cuda())[0, -1].argmax())


@pytest.mark.fault("B24")
def test_a_format_that_nothing_here_writes_is_refused_or_said_not_to_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*"]}
    folder = write_model(
        tmp_path / "m",
        CONFIG,
        plain_tensors(CONFIG),
        quantization={**block, "kv_cache_quant_algo": "NVFP4"},
    )
    assert load(folder).kv_cache == "16bit"
    assert main(["inspect", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["kv_cache"]
    assert told == {"declared": "NVFP4", "executed": "16bit"}
    with pytest.raises(RequestError, match="kv_cache_dtype") as caught:
        load(folder, kv_cache_dtype="nvfp4")
    assert caught.value.accepted == "auto, fp8"


@pytest.mark.fault("B96")
@pytest.mark.parametrize("card", [(8, 0), (9, 0), (10, 0), (12, 1)], ids=str)
def test_the_default_is_the_models_own_dtype_on_any_card(
    card: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    folder = write_model(tmp_path / "m", CONFIG, plain_tensors(CONFIG))
    for asked, told in (("auto", "16bit"), ("fp8", "fp8")):
        model = load(folder, kv_cache_dtype=asked)
        assert model.kv_cache == told
        kept = [layer.mixer.kv_scales for layer in model.decoder.layers]
        assert kept == [None if asked == "auto" else (1.0, 1.0)] * 2


@pytest.mark.fault("B96")
@pytest.mark.gpu
def test_pages_on_the_card_hold_the_models_own_dtype_unless_fp8_is_asked_for(tmp_path: Path) -> None:
    from vtensors_engine.cuda.runner import CudaRunner

    config = tiny_config("llama", head_dim=32)
    folder = write_model(tmp_path / "m", config, plain_tensors(config))
    for asked, stored in (("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        model: Any = vtensors.load_model(folder, device="cuda", dtype="bfloat16", kv_cache_dtype=asked)
        runner = CudaRunner(model, max_sequences=1, max_tokens=128)
        layers: Any = runner.caches.layers
        assert {layer.keys.dtype for layer in layers} == {layer.values.dtype for layer in layers} == {stored}
