from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fake_model import FakeModel
from vtensors.errors import DeviceError, RequestError, WeightValueError
from vtensors_engine.llm import LLM
from vtensors_engine.outputs import StreamPiece, Timing
from vtensors_engine.runner import ReferenceRunner, Row, Step
from vtensors_engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def assert_nothing_is_left(llm: LLM) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, ReferenceRunner)
    assert runner._sequences == {}
    assert not llm.engine.busy


def greedy_by_hand(model: FakeModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def saying(text: str, *, prompt_length: int, end: bool = True) -> FakeModel:
    """A model that says the text and then its end token, with a prompt of that many tokens."""
    ids = LLM(FakeModel()).tokenizer.encode(text)
    script = {prompt_length + i: token for i, token in enumerate([*ids, *([2] if end else [])])}
    return FakeModel(script=script)


def test_completions_are_what_the_full_forward_gives_and_in_the_order_of_the_prompts() -> None:
    model = FakeModel()
    for completion, prompt in zip(LLM(model).generate(PROMPTS, GREEDY), PROMPTS, strict=True):
        assert list(completion.token_ids) == greedy_by_hand(model, prompt, 8)
        assert completion.prompt_token_ids == prompt
        assert completion.finish_reason == "length"
        assert completion.logprobs is None


def test_a_prompt_is_processed_once_and_then_one_token_at_a_time() -> None:
    model = FakeModel()
    LLM(model).generate([5, 6, 7], GREEDY)
    assert model.calls == [3, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("max_sequences", [1, 2, 3, 32])
def test_a_completion_does_not_depend_on_its_company(max_sequences: int) -> None:
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True, logprobs=1) for n in (1, 9, 4, 6)]
    alone = [LLM(FakeModel()).generate(prompt, item)[0] for prompt, item in zip(PROMPTS, params, strict=True)]
    assert LLM(FakeModel(), max_sequences=max_sequences).generate(PROMPTS, params) == alone


def test_no_more_sequences_run_than_allowed() -> None:
    llm = LLM(FakeModel(), max_sequences=2)
    runner = llm.engine.runner
    seen: list[int] = []
    inner = runner.decode

    def decode(rows: Sequence[Row]) -> Step:
        seen.append(len(rows))
        return inner(rows)

    runner.decode = decode  # type: ignore[method-assign]
    llm.generate(PROMPTS, GREEDY)
    assert max(seen) == 2
    assert_nothing_is_left(llm)


def test_one_prompt_is_a_string_or_a_list_of_ids_and_several_may_be_mixed() -> None:
    llm = LLM(FakeModel())
    ids = llm.tokenizer.encode("word")
    expected = llm.generate(ids, GREEDY)[0].token_ids
    assert [item.token_ids for item in llm.generate("word", GREEDY)] == [expected]
    assert [item.token_ids for item in llm.generate(["word", ids, tuple(ids)], GREEDY)] == [expected] * 3
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt 0 is empty"),
        ([[5], []], "prompt 1 is empty"),
        ([[5], [320]], "prompt 1 holds a token id"),
        ([-1], "prompt 0 holds a token id"),
        ([list(range(64))], "prompt 0 is too long"),
        ([[True]], "prompt 0 cannot be used"),
        ([[5], 1.5], "prompt 1 cannot be used"),
        (7, "prompts cannot be used"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_any_work(prompts: Any, message: str) -> None:
    model = FakeModel()
    with pytest.raises(RequestError, match=message):
        LLM(model).generate(prompts, GREEDY)
    assert model.calls == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 set of params, 2 prompts"),
        (SamplingParams(stop_token_ids=[320]), "stop_token_ids"),
        ({"max_tokens": 3}, "params cannot be used"),
    ],
)
def test_params_that_do_not_fit_are_refused_before_any_work(params: Any, message: str) -> None:
    model = FakeModel()
    with pytest.raises(RequestError, match=message):
        LLM(model).generate([[5], [6]], params)
    assert model.calls == []


def test_generation_stops_at_the_models_last_position_with_length() -> None:
    model = FakeModel(max_positions=10)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    completion = LLM(model).generate([5] * 7, params)[0]
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")
    assert len(LLM(model).generate([5] * 9, params)[0].token_ids) == 1


def test_an_end_token_ends_the_text_and_is_the_last_id() -> None:
    llm = LLM(saying("word", prompt_length=3))
    completion = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=50))[0]
    assert (completion.text, completion.finish_reason) == ("word", "stop")
    assert completion.token_ids[-1] == 2
    longer = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
    assert (len(longer.token_ids), longer.finish_reason) == (50, "length")


def test_a_stop_id_ends_the_text_even_when_end_tokens_are_ignored() -> None:
    llm = LLM(saying("word", prompt_length=1))
    token = llm.tokenizer.encode("word")[-1]
    params = SamplingParams(temperature=0, stop_token_ids=[token], ignore_eos=True)
    completion = llm.generate([5], params)[0]
    assert (completion.token_ids[-1], completion.finish_reason) == (token, "stop")
    assert "word".startswith(completion.text or "")


def test_a_stop_string_is_cut_off_and_never_streamed() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["was g", "zzz"])
    llm = LLM(saying("the word was good", prompt_length=1))
    pieces = list(llm.stream([5], params))
    assert "".join(piece.text for piece in pieces) == "the word "
    assert pieces[-1].finish_reason == "stop"
    completion = llm.generate([5], params)[0]
    assert (completion.text, completion.finish_reason) == ("the word ", "stop")


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    llm = LLM(saying("the word was", prompt_length=1))
    completion = llm.generate([5], SamplingParams(temperature=0, max_tokens=40, stop="was good"))[0]
    assert (completion.text, completion.finish_reason) == ("the word was", "stop")
    assert completion.token_ids[-1] == 2


def test_a_half_character_comes_at_the_end_of_a_text_cut_by_length() -> None:
    model = saying("a😀", prompt_length=1, end=False)
    pieces = list(LLM(model).stream([5], SamplingParams(temperature=0, max_tokens=3)))
    assert [piece.text for piece in pieces] == ["a", "", "\ufffd"]


def test_a_stream_gives_one_piece_per_token_and_joins_to_the_completion() -> None:
    params = SamplingParams(max_tokens=12, seed=3)
    completion = LLM(FakeModel()).generate("In the beginning", params)[0]
    pieces = list(LLM(FakeModel()).stream("In the beginning", params))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == completion.finish_reason


def test_a_stream_checks_at_once_and_computes_as_it_is_read() -> None:
    model = FakeModel()
    llm = LLM(model)
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    with pytest.raises(RequestError, match="one prompt"):
        llm.stream(["a", "b"])  # type: ignore[list-item]
    pieces = llm.stream([5, 6], GREEDY)
    assert model.calls == []
    next(pieces)
    assert model.calls == [2]
    assert not torch.is_inference_mode_enabled()


def test_a_reader_that_stops_early_leaves_nothing_in_the_runner() -> None:
    llm = LLM(FakeModel())
    pieces = llm.stream([5, 6], GREEDY)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert_nothing_is_left(llm)


def test_a_failing_step_is_passed_on_and_leaves_nothing_in_the_runner() -> None:
    llm = LLM(FakeModel(fail_at=4))
    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        llm.generate([[5], [6, 7, 8]], GREEDY)
    assert isinstance(caught.value, DeviceError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_nothing_is_left(llm)


def test_pieces_name_the_prompt_they_belong_to() -> None:
    seen: list[tuple[int, StreamPiece]] = []
    completions = LLM(FakeModel()).generate(
        PROMPTS, GREEDY, on_piece=lambda index, piece: seen.append((index, piece))
    )
    for index, completion in enumerate(completions):
        ids = [token for place, piece in seen if place == index for token in piece.token_ids]
        assert ids == completion.token_ids


def test_logprobs_come_one_per_token_when_asked_for() -> None:
    completion = LLM(FakeModel()).generate([5], SamplingParams(seed=1, logprobs=2, max_tokens=4))[0]
    assert completion.logprobs is not None
    assert [step.token_id for step in completion.logprobs] == list(completion.token_ids)
    assert all(step.logprob is not None and len(step.top_logprobs) == 2 for step in completion.logprobs)


def test_the_reported_seed_gives_the_same_tokens_again() -> None:
    llm = LLM(FakeModel())
    first, second = llm.generate([[5], [5]], SamplingParams(max_tokens=8))
    assert first.seed != second.seed
    assert llm.generate([5], SamplingParams(max_tokens=8, seed=first.seed))[0] == first


def test_a_chat_is_rendered_and_its_own_special_tokens_are_enough() -> None:
    llm = LLM(FakeModel())
    completion = llm.chat([{"role": "user", "content": "word"}], GREEDY)
    text = "<|im_start|>user\nword<|im_end|><|im_start|>assistant"
    assert list(completion.prompt_token_ids) == llm.tokenizer.encode(text, add_special_tokens=False)
    assert completion.prompt_token_ids.count(1) == 2


def test_prompts_and_steps_are_timed_apart() -> None:
    timing = Timing()
    LLM(FakeModel()).generate(PROMPTS, GREEDY, timing=timing)
    assert (timing.prefill_tokens, timing.decode_tokens) == (11, 4 * 7)
    assert timing.prefill_rate()
    assert timing.decode_rate()
    assert Timing().decode_rate() is None


def test_a_prompt_that_fails_stops_no_other_and_its_error_is_raised_behind_them() -> None:
    model = FakeModel(refuse={6})
    prompts = [[5], [6, 7], [9, 10]]
    expected = [greedy_by_hand(FakeModel(), prompt, 8) for prompt in (prompts[0], prompts[2])]
    llm = LLM(model)
    first, failed, last = llm.generate(prompts, GREEDY, on_error="return")
    assert [first.token_ids, last.token_ids] == expected
    assert (first.error, first.finish_reason) == (None, "length")
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "refuses the token 6" in (failed.error or "")
    seen: list[tuple[int, StreamPiece]] = []
    with pytest.raises(WeightValueError, match="refuses the token 6") as caught:
        llm.generate(prompts, GREEDY, on_piece=lambda index, piece: seen.append((index, piece)))
    assert caught.value.__notes__ == ["prompt 1 of 3; the others have finished"]
    for place, index in enumerate((0, 2)):
        assert [t for i, piece in seen if i == index for t in piece.token_ids] == expected[place]
    assert [piece.finish_reason for index, piece in seen if index == 1] == ["error"]
    with pytest.raises(WeightValueError):
        list(llm.stream([6], GREEDY))
    with pytest.raises(RequestError, match="on_error"):
        llm.generate(prompts, GREEDY, on_error="hide")  # type: ignore[arg-type]
    assert_nothing_is_left(llm)


def test_two_streams_and_a_call_between_them_share_the_steps() -> None:
    llm = LLM(FakeModel())
    expected = [greedy_by_hand(FakeModel(), prompt, 8) for prompt in PROMPTS]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    told: list[list[int]] = [[], []]
    for ids, stream in zip(told, streams, strict=True):
        ids.extend(next(stream).token_ids)
    assert llm.generate(PROMPTS[2], GREEDY)[0].token_ids == expected[2]
    for ids, stream in zip(told, streams, strict=True):
        ids.extend(token for piece in stream for token in piece.token_ids)
    assert told == expected[:2]
    assert llm._steps._untold == {}
    assert_nothing_is_left(llm)
