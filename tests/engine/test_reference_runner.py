"""The reference runner: one sequence after the other, results at once, a row's failure its own."""

from __future__ import annotations

import pytest
import torch

from fake_model import FakeModel
from vtensors.errors import RequestError, VtensorsError, WeightValueError
from vtensors_engine.drawing import Draw
from vtensors_engine.runner import ReferenceRunner, Row
from vtensors_engine.sampling import SamplingParams, new_generator, sample


def greedy_by_hand(model: FakeModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_runner_refuses_empty_prompts_and_handles_it_did_not_give() -> None:
    runner = ReferenceRunner(FakeModel())
    for prompt, limit in (([], 1), ([5], 0), ([5], 64)):
        with pytest.raises(RequestError):
            runner.admit(prompt, limit)
    for call in (lambda: runner.decode([Row(3, 5)]), lambda: runner.release(3), lambda: runner.prefill(3)):
        with pytest.raises(VtensorsError, match="handle 3"):
            call()
    handle = runner.admit([5], 63)
    assert handle is not None
    with pytest.raises(VtensorsError, match="not been processed"):
        runner.decode([Row(handle, None)])
    assert runner.prefill(handle).logits().shape == (1, 320)
    assert runner.decode([Row(handle, 6)]).logits().shape == (1, 320)


def test_a_runner_goes_on_with_its_own_choice_where_no_token_is_given() -> None:
    model = FakeModel()
    runner = ReferenceRunner(model)
    handle = runner.admit([5, 6, 7], 8)
    assert handle is not None
    tokens = [runner.prefill(handle).tokens()[0]]
    tokens += [runner.decode([Row(handle, None)]).tokens()[0] for _ in range(3)]
    assert tokens == greedy_by_hand(model, [5, 6, 7], 4)


def test_the_reference_runner_draws_no_tokens_and_says_so() -> None:
    runner = ReferenceRunner(FakeModel())
    assert not runner.draws
    handle = runner.admit([5], 3)
    assert handle is not None
    draw = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, point=0.5)
    with pytest.raises(VtensorsError, match="draws no tokens"):
        runner.prefill(handle, draw)
    token = runner.prefill(handle).tokens()[0]
    with pytest.raises(VtensorsError, match="draws no tokens"):
        runner.decode([Row(handle, token, draw)])


def test_a_runner_has_no_room_for_more_sequences_than_allowed() -> None:
    runner = ReferenceRunner(FakeModel(), max_sequences=1)
    first = runner.admit([5], 1)
    assert first is not None
    assert runner.admit([5], 1) is None
    runner.release(first)
    assert runner.admit([5], 1) is not None


def test_the_row_that_fails_is_named_and_the_others_have_their_results() -> None:
    model = FakeModel(refuse={7})
    runner = ReferenceRunner(model)
    handles = [runner.admit([5, token], 8) for token in (1, 2, 3)]
    for handle in handles:
        assert handle is not None
        runner.prefill(handle)
    rows = [
        Row(handle, token) for handle, token in zip(handles, (4, 7, 6), strict=True) if handle is not None
    ]
    step = runner.decode(rows)
    (failed,) = step.failures().items()
    assert failed[0] == 1
    assert isinstance(failed[1], WeightValueError)
    for row, ids in ((0, [5, 1, 4]), (2, [5, 3, 6])):
        assert torch.equal(step.logits()[row], model.logits(torch.tensor([ids]))[0, -1])
        assert step.tokens()[row] == int(step.logits()[row].argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_finite_largest_logit_fails(bad: float) -> None:
    class Bad(FakeModel):
        def _row(self, tokens: list[int]) -> torch.Tensor:
            return torch.full((self.vocab_size,), bad)

    runner = ReferenceRunner(Bad())
    handle = runner.admit([5], 4)
    assert handle is not None
    step = runner.prefill(handle)
    assert "not finite" in str(step.failures()[0])
    with pytest.raises(VtensorsError) as caught:
        sample(step.logits()[0], SamplingParams(), new_generator(1)[0])
    assert caught.value.seen == step.failures()[0].seen
