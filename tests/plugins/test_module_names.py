"""Names of many modules in one."""

from __future__ import annotations

import pytest

from vtensors_plugins.commands.module_names import collapsed, without_numbers


def test_layers_and_experts_become_ranges() -> None:
    names = [(f"model.layers.{layer}.mlp.experts.{e}.up_proj",) for layer in range(4) for e in range(8)]
    assert collapsed(names) == "model.layers.{0-3}.mlp.experts.{0-7}.up_proj"


def test_modules_of_one_group_are_joined_behind_what_they_share() -> None:
    layers = [(f"layers.{i}.mlp.gate_proj", f"layers.{i}.mlp.up_proj") for i in range(64)]
    assert collapsed(layers) == "layers.{0-63}.mlp.gate_proj|up_proj"
    assert collapsed([("a.b.c", "a.d.c")]) == "a.b.c|d.c"
    assert collapsed([("lm_head",)]) == "lm_head"


@pytest.mark.parametrize(
    ("layers", "shown"),
    [([3], "3"), ([3, 7], "{3,7}"), ([0, 1, 5], "{0-1,5}"), (range(0, 64, 4), "{0-60: 16 of them}")],
)
def test_gaps_are_shown_and_many_of_them_counted(layers: list[int], shown: str) -> None:
    assert collapsed([(f"layers.{i}.q",) for i in layers]) == f"layers.{shown}.q"


def test_a_digit_inside_of_a_name_is_no_layer() -> None:
    assert (
        without_numbers("layers.3.conv1d.w4a16 is 0.5 of layers.12")
        == "layers.*.conv1d.w4a16 is 0.5 of layers.*"
    )
    assert without_numbers("serves M = 33..64, not M = 1..32") == "serves M = 33..64, not M = 1..32"
    assert collapsed([("layers.0.conv1d",), ("layers.1.conv1d",)]) == "layers.{0-1}.conv1d"


def test_groups_that_differ_in_more_than_numbers_are_no_group() -> None:
    with pytest.raises(ValueError, match="not one group"):
        collapsed([("layers.0.q",), ("layers.0.k",)])
