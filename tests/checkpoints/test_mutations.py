"""Every checkpoint, damaged at random in one place, is refused by name; what is legal is listed in `mutations`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from mutations import (
    Damage,
    Stored,
    added,
    added_entries,
    additions,
    read_stored,
    removals,
    removed,
    repeated,
    retyped,
    retypings,
    transposals,
    transposed,
    write_stored,
)
from oracle_cases import Case, all_cases

import vtensors
from vtensors.errors import VtensorsError

CASES = [pytest.param(case, id=case.name) for case in all_cases()]


@lru_cache(maxsize=1)
def _stored(case: Case) -> Stored:
    return read_stored(case.path)


def _pick(draw: st.DrawFn, names: list[str]) -> str:
    """One name, each last component as likely as the others: there are far more weights than, say, biases."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    return draw(st.sampled_from(kinds[draw(st.sampled_from(sorted(kinds)))]))


def _removed(draw: st.DrawFn, stored: Stored) -> Damage:
    return removed(stored, _pick(draw, removals(stored)))


def _added(draw: st.DrawFn, stored: Stored) -> Damage:
    name = _pick(draw, additions(stored))
    return added(stored, name, draw(st.sampled_from(list(added_entries(name, stored)))))


def _retyped(draw: st.DrawFn, stored: Stored) -> Damage:
    found = retypings(stored)
    name = _pick(draw, list(dict.fromkeys(name for name, _ in found)))
    return retyped(stored, name, draw(st.sampled_from([dtype for other, dtype in found if other == name])))


def _transposed(draw: st.DrawFn, stored: Stored) -> Damage:
    return transposed(stored, _pick(draw, transposals(stored)))


def _repeated(draw: st.DrawFn, stored: Stored) -> Damage:
    return repeated(stored, draw(st.sampled_from(list(stored.tensors()))))


def _load(path: Path) -> None:
    """What a load does up to the building of the model: headers, claims, accounting, every value checked."""
    checkpoint = vtensors.open_checkpoint(path)
    checkpoint.check()
    for name in checkpoint.modules:
        checkpoint.read(name)


def _load_model(path: Path) -> None:
    vtensors.load_model(path, device="cpu", dtype=torch.float32)


def _assert_refused(damage: Damage, case: Case, load: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        write_stored(damage.stored, case.path, copy)
        with pytest.raises(VtensorsError) as caught:
            load(copy)
        assert damage.named in str(caught.value)


def _check_at_random(case: Case, data: st.DataObject, *, of: Callable[[st.DrawFn, Stored], Damage]) -> None:
    damage = of(data.draw, _stored(case))
    note(damage.what)
    load = _load_model if data.draw(st.integers(0, 9)) == 0 else _load
    _assert_refused(damage, case, load)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_a_checkpoint_without_one_of_its_tensors_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    _check_at_random(case, data, of=_removed)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_a_checkpoint_with_a_tensor_more_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    _check_at_random(case, data, of=_added)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_a_tensor_under_another_dtype_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    _check_at_random(case, data, of=_retyped)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_a_transposed_scale_or_weight_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    _check_at_random(case, data, of=_transposed)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(data=st.data())
def test_a_second_indexed_file_for_a_name_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    _check_at_random(case, data, of=_repeated)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(data=st.data())
def test_a_file_that_is_cut_or_longer_than_its_header_says_is_refused(
    case: Case, data: st.DataObject
) -> None:
    stored = _stored(case)
    file = data.draw(st.sampled_from(sorted(stored.shards)))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        write_stored(stored, case.path, copy)
        size = (copy / file).stat().st_size
        change = data.draw(st.integers(1, size) | st.integers(1, 16), label="bytes")
        if data.draw(st.booleans(), label="cut"):
            with (copy / file).open("r+b") as stream:
                stream.truncate(size - change)
        else:
            with (copy / file).open("ab") as stream:
                stream.write(bytes(min(change, 4096)))
        with pytest.raises(VtensorsError) as caught:
            _load(copy)
        assert file in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_copy_without_damage_loads(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "vtensors")
    write_stored(_stored(case), case.path, tmp_path / "copy")
    _load_model(tmp_path / "copy")


@pytest.mark.parametrize("case", CASES)
def test_a_stray_file_is_only_warned_of(case: Case, tmp_path: Path) -> None:
    stored = _stored(case)
    write_stored(stored, case.path, tmp_path / "copy")
    name, entry = next(iter(stored.tensors().items()))
    write_stored(
        Stored(shards={"other.safetensors": {name: entry}}, indexed=False), case.path, tmp_path / "x"
    )
    (tmp_path / "x" / "other.safetensors").rename(tmp_path / "copy" / "other.safetensors")
    checkpoint = vtensors.open_checkpoint(tmp_path / "copy")
    checkpoint.check()
    assert any("other.safetensors" in warning for warning in checkpoint.warnings)


# --- the legal ones really are ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_input_scales_and_kv_scales_may_be_missing(case: Case, tmp_path: Path) -> None:
    stored = _stored(case)
    tails = ("input_scale", "input_global_scale", "k_scale", "v_scale")
    optional = [name for name in stored.tensors() if name.endswith(tails)]
    for name in optional:
        stored = stored.with_tensor(name, None)
    write_stored(stored, case.path, tmp_path / "copy")
    _load(tmp_path / "copy")


def test_e8m0_scales_read_the_same_under_their_two_dtype_names(shared: Path, tmp_path: Path) -> None:
    folder = shared / "checkpoints" / "qwen35-modelopt-mxfp8"
    stored = read_stored(folder)
    for name, (dtype, shape, data) in stored.tensors().items():
        if dtype == "U8":
            stored = stored.with_tensor(name, ("F8_E8M0", shape, data))
    write_stored(stored, folder, tmp_path / "copy")
    before, after = vtensors.open_checkpoint(folder), vtensors.open_checkpoint(tmp_path / "copy")
    after.check()
    for name, module in before.modules.items():
        assert after.modules[name].scheme == module.scheme
        assert torch.equal(after.read(name).dequantize(), before.read(name).dequantize())
