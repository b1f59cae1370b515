"""The gated delta net kernels on the CPU emulator: against the reference, prompts against steps, dirty slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulation.emulator import emulate, needs_compiler
from gated_delta_cases import (
    HALVES,
    Inputs,
    check,
    decoded,
    dirty_slots,
    expected,
    integers,
    make_inputs,
    make_kernel,
    ring_in_order,
)
from vtensors.errors import RequestError, VtensorsError
from vtensors_kernels.compiling.sources import Source, load_source
from vtensors_kernels.steps import gated_delta_net
from vtensors_kernels.steps.gated_delta_form import FormLaunch
from vtensors_kernels.steps.gated_delta_net import Arguments, GatedDeltaNetKernel
from vtensors_kernels.steps.gated_delta_probe import probe_gated_delta_net

pytestmark = needs_compiler


class EmulatedLaunches:
    """`DeviceLaunches` on the CPU, threads in a random order."""

    def __init__(self, forms: tuple[FormLaunch, ...], _device: torch.device) -> None:
        self.seed, self.known = 1, {one.function: one.defines for one in forms}

    def __call__(self, form: FormLaunch, arguments: Arguments) -> None:
        """Run it."""
        assert self.known[form.function] == form.defines
        self.seed += 1
        emulate(
            self.source(form),
            form.function,
            dict(form.defines),
            form.grid,
            form.block,
            list(arguments),
            seed=self.seed,
        )

    def source(self, form: FormLaunch) -> Source:
        """What is run."""
        return load_source(form.source)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta_net, "DeviceLaunches", EmulatedLaunches)


SHAPES = [
    (2, 6, 32, 32, 4),
    (1, 1, 16, 16, 2),
    (1, 2, 48, 144, 8),
    (2, 2, 144, 32, 3),
    (1, 1, 80, 48, 5),
    (1, 1, 128, 128, 4),
]
IDS = ["x".join(map(str, shape)) for shape in SHAPES]


def prefilled(
    kernel: GatedDeltaNetKernel, inputs: Inputs, state: tuple[Tensor, Tensor], slot: int, start: int = 0
) -> Tensor:
    """Output rows of one prefill call."""
    out = torch.full((inputs.qkv.shape[0], kernel.form.value_width), float("nan"), dtype=kernel.dtype)
    return kernel.prefill(*inputs.all(), *state, integers(kernel, slot), integers(kernel, start), out)


def same(ours: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Whether all pairs are equal, NaN (a slot never used) among equal values."""
    return all(
        torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) for a, b in zip(ours, others, strict=True)
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_decoding_follows_the_reference_from_a_dirty_slot_on(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    kernel = make_kernel(*shape, dtype=dtype)
    inputs, state = make_inputs(kernel, 11), dirty_slots(kernel, 2)
    ours = decoded(kernel, inputs, state, slot=1)
    wanted, history, memory = expected(kernel, inputs)
    check(ours, wanted, dtype)
    check(state[1][1], memory, dtype)
    assert torch.equal(ring_in_order(state[0][1], 11), history)
    assert bool(state[0][0].isnan().all() and state[1][0].isnan().all()), "another slot was written"


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 70])
@pytest.mark.parametrize("start", [0, 1, 2, 6])
def test_a_prompt_gives_the_bits_of_its_tokens_one_by_one(tokens: int, start: int) -> None:
    kernel = make_kernel()
    inputs = make_inputs(kernel, start + tokens)
    one, many = dirty_slots(kernel, 3), dirty_slots(kernel, 3)
    before = decoded(kernel, inputs.rows(0, start), one, slot=1) if start else None
    if start:
        assert torch.equal(before, prefilled(kernel, inputs.rows(0, start), many, slot=1))
    rest = inputs.rows(start, start + tokens)
    ours = prefilled(kernel, rest, many, slot=1, start=start)
    assert torch.equal(ours, decoded(kernel, rest, one, slot=1, start=start))
    assert same(many, one)
    check(ours, expected(kernel, inputs)[0][start:], kernel.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_prompt_gives_the_bits_of_its_tokens_at_every_shape(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    kernel = make_kernel(*shape, dtype=dtype)
    inputs, one, many = make_inputs(kernel, 9), dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    ours = prefilled(kernel, inputs, many, slot=0)
    assert torch.equal(ours, decoded(kernel, inputs, one, slot=0))
    assert same(many, one)


@pytest.mark.parametrize("columns", [(1, 16), (2, 32), (4, 64)], ids=str)
def test_a_prompt_gives_the_same_bits_however_columns_are_dealt_out(columns: tuple[int, int]) -> None:
    kernel = make_kernel(1, 2, 32, 64)
    inputs, one, many = make_inputs(kernel, 10), dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    wanted = decoded(kernel, inputs, one, slot=0)
    other = make_kernel(1, 2, 32, 64, prefill_columns=columns)
    assert (other.form.columns, other.form.span) == columns
    assert torch.equal(prefilled(other, inputs, many, slot=0), wanted)
    assert same(many, one)


def test_a_long_prompt_goes_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make_kernel(1, 2, 16, 16)
    inputs, whole, pieces = make_inputs(kernel, 29), dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    wanted = prefilled(kernel, inputs, whole, slot=0)
    monkeypatch.setattr(gated_delta_net, "PIECE", 9)
    assert torch.equal(prefilled(kernel, inputs, pieces, slot=0), wanted)
    assert same(pieces, whole)


def test_rows_do_not_depend_on_their_neighbours_and_padding_is_harmless() -> None:
    kernel = make_kernel()
    starts = [0, 3, 7]
    inputs = [make_inputs(kernel, start + 1, seed=i) for i, start in enumerate(starts)]
    alone, together = dirty_slots(kernel, 5), dirty_slots(kernel, 5)
    rows = []
    for i, start in enumerate(starts):
        rows.append(decoded(kernel, inputs[i], alone, slot=i)[start:])
        if start:
            decoded(kernel, inputs[i].rows(0, start), together, slot=i)
    last = [part.rows(start, start + 1) for part, start in zip(inputs, starts, strict=True)]
    garbage = make_inputs(kernel, 2, seed=9)
    garbage.qkv.fill_(float("nan"))
    order = [garbage.rows(0, 1), last[2], last[0], garbage.rows(1, 2), last[1]]
    batch = Inputs(**{name: torch.cat([getattr(x, name) for x in order]) for name in ("qkv", "z", "b", "a")})
    for _ in range(2):
        moved = (together[0].clone(), together[1].clone())
        slots, positions = integers(kernel, 4, 2, 0, 4, 1), integers(kernel, 0, 7, 0, 5, 3)
        out = kernel.decode(*batch.all(), *moved, slots, positions)
        assert torch.equal(out[[2, 4, 1]], torch.cat(rows))
        assert same((moved[0][:3], moved[1][:3]), (alone[0][:3], alone[1][:3]))


LOWEST, HIGHEST = "-2147483647 - 1", "2147483647"
TRUE_SLOT, TRUE_POSITION = "slots[row]", "positions[row]"
HINTS = [
    # No slot at all.
    *((slot, TRUE_POSITION) for slot in ("-1", "2", "1 << 24", LOWEST, HIGHEST)),
    # Another sequence's; other threads' reading comes later.
    ("0", TRUE_POSITION),
    ("thread % 3 ? slots[row] : 0", TRUE_POSITION),
    # The step before this one, the first token, places of the same entries, and no position at all.
    *((TRUE_SLOT, at) for at in ("positions[row] - 1", "0", "positions[row] + 12", LOWEST, HIGHEST)),
    ("thread & 32 ? slots[row] : 0", "thread % 2 ? positions[row] : 5"),
]


@pytest.mark.parametrize("shape", [(2, 6, 32, 32, 4), (2, 2, 144, 144, 3)], ids=["4 taps", "3 taps"])
@pytest.mark.parametrize(("slot", "position"), HINTS)
def test_what_is_read_before_an_earlier_kernel_writes_it_changes_nothing(
    slot: str, position: str, shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hinted(EmulatedLaunches):
        def source(self, form: FormLaunch) -> Source:
            own = load_source(form.source)
            if form.function != "gated_delta_decode":
                return own
            text = own.text
            for call, hint in (("load_hint(slots + row)", slot), ("load_hint(positions + row)", position)):
                assert text.count(call) == 1
                text = text.replace(call, f"({hint})")
            return Source(name=own.name, text=text)

    inputs, wanted = make_inputs(make_kernel(*shape), 6), dirty_slots(make_kernel(*shape), 2)
    out = prefilled(make_kernel(*shape), inputs, wanted, slot=1)
    monkeypatch.setattr(gated_delta_net, "DeviceLaunches", Hinted)
    state = dirty_slots(make_kernel(*shape), 2)
    assert torch.equal(decoded(make_kernel(*shape), inputs, state, slot=1), out)
    assert same(state, wanted)


def test_a_slot_used_again_is_as_a_fresh_one() -> None:
    kernel = make_kernel()
    state, fresh = dirty_slots(kernel, 1), dirty_slots(kernel, 1)
    decoded(kernel, make_inputs(kernel, 9, seed=1, spread=30.0), state, slot=0)
    inputs = make_inputs(kernel, 6)
    assert torch.equal(decoded(kernel, inputs, state, slot=0), decoded(kernel, inputs, fresh, slot=0))
    assert same(state, fresh)


def test_large_and_small_values_stay_near_the_reference() -> None:
    kernel = make_kernel()
    for spread in (1e-3, 40.0):
        inputs = make_inputs(kernel, 12, spread=spread)
        check(
            decoded(kernel, inputs, dirty_slots(kernel, 1), slot=0), expected(kernel, inputs)[0], kernel.dtype
        )


def test_nothing_goes_in_that_does_not_fit() -> None:
    kernel = make_kernel()
    inputs, state = make_inputs(kernel, 2), dirty_slots(kernel, 2)
    both = integers(kernel, 0, 1)
    wide = torch.zeros(2, 2 * kernel.form.channels, dtype=kernel.dtype)
    for x in (inputs.qkv[:, :-1], inputs.qkv.float(), wide[:, ::2], inputs.qkv[:1]):
        with pytest.raises(RequestError, match="does not fit"):
            kernel.decode(x, inputs.z, inputs.b, inputs.a, *state, both, both)
    with pytest.raises(RequestError, match="history does not fit"):
        kernel.decode(*inputs.all(), state[0][:, :3], state[1], both, both)
    with pytest.raises(RequestError, match="memory does not fit"):
        kernel.prefill(*inputs.all(), state[0], state[1].transpose(2, 3), both[:1], both[:1])
    for slots in (both.long(), both[:1]):
        with pytest.raises(RequestError, match="slots do not fit"):
            kernel.decode(*inputs.all(), *state, slots, both)
    with pytest.raises(RequestError, match="output does not fit"):
        kernel.decode(*inputs.all(), *state, both, both, torch.zeros(2, 3))


@pytest.mark.parametrize(
    "shape", [(2, 5, 32, 32, 4), (1, 1, 24, 32, 4), (1, 1, 272, 32, 4), (1, 1, 32, 8, 4), (1, 1, 32, 32, 9)]
)
def test_a_shape_without_a_kernel_is_refused(shape: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(RequestError, match="no gated delta net kernel"):
        make_kernel(*shape)


def test_weights_that_do_not_fit_are_refused() -> None:
    weights = make_kernel().weights
    parts = {"decay": weights.decay, "dt_bias": weights.dt_bias, "norm": weights.norm, "conv": weights.conv}
    for name, wrong in (
        ("decay", weights.decay[:5]),
        ("norm", weights.norm.half()),
        ("conv", weights.conv[:-1]),
        ("conv", weights.conv[0]),
    ):
        fields = {**parts, name: wrong}
        with pytest.raises(RequestError, match="weights of a gated delta net"):
            GatedDeltaNetKernel(key_heads=2, value_heads=6, eps=1e-6, dtype=torch.bfloat16, **fields)
    with pytest.raises(RequestError, match="16 bits"):
        GatedDeltaNetKernel(key_heads=2, value_heads=6, eps=1e-6, dtype=torch.float32, **parts)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_self_test_passes(dtype: torch.dtype) -> None:
    probe_gated_delta_net(make_kernel(1, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("spoiled", "name"),
    [("gated_delta_prepare", "dt_bias"), ("gated_delta_decode", "dt_bias"), ("gated_delta_norm", "norm")],
)
def test_the_self_test_sees_a_kernel_that_is_a_little_wrong(
    spoiled: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make_kernel(1, 2)
    right, weight = EmulatedLaunches.__call__, getattr(kernel.weights, name)

    def wrong(self: EmulatedLaunches, form: FormLaunch, arguments: Arguments) -> None:
        if form.function == spoiled:
            arguments = tuple(x * 1.03 if x is weight else x for x in arguments)
        right(self, form, arguments)

    monkeypatch.setattr(EmulatedLaunches, "__call__", wrong)
    with pytest.raises(VtensorsError, match="a gated delta net"):
        probe_gated_delta_net(kernel)
