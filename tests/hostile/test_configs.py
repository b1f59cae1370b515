"""Every key of the configuration files with values that no publisher writes: opened, refused, never crashed."""

from __future__ import annotations

import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vtensors
from builders import write_json, write_safetensors
from json_mutations import ODD_VALUES, mutate_json, paths_of, replaced
from vtensors.configs import ConfigFiles
from vtensors.errors import ArchitectureError, DeclarationError, RequestError, VtensorsError
from vtensors.inspection import inspection
from vtensors.strict_json import MAX_VALUES
from vtensors_engine.text import Tokenizer
from vtensors_plugins.architectures.checkpoint_inputs import config_dtype

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = sorted(path.parent.name for path in DATA.glob("*/config.json"))
FILES = ("config.json", "hf_quant_config.json")
TEXT_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
ODD_GROUPS: tuple[Any, ...] = (
    [],
    7,
    {"g": []},
    {"g": {"weights": []}},
    {"g": {"targets": "Linear", "weights": {"num_bits": 8, "type": "float"}}},
    {"g": {"targets": [["Linear"]], "weights": {"num_bits": 8, "type": "float"}}},
    {"g": {"targets": ["Linear"], "weights": {"num_bits": [8], "type": {}}}},
    {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "block_structure": [0, -1]}}},
    {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": True}}},
)
ODD_FIELDS: dict[str, tuple[Any, ...]] = {
    "quantization_config": (
        [],
        "x",
        7,
        {},
        {"quant_method": []},
        {"quant_method": "modelopt", "quant_algo": 4},
    ),
    "text_config": ("x", [], 7, {"text_config": {}}),
    "architectures": (7, "LlamaForCausalLM", [], [None], [["x"]], {"0": "x"}),
    "model_type": ([], {}, 7, None, "llama\0"),
    "layer_types": ("full_attention", [7], ["x"] * 4, {}, [["full_attention"]] * 2),
    "num_hidden_layers": (10**9, 10**30, 0, -1, True, 1.5, "2", [2], 999),
    "head_dim": (0, -16, 2**31, 10**30, 3, True, "x"),
    "vocab_size": (0, -1, 2**62, 1.0, True, None),
    "hidden_size": (0, -1, 10**18, 7, "64"),
    "num_attention_heads": (0, -1, 3, 10**18, None),
    "max_position_embeddings": (0, -1, 2**63, 2**31 - 1, "x"),
    "rope_parameters": ("x", [], 7, {"rope_type": []}, {"rope_theta": "x"}, {"rope_theta": 10**38}, {}),
    "rope_scaling": ("x", {"rope_type": "llama3"}, {"rope_type": "llama3", "factor": [1]}),
    "rms_norm_eps": (0, -1, "x", 10**38, [1]),
    "tie_word_embeddings": ("x", 1, [], None),
    "dtype": ([], {}, 7, "float8", None, ["bfloat16"]),
    "torch_dtype": ([], 7),
    "eos_token_id": ("x", [[]], -1, 10**30, [None], True, {}),
    "hidden_act": ([], 7, None),
}
QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quantized_layers": (7, [], {"x": 7}, {"x": {"quant_algo": []}}, {"": {"quant_algo": "FP8"}}),
    "quant_algo": (7, [], {}, "", True, ["NVFP4"]),
    "quant_method": (7, [], None, ""),
    "config_groups": ODD_GROUPS,
    "weight_block_size": ([-1, 128], [2**70, 1], [True, True], [0, 0], "x", [128], [1.5, 2]),
    "group_size": ([16], {}, "x", 0, -1, 2**70, True),
    "ignore": ("x", [7], [None], {"x": 1}, ["re:("], ["re:(a+)+$"], ["\0"], ["x" * 5000], ["*" * 5000]),
    "exclude_modules": ("x", [7], ["[" * 100], ["*" * 5000]),
    "modules_to_not_convert": ("x", [[]], ["re:("]),
    "kv_cache_scheme": (7, [], "x", {"num_bits": []}, {"type": {}}),
    "activation_scheme": (7, [], {}),
    "producer": (7, [], {"name": []}, {"name": "modelopt", "version": {}}),
    "format": (7, [], {}, "x"),
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        shutil.copytree(DATA / name, root / name, ignore=shutil.ignore_patterns("oracle"))
    logging.disable(logging.CRITICAL)
    yield root
    logging.disable(logging.NOTSET)


def opened(folder: Path, changes: dict[str, Any]) -> str:
    """`ok` or the name of the refusal, of opening and inspecting the copy with these files in it."""
    return _with(folder, changes, _open)


def loaded(folder: Path, changes: dict[str, Any]) -> str:
    """The same of loading it and two steps of generating."""
    return _with(folder, changes, _generate)


def _open(folder: Path) -> None:
    checkpoint = vtensors.open_checkpoint(folder)
    json.dumps(inspection(checkpoint))
    broken = [text for text in checkpoint.warnings if "failed and was left out" in text]
    assert broken == []
    checkpoint.check()


def _generate(folder: Path) -> None:
    llm = vtensors.LLM(str(folder), device="cpu")
    llm.generate([[1, 2, 3]], vtensors.SamplingParams(max_tokens=2))
    llm.tokenizer.encode("In the beginning")


def _with(folder: Path, changes: dict[str, Any], action: Any) -> str:
    before = {name: (folder / name).read_bytes() for name in changes}
    try:
        for name, content in changes.items():
            (folder / name).write_text(json.dumps(content))
        action(folder)
        return "ok"
    except VtensorsError as refusal:
        return type(refusal).__name__
    finally:
        for name, data in before.items():
            (folder / name).write_bytes(data)


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", MODELS)
def test_odd_values_at_random_places_are_opened_or_refused(copies: Path, model: str) -> None:
    source, folder = random.Random(model), copies / model
    names = [name for name in FILES if (folder / name).exists()]
    results = set()
    for _ in range(100):
        name = source.choice(names)
        document = _read(folder, name)
        path = source.choice(paths_of(document))
        results.add(opened(folder, {name: replaced(document, path, source.choice(ODD_VALUES))}))
    assert "DeclarationError" in results
    assert "ok" in results


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_odd_values_at_random_places_are_loaded_or_refused(copies: Path, model: str) -> None:
    source, folder = random.Random(model), copies / model
    names = [name for name in TEXT_FILES if (folder / name).exists()]
    for _ in range(6):
        name = source.choice(names)
        loaded(folder, {name: mutate_json(_read(folder, name), source, times=2)})


@pytest.mark.parametrize("field", list(ODD_FIELDS))
def test_a_field_of_the_model_with_an_impossible_value_is_loaded_or_refused(copies: Path, field: str) -> None:
    for model in (
        "llama-llmcompressor-nvfp4a16",
        "qwen3-modelopt-nvfp4-kvfp8",
        "qwen35-modelopt-nvfp4-awqlite",
    ):
        config = _read(copies / model, "config.json")
        for value in ODD_FIELDS[field]:
            changed = {**config, field: value}
            if field != "text_config" and isinstance(config.get("text_config"), dict):
                changed["text_config"] = {**config["text_config"], field: value}
            began = time.perf_counter()
            loaded(copies / model, {"config.json": changed})
            assert time.perf_counter() - began < 10, (field, value)


@pytest.mark.parametrize("field", list(QUANTIZATION))
def test_a_field_of_the_quantization_with_an_impossible_value_is_opened_or_refused(
    copies: Path, field: str
) -> None:
    for model in MODELS:
        folder = copies / model
        config = _read(folder, "config.json")
        owner = config if "quantization_config" in config else config.get("text_config", {})
        for value in QUANTIZATION[field]:
            block = {**owner.get("quantization_config", {}), field: value}
            began = time.perf_counter()
            opened(folder, {"config.json": {**config, "quantization_config": block}})
            assert time.perf_counter() - began < 10, (model, field, value)


def test_a_list_that_names_no_dtype_is_refused_where_the_model_computes_in_its_own() -> None:
    for named in (["bfloat16"], {"x": 1}, 7):
        configs = ConfigFiles(config={"dtype": named})
        checkpoint = SimpleNamespace(configs=configs, config=configs.config)
        with pytest.raises(RequestError, match="dtype"):
            config_dtype(checkpoint)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [r"re:model\.(a|a)*(\w|a)*$"])
def test_a_pattern_that_takes_too_long_is_an_error_of_the_checkpoint_naming_file_and_entry(
    tmp_path: Path, text: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {f"model.{'a' * 60}!.weight": ("BF16", (1,), b"xx")})
    block = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "ignore": [text],
    }
    write_json(tmp_path / "config.json", {"model_type": "llama", "quantization_config": block})
    checkpoint = vtensors.open_checkpoint(tmp_path)
    with pytest.raises(DeclarationError) as caught:
        checkpoint.check()
    assert "config.json: quantization_config.ignore" in str(caught.value)
    assert "(a|a)*" in str(caught.value)


def test_a_billion_layers_are_refused_before_they_are_planned(copies: Path) -> None:
    folder = copies / "llama-llmcompressor-nvfp4a16"
    config = {**_read(folder, "config.json"), "num_hidden_layers": 10**9}
    assert opened(folder, {"config.json": config}) == ArchitectureError.__name__


def test_layers_of_very_many_experts_are_refused_before_they_are_planned(copies: Path) -> None:
    folder = copies / "qwen35moe-modelopt-moe-mixed-w4a16"
    config = _read(folder, "config.json")
    owner = config.get("text_config", config)
    for count in (10**6, 2**31 - 1):
        owner["num_experts"] = count
        began = time.perf_counter()
        assert opened(folder, {"config.json": config}) == ArchitectureError.__name__
        assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": [' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"7",
        b"",
    ],
    ids=lambda data: repr(data[:12]),
)
@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_document_that_is_no_plain_json_object_is_refused(copies: Path, name: str, data: bytes) -> None:
    folder = copies / "llama-llmcompressor-nvfp4a16"
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(data)
    try:
        with pytest.raises(DeclarationError) as caught:
            vtensors.LLM(str(folder), device="cpu")
    finally:
        (folder / name).write_bytes(before)
    assert name in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_tokenizer_is_used_or_refused(copies: Path, seed: int) -> None:
    folder = copies / "llama-llmcompressor-nvfp4a16"
    document = mutate_json(_read(folder, "tokenizer.json"), random.Random(seed), times=2)
    loaded(folder, {"tokenizer.json": document})


def test_very_many_groups_are_refused_and_very_many_stale_lists_are_listed_soon(copies: Path) -> None:
    folder = copies / "llama-llmcompressor-nvfp4a16"
    config = _read(folder, "config.json")
    groups = config["quantization_config"]["config_groups"]
    first = next(iter(groups.values()))
    for count, expected in ((200, "ok"), (10_000, "DeclarationError")):
        groups.update({f"g{n}": {**first, "targets": [f"re:nothing{n}.*"]} for n in range(count)})
        began = time.perf_counter()
        assert opened(folder, {"config.json": config}) == expected
        assert time.perf_counter() - began < 10


@pytest.mark.parametrize("fault", [RuntimeError("index out of bounds"), KeyboardInterrupt()])
def test_faults_of_the_tokenizer_library_are_refusals_and_interrupts_are_not(fault: BaseException) -> None:
    panic = type("PanicException", (BaseException,), {})("index out of bounds")

    class Inner:
        def __init__(self, problem: BaseException) -> None:
            self.problem = problem

        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

        def get_added_tokens_decoder(self) -> dict[int, object]:
            return {}

        def encode(self, *_: object, **__: object) -> None:
            raise self.problem

        decode = encode

    for problem in (fault, panic):
        expected = KeyboardInterrupt if isinstance(problem, KeyboardInterrupt) else RequestError
        tokenizer = Tokenizer(Inner(problem))  # type: ignore[arg-type]
        with pytest.raises(expected):
            tokenizer.encode("x")
        with pytest.raises(expected):
            tokenizer.decode([1])
