from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_model import FakeFiles, fake_files, small_tokenizer_json
from vtensors.errors import DeclarationError, RequestError
from vtensors_engine.stops import StopBuffer
from vtensors_engine.text import Detokenizer, Tokenizer, end_token_ids, open_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def tokenizer_of(files: FakeFiles) -> Tokenizer:
    found = open_tokenizer(files)
    assert found is not None
    return found


TOKENIZER = tokenizer_of(fake_files())


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(TEXT)
def test_pieces_of_any_text_join_to_the_text(text: str) -> None:
    pieces = pieces_of(TOKENIZER, TOKENIZER.encode(text))
    assert "".join(pieces) == text


@given(st.lists(st.one_of(st.integers(0, 330), st.integers(0, 2)), max_size=60))
def test_pieces_of_any_ids_join_to_the_full_decode(ids: list[int]) -> None:
    pieces = pieces_of(TOKENIZER, ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_a_character_of_four_tokens_comes_out_whole() -> None:
    ids = TOKENIZER.encode("a😀b")
    assert len(ids) == 6
    assert pieces_of(TOKENIZER, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_replacement_character_that_was_meant_comes_out_with_what_follows() -> None:
    assert "".join(pieces_of(TOKENIZER, TOKENIZER.encode("a\ufffdb"))) == "a\ufffdb"
    assert "".join(pieces_of(TOKENIZER, TOKENIZER.encode("a\ufffd"))) == "a\ufffd"


def test_a_character_that_never_became_whole_comes_with_the_flush() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    assert pieces_of(TOKENIZER, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_have_no_text_unless_asked_for() -> None:
    ids = [1, *TOKENIZER.encode("a"), 2]
    assert pieces_of(TOKENIZER, ids) == ["", "a", "", ""]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert TOKENIZER.decode([100_000]) == ""


def test_tokens_without_text_make_the_next_one_no_slower() -> None:
    seen: list[int] = []

    class Counting:
        def decode(self, token_ids: Sequence[int]) -> str:
            seen.append(len(token_ids))
            return TOKENIZER.decode(token_ids)

        def is_silent(self, token_id: int) -> bool:
            return TOKENIZER.is_silent(token_id)

    detokenizer = Detokenizer(Counting())
    ids = [*TOKENIZER.encode("the "), *[2, 100_000] * 500, *TOKENIZER.encode("word")]
    assert "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()]) == "the word"
    assert max(seen) < 8


def test_leading_spaces_survive_a_decoder_that_strips_the_first_one() -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "▁In", "▁the", "▁", "▁word"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    assert pieces_of(Tokenizer(inner), [1, 2, 3, 4, 2]) == ["In", " the", " ", " word", " the", ""]


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"U\+D800 at 1"):
        TOKENIZER.encode("a\ud800")


def test_truncation_and_padding_left_in_the_file_are_switched_off() -> None:
    content = json.loads(small_tokenizer_json())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = tokenizer_of(fake_files(tokenizer__json=json.dumps(content).encode()))
    assert tokenizer.encode("abcdef") == TOKENIZER.encode("abcdef")


def with_bos(*, processor: bool, add_bos_token: bool | None) -> Tokenizer:
    content = json.loads(small_tokenizer_json())
    if processor:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
            },
        }
    config = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": add_bos_token}
    return tokenizer_of(
        fake_files(
            tokenizer__json=json.dumps(content).encode(), tokenizer_config__json=json.dumps(config).encode()
        )
    )


@pytest.mark.parametrize(
    ("processor", "add_bos_token", "count"),
    [
        (True, None, 1),
        (True, True, 1),
        (True, False, 0),
        (False, None, 0),
        (False, True, 1),
        (False, False, 0),
    ],
)
def test_bos_comes_from_the_post_processor_and_add_bos_token_overrides_it(
    processor: bool, add_bos_token: bool | None, count: int
) -> None:
    tokenizer = with_bos(processor=processor, add_bos_token=add_bos_token)
    assert tokenizer.encode("ab").count(1) == count
    assert 1 not in tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("<|im_start|>ab", add_special_tokens=False).count(1) == 1


def test_no_tokenizer_file_is_none_and_a_damaged_one_is_refused_by_name() -> None:
    assert open_tokenizer(fake_files(tokenizer__json=None)) is None
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        open_tokenizer(fake_files(tokenizer__json=b'{"version": "1.0"}'))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (b'{"eos_token_id": 7}', b'{"eos_token_id": 0}', (2, 7)),
        (b'{"eos_token_id": [7, 5]}', b"{}", (2, 5, 7)),
        (b"{}", b'{"eos_token_id": 9}', (2, 9)),
        (None, b'{"text_config": {"eos_token_id": [9]}}', (2, 9)),
        (None, None, (2,)),
    ],
)
def test_end_ids_come_from_generation_config_then_config_with_the_tokenizers_own(
    generation: bytes | None, config: bytes | None, expected: tuple[int, ...]
) -> None:
    files = fake_files(generation_config__json=generation, config__json=config)
    assert end_token_ids(files, TOKENIZER) == expected


@pytest.mark.parametrize("value", [b'"</s>"', b"[1, null]", b"-1", b"true"])
def test_an_end_id_that_is_no_id_is_refused_with_its_file(value: bytes) -> None:
    files = fake_files(generation_config__json=b'{"eos_token_id": ' + value + b"}")
    with pytest.raises(DeclarationError, match=r"generation_config\.json"):
        end_token_ids(files, None)


STOP_TEXT = st.text("abc", max_size=12)


@given(st.lists(STOP_TEXT, max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_streams_up_to_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    ends = [(end, -len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    end, minus_length = min(ends, default=(len(text), 0))
    buffer = StopBuffer(tuple(stops))
    shown = ""
    for piece in pieces:
        shown += buffer.push(piece)
        assert text.startswith(shown)
    assert shown + buffer.flush() == text[: end + minus_length]
    assert (buffer.hit is not None) == bool(ends)


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    buffer = StopBuffer(("</end>",))
    assert [buffer.push(piece) for piece in ("a<", "/e", "x", "b<")] == ["a", "", "</ex", "b"]
    assert buffer.flush() == "<"


def test_the_oracles_text_and_ids_agree(shared: Path) -> None:
    folder = shared / "checkpoints" / "kjv-dense-modelopt-mixed-w4a16mlp-fp8attn"
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
    files = FakeFiles(files={name: (folder / name).read_bytes() for name in names})
    tokenizer = tokenizer_of(files)
    assert end_token_ids(files, tokenizer) == (2,)
    cases = json.loads((folder / "oracle" / "oracle.json").read_text())["greedy"]
    assert cases
    for case in cases:
        assert "".join(pieces_of(tokenizer, case["token_ids"])) == case["text"]
        assert tokenizer.encode(tokenizer.decode(case["prompt_ids"])) == case["prompt_ids"]
