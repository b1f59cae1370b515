"""The table that `inspect` and `generate` share: every line fits, and reads the same at any width."""

from __future__ import annotations

import pytest

from vtensors_plugins.commands.schemes_table import hanging, schemes_table, size

ROWS = [
    {
        "scheme": "nvfp4",
        "convention": "compressed-tensors",
        "declared": "fp4",
        "executed": "16bit",
        "modules": 30841,
        "bytes": 18_500_000_000,
        "parts": {"linear_attention": 30720, "shared_expert": 120, "lm_head": 1},
        "algorithms": ["nvfp4-pack-quantized"],
    },
    {
        "scheme": "bf16",
        "convention": "plain",
        "declared": "16bit",
        "executed": "16bit",
        "modules": 3,
        "bytes": 1_070_000_000,
        "parts": {"norm": 3},
        "algorithms": [],
    },
]


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (2_600_000_000, "2.60 GB"),
        (21_900_000_000, "21.9 GB"),
        (1_234_567_000_000_000, "1235 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


def test_numbers_are_aligned_at_the_right_and_parts_stand_below() -> None:
    assert schemes_table(ROWS, 80).splitlines() == [
        "                            activations",
        "scheme  convention          declared  executed  modules     size",
        "nvfp4   compressed-tensors  fp4       16bit      30,841  18.5 GB",
        "        nvfp4-pack-quantized: linear_attention 30,720, shared_expert 120,",
        "        lm_head 1",
        "bf16    plain               16bit     16bit           3  1.07 GB",
        "        norm 3",
    ]


def test_a_wide_terminal_changes_only_where_the_parts_wrap() -> None:
    narrow, wide = schemes_table(ROWS, 80).split(), schemes_table(ROWS, 120)
    assert wide.split() == narrow
    assert "shared_expert 120, lm_head 1\n" in wide


def test_a_part_is_never_parted_from_its_count() -> None:
    for width in range(40, 100):
        for line in schemes_table(ROWS, width).splitlines():
            assert not line.endswith(("linear_attention", "shared_expert", "lm_head", "norm"))


def test_a_row_without_parts_has_one_line() -> None:
    row = {key: value for key, value in ROWS[1].items() if key not in ("parts", "algorithms")}
    assert len(schemes_table([row], 80).splitlines()) == 3


def test_a_sentence_hangs_below_its_first_word_and_long_words_stay_whole() -> None:
    path = "x" * 60
    assert hanging("warning  ", f"one two three four five six seven {path}", 40).splitlines() == [
        "warning  one two three four five six",
        "         seven",
        f"         {path}",
    ]
