"""A decoder rounded nowhere is the reference, one rounded at a place is not, and rounding is that of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_places import PLACES, Rounding, rounded
from rounding_table import rounding_text

import vtensors
from vtensors_engine.bundled import bundled_checkpoint

IDS = torch.arange(3, 15).unsqueeze(0)


@pytest.fixture(scope="module")
def decoder() -> Any:
    return vtensors.load_model(
        bundled_checkpoint(), device="cpu", dtype="float32", activations="declared"
    ).decoder


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (11, torch.float16), (24, torch.float32)])
def test_values_are_rounded_as_torch_rounds_them(bits: int, dtype: torch.dtype) -> None:
    # Ties among them, in both directions.
    x = torch.cat(
        [torch.randn(4096, generator=torch.Generator().manual_seed(0)), 1 + torch.arange(4096) / 4096]
    )
    assert torch.equal(rounded(x, bits), x.to(dtype).float())


def test_nothing_rounded_gives_the_reference_bit_for_bit(decoder: Any) -> None:
    rounding = Rounding(frozenset(), 8)
    with rounding.inside():
        assert torch.equal(rounding.decoder(decoder).logits(IDS), decoder.logits(IDS))


@pytest.mark.parametrize("place", PLACES)
def test_every_place_changes_the_logits(decoder: Any, place: str) -> None:
    rounding = Rounding(frozenset({place}), 8)
    with rounding.inside():
        changed = rounding.decoder(decoder).logits(IDS)
    assert not torch.equal(changed, decoder.logits(IDS))


def test_rounding_inside_ends_with_its_block(decoder: Any) -> None:
    before = decoder.logits(IDS)
    with Rounding(frozenset({"inside"}), 8).inside():
        assert not torch.equal(decoder.logits(IDS), before)
    assert torch.equal(decoder.logits(IDS), before)


def test_without_a_record_there_is_no_table(tmp_path: Path) -> None:
    assert rounding_text(tmp_path) == ""
