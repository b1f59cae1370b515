"""Damaged documents of every kind: accepted or refused, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz import targets
from fuzz.seeds import seeds
from strategies import damaged_documents, damaged_headers, damaged_indexes, headers, json_values
from vtensors.errors import VtensorsError
from vtensors.header import parse_header

# Inputs that fuzzing found, by target.
FOUND = {
    # `regex` needed 2.8 GB to compile it.
    "declarations": (
        b'{"quantization_config": {"quant_algo": "NVFP4", "ignore": ["re:(a+)+$[E5]50{55555}5{55555550}"]}}',
        b'{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": [16]}}',
        b'{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",'
        b' "config_groups": {"g": {"input_activations": {"num_bits": [4]}}}}}',
        b'{"model_type": "llama", "num_hidden_layers": 1000000000000, "num_attention_heads": 1,'
        b' "num_key_value_heads": 1, "hidden_size": 64}',
    ),
    # A form could not divide by a block of nothing; a stacked tensor can promise any number of experts.
    "checkpoint": (
        b'{"config": {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",'
        b' "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float",'
        b' "strategy": "block", "block_structure": [0, 0]}}}}},'
        b' "tensors": {"m.weight": ["F8_E4M3", [4, 4]], "m.weight_scale": ["F32", [1, 1]]}}',
        b'{"config": {}, "tensors": {"m.experts.down_proj": ["BF16", [1000000000000, 0, 4]]}}',
    ),
}


@given(headers())
def test_every_well_formed_header_is_read(made: tuple[bytes, int]) -> None:
    raw, size = made
    assert parse_header("x", raw, size).file_size == size


@given(damaged_headers())
def test_a_damaged_header_is_read_or_refused(made: tuple[bytes, int]) -> None:
    raw, size = made
    try:
        found = parse_header("x", raw, size)
    except VtensorsError:
        return
    assert sum(info.nbytes for info in found.tensors) == size - len(raw)


@given(damaged_indexes())
def test_a_damaged_index_is_read_or_refused(data: bytes) -> None:
    targets.index(data)


@given(damaged_documents("config.json"))
@example({"quantization_config": []})
@example({"text_config": "x", "quantization_config": {"quant_method": 7}})
def test_a_damaged_config_is_declared_or_refused(document: object) -> None:
    targets.declarations(json.dumps(document).encode())


@given(json_values())
def test_any_value_as_quantization_config_is_declared_or_refused(value: object) -> None:
    targets.declarations(json.dumps({"quantization_config": value, "config": value}).encode())


@given(damaged_documents("tokenizer_config.json"), damaged_documents("generation_config.json"))
def test_damaged_side_files_are_read_or_refused(tokenizer: object, generation: object) -> None:
    files = {
        "tokenizer_config.json": tokenizer,
        "generation_config.json": generation,
        "config.json": generation,
    }
    targets.side_files(json.dumps(files).encode())


@pytest.mark.parametrize("name", list(targets.TARGETS))
@settings(max_examples=30)
@given(st.data())
def test_every_target_takes_its_seeds_and_bytes_cut_from_them(name: str, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(seeds(name)))
    cut = data.draw(st.integers(0, len(seed)))
    targets.TARGETS[name](seed)
    targets.TARGETS[name](seed[:cut])
    targets.TARGETS[name](seed[cut:])


@pytest.mark.parametrize(("name", "data"), [(name, item) for name, items in FOUND.items() for item in items])
def test_what_was_found_once_stays_mended(name: str, data: bytes) -> None:
    targets.TARGETS[name](data)
