"""Weights read ahead: the same as read one by one, in any order, of any size; errors and ends in the right place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from read_ahead_cases import bits, modules_of, tensors_of
from tiny_checkpoints import Tiny
from vtensors.checkpoint import open_checkpoint
from vtensors.errors import CheckpointError, ClaimError, VtensorsError, WeightValueError
from vtensors_engine.loading import load_model
from vtensors_engine.read_ahead import Batch, ReadAhead, batches
from vtensors_engine.staging import ALIGNMENT, Slot, aligned_size, copied_in_pieces
from vtensors_engine.weight_reading import WeightReading
from vtensors_formats import Weight
from vtensors_plugins.architectures.checkpoint_inputs import planned_modules

CPU = torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = pytest.mark.parametrize(
    "name",
    [
        "qwen35moe-modelopt-moe-mixed-w4a16",
        "qwen35-llmcompressor-mixed",
        "llamaedge-llmcompressor-fp8block",
        "qwen3-transformers-fp8block",
    ],
)
# From one module a slot to all in one; a matrix of 64 x 128 takes more than the smallest.
SLOTS = pytest.mark.parametrize("slot_bytes", [2048, 16 << 10, 1 << 20])


@pytest.fixture
def opened() -> Iterator[list[ReadAhead]]:
    ahead: list[ReadAhead] = []
    yield ahead
    for one in ahead:
        one.close()


def same(ours: object, theirs: object) -> bool:
    pairs = zip(tensors_of(ours), tensors_of(theirs), strict=True)
    return type(ours) is type(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs
    )


@CHECKPOINTS
@SLOTS
def test_weights_are_those_that_are_read_one_by_one(
    name: str, slot_bytes: int, opened: list[ReadAhead]
) -> None:
    checkpoint = open_checkpoint(DATA / name)
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, CPU, slot_bytes=slot_bytes, small_bytes=0)
    opened.append(ahead)
    # All first: a slot that is filled again too early would change those that came out of it.
    ours = {module: ahead.read(module) for module in modules}
    assert all(same(weight, checkpoint.read(module)) for module, weight in ours.items())
    assert (ahead.read_ahead, ahead.read_plainly) == (len(modules), 0)


@SLOTS
def test_any_order_gives_the_same(slot_bytes: int, opened: list[ReadAhead]) -> None:
    checkpoint = open_checkpoint(DATA / "qwen35moe-modelopt-moe-mixed-w4a16")
    modules = modules_of(checkpoint)
    shuffled = [modules[i] for i in torch.randperm(len(modules), generator=torch.Generator().manual_seed(3))]
    for order in (modules[::-1], shuffled, [*modules[:7], *modules, modules[0]], modules[5::3]):
        ahead = ReadAhead(checkpoint, modules, CPU, slot_bytes=slot_bytes, small_bytes=0)
        opened.append(ahead)
        for module in order:
            assert same(ahead.read(module), checkpoint.read(module)), module
        assert ahead.read_ahead + ahead.read_plainly == len(order)


def test_a_few_left_out_do_not_end_the_reading_ahead(opened: list[ReadAhead]) -> None:
    checkpoint = open_checkpoint(DATA / "qwen35moe-modelopt-moe-mixed-w4a16")
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, CPU, slot_bytes=16 << 10, small_bytes=0)
    opened.append(ahead)
    for module in modules[::2]:
        ahead.read(module)
    assert ahead.read_plainly == 0


def test_one_from_far_ahead_is_read_at_once_and_the_others_in_order(opened: list[ReadAhead]) -> None:
    checkpoint = open_checkpoint(DATA / "qwen35moe-modelopt-moe-mixed-w4a16")
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, CPU, slot_bytes=2048, small_bytes=0)
    opened.append(ahead)
    for module in (modules[-1], *modules[:-1]):
        ahead.read(module)
    assert (ahead.read_ahead, ahead.read_plainly) == (len(modules) - 1, 1)


def test_small_weights_are_read_when_they_are_asked_for(opened: list[ReadAhead]) -> None:
    checkpoint = open_checkpoint(DATA / "qwen35moe-modelopt-moe-mixed-w4a16")
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, CPU, small_bytes=8192)
    opened.append(ahead)
    norms = [module for module in modules if "norm" in module]
    for module in (*norms, *(module for module in modules if module not in norms)):
        assert same(ahead.read(module), checkpoint.read(module))
    assert ahead.read_ahead
    assert ahead.read_plainly >= len(norms)


def test_an_error_names_its_tensor_and_spares_the_others(tmp_path: Path, opened: list[ReadAhead]) -> None:
    tiny = Tiny.modelopt("FP8")
    bad = next(name for name in tiny.tensors if name.endswith("up_proj.weight_scale"))
    tiny.tensors[bad] = torch.tensor(float("nan"))
    checkpoint = open_checkpoint(tiny.save(tmp_path / "bad"))
    modules = modules_of(checkpoint)
    for slot_bytes in (1024, 1 << 20):
        ahead = ReadAhead(checkpoint, modules, CPU, slot_bytes=slot_bytes, small_bytes=0)
        opened.append(ahead)
        for module in modules:
            if module == bad.removesuffix(".weight_scale"):
                with pytest.raises(WeightValueError, match=bad):
                    ahead.read(module)
            else:
                ahead.read(module)


def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path, opened: list[ReadAhead]) -> None:
    folder = Tiny.plain_model().save(tmp_path / "cut")
    checkpoint = open_checkpoint(folder)
    modules = modules_of(checkpoint)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 10)
    ahead = ReadAhead(checkpoint, modules, CPU, small_bytes=0)
    opened.append(ahead)
    with pytest.raises(CheckpointError, match="changed while open"):
        ahead.read(modules[0])


def test_an_unknown_module_is_refused_as_by_the_checkpoint(opened: list[ReadAhead]) -> None:
    checkpoint = open_checkpoint(DATA / "qwen35-llmcompressor-mixed")
    ahead = ReadAhead(checkpoint, [], CPU)
    opened.append(ahead)
    with pytest.raises(ClaimError, match="no such module"):
        ahead.read("model.layers.99")


def test_closing_in_the_midst_ends_every_thread() -> None:
    checkpoint = open_checkpoint(DATA / "qwen35moe-modelopt-moe-mixed-w4a16")
    before = threading.active_count()
    ahead = ReadAhead(checkpoint, modules_of(checkpoint), CPU, slot_bytes=2048, small_bytes=0)
    ahead.read(modules_of(checkpoint)[0])
    ahead.close()
    assert threading.active_count() == before


def test_one_expert_of_a_stacked_tensor_is_read_alone(tmp_path: Path, opened: list[ReadAhead]) -> None:
    tiny = Tiny.plain_model("qwen3_5_moe")
    stacked: dict[str, Tensor] = {}
    for name in [name for name in tiny.tensors if ".experts." in name]:
        place, _, rest = name.partition(".experts.")
        stacked.setdefault(f"{place}.experts|{rest.split('.')[1]}", torch.empty(0))
    for key in stacked:
        place, _, part = key.partition("|")
        names = sorted(n for n in tiny.tensors if n.startswith(f"{place}.") and f".{part}." in n)
        names.sort(key=lambda n: int(n.removeprefix(f"{place}.").split(".")[0]))
        stacked[key] = torch.stack([tiny.tensors.pop(name) for name in names])
    for key, tensor in stacked.items():
        place, _, part = key.partition("|")
        if part == "gate_proj":
            tiny.tensors[f"{place}.gate_up_proj"] = torch.cat([tensor, stacked[f"{place}|up_proj"]], dim=1)
        elif part == "down_proj":
            tiny.tensors[f"{place}.down_proj"] = tensor
    checkpoint = open_checkpoint(tiny.save(tmp_path / "stacked"))
    modules = modules_of(checkpoint)
    ahead = ReadAhead(checkpoint, modules, CPU, small_bytes=0)
    opened.append(ahead)
    assert all(same(ahead.read(module), checkpoint.read(module)) for module in modules)
    assert (
        ahead.read_plainly == sum(checkpoint.modules[module].claim.part is not None for module in modules) > 0
    )


def test_batches_fill_slots_in_order() -> None:
    sizes = {"a": 4, "b": 5, "c": 20, "d": 1, "e": 9}
    assert batches(sizes, 10) == [
        Batch(modules=("a", "b"), nbytes=9),
        Batch(modules=("c",), nbytes=20),
        Batch(modules=("d", "e"), nbytes=10),
    ]
    assert batches({}, 10) == []


def test_what_is_larger_than_a_slot_is_copied_in_pieces() -> None:
    data = bytes(range(256)) * 3
    slots = [Slot(100, CPU), Slot(100, CPU)]

    def read(start: int, into: memoryview) -> None:
        into[:] = data[start : start + len(into)]

    assert bytes(copied_in_pieces(len(data), read, slots, CPU).tolist()) == data
    assert copied_in_pieces(0, read, slots, CPU).numel() == 0


@pytest.mark.fault("B73")
def test_a_reader_that_waits_for_a_device_that_hangs_ends_when_it_is_closed() -> None:
    closed, told = threading.Event(), list[str]()
    slot = Slot(100, CPU, closed)
    slot._copied = SimpleNamespace(query=lambda: False)  # type: ignore[assignment]

    def wait() -> None:
        try:
            slot.wait()
        except RuntimeError as problem:
            told.append(str(problem))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    closed.set()
    thread.join(10)
    assert told == ["closed while reading"]


def test_tensors_begin_where_kernels_may_read_16_bytes() -> None:
    assert [aligned_size(size) for size in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, 256, 256, 512]


def test_on_a_cpu_weights_stay_views_of_the_files() -> None:
    checkpoint = open_checkpoint(DATA / "qwen35-llmcompressor-mixed")
    modules = planned_modules(checkpoint)
    reading = WeightReading(checkpoint=checkpoint, modules=modules, device=CPU, dtype=torch.float32)
    name = "embed_tokens"
    weight = reading.read(name)
    assert isinstance(weight, Weight)
    mapped = checkpoint.read(modules[name])
    assert isinstance(mapped, Weight)
    assert weight.stored()[0].data_ptr() == mapped.stored()[0].data_ptr()
    reading.close()


def test_what_is_refused_before_the_model_is_built_ends_the_reading_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[WeightReading] = []
    monkeypatch.setattr(WeightReading, "close", lambda reading: closed.append(reading))
    monkeypatch.setenv("VT_KERNELS", "no-such-scheme:no-such-kernel")
    with pytest.raises(VtensorsError, match="VT_KERNELS"):
        load_model(str(DATA / "qwen35-llmcompressor-mixed"), device="cpu")
    assert len(closed) == 1
