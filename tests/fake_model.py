"""A toy model and checkpoint for tests of the engine: no weights, logits made from the tokens alone.

Import as `from fake_model import FakeModel, small_tokenizer_json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from vtensors.errors import WeightValueError
from vtensors.provenance import Provenance
from vtensors.records import Selected

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


@cache
def small_tokenizer_json() -> str:
    """A byte-level BPE with a few merges: every Unicode text has ids, most characters several."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["In the beginning was the word and the word was good"] * 4, trainer)
    return str(tokenizer.to_str())


@attrs.frozen(kw_only=True)
class FakeFiles:
    """Side files by name."""

    files: Mapping[str, bytes]

    def read_bytes(self, name: str) -> bytes | None:
        return self.files.get(name)

    def read_json(self, name: str) -> dict[str, object] | None:
        data = self.files.get(name)
        return None if data is None else dict(json.loads(data))


def fake_files(**changes: bytes | None) -> FakeFiles:
    """Tokenizer, template and configs of a small chat model; a name with __ for its dot changes a file."""
    files: dict[str, bytes] = {
        "config.json": b'{"architectures": ["FakeForCausalLM"], "eos_token_id": 0}',
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": small_tokenizer_json().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    for name, content in changes.items():
        file = name.replace("__", ".")
        files.pop(file, None)
        if content is not None:
            files[file] = content
    return FakeFiles(files=files)


@attrs.frozen(kw_only=True)
class FakeCheckpoint:
    snapshot: FakeFiles
    provenance: Provenance = attrs.field(factory=lambda: Provenance(source="fake", commit="0" * 40))


class FakeModel:
    """Logits of a sequence depend on all of its tokens in their order; `script` makes it say fixed ids.

    script: the id with the largest logit after 1, 2, ... generated tokens, counted from `prompt_length`.
    fail_at: the length of a sequence at which the device fails. refuse: tokens that are an error of the sequence.
    calls: number of tokens in each step, in order.
    """

    selected: tuple[Selected, ...] = ()
    num_layers = 1
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        *,
        files: FakeFiles | None = None,
        vocab_size: int = 320,
        max_positions: int = 64,
        script: Mapping[int, int] | None = None,
        fail_at: int | None = None,
        refuse: frozenset[int] | set[int] = frozenset(),
    ) -> None:
        self.checkpoint = FakeCheckpoint(snapshot=files or fake_files())
        self.config: Mapping[str, Any] = {"model_type": "fake"}
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.script = dict(script or {})
        self.fail_at = fail_at
        self.refuse = refuse
        self.calls: list[int] = []
        self.states: list[list[int]] = []

    def new_state(self) -> list[int]:
        self.states.append([])
        return self.states[-1]

    def step(self, token_ids: torch.Tensor, state: list[int]) -> torch.Tensor:
        assert token_ids.dtype == torch.int64
        assert token_ids.ndim == 1
        assert torch.is_inference_mode_enabled()
        self.calls.append(len(token_ids))
        state.extend(token_ids.tolist())
        if len(state) == self.fail_at:
            raise RuntimeError("the device is gone")
        if not self.refuse.isdisjoint(token_ids.tolist()):
            raise WeightValueError(f"the model refuses the token {state[-len(token_ids)]}")
        return self._row(state)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = [[self._row(row[: end + 1]) for end in range(len(row))] for row in input_ids.tolist()]
        return torch.stack([torch.stack(row) for row in rows])

    def executed_summary(self) -> list[dict[str, Any]]:
        return [
            {
                "scheme": "nvfp4",
                "convention": "modelopt",
                "declared": "16bit",
                "executed": "16bit",
                "modules": 13,
                "bytes": 1234567,
            }
        ]

    def _row(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) & 0x7FFFFFFF)
        row = torch.randn(self.vocab_size, generator=generator)
        if len(tokens) in self.script:
            row[self.script[len(tokens)]] = 50.0
        return row
