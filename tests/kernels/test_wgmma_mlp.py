"""An MLP whose products hand on their stages, in the emulator: the bits of two linears, with a launch less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_launches import EmulatedFunction, EmulatedLaunch
from emulation.emulator import emulate, needs_compiler
from vtensors.errors import RequestError
from vtensors_formats import FP8Weight, MXFP8Weight, NVFP4Weight
from vtensors_kernels.nvfp4 import staging, wgmma_launches
from vtensors_kernels.nvfp4.wgmma import WgmmaLinear
from vtensors_kernels.nvfp4.wgmma_form import WgmmaForm
from vtensors_kernels.nvfp4.wgmma_mlp import Asked, Form, MlpForms, WgmmaMlp, choose_forms
from vtensors_kernels.nvfp4.wgmma_segments import WgmmaSegments
from vtensors_kernels.nvfp4.wgmma_segments_form import SegmentsForm
from vtensors_kernels.packed_matrix import PackedMatrix
from vtensors_kernels.reference.fp8_packing import pack_fp8_reference
from vtensors_kernels.reference.nvfp4_packing import pack_reference
from vtensors_kernels.steps.rms_norm import NormForm

EPS = 1e-6
pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the emulator was given, in order."""
    names: list[str] = []

    class Counted(EmulatedLaunch):
        def call(self, stream: int, *given: int) -> None:
            names.append(self.function.name)
            super().call(stream, *given)

    def compiled(
        source: str, name: str, _index: int, defines: dict[str, int], _shared: int = 0
    ) -> EmulatedFunction:
        return EmulatedFunction(source=source, name=name, defines=tuple(sorted(defines.items())))

    for module in (staging, wgmma_launches):
        monkeypatch.setattr(module, "Launch", Counted)
        monkeypatch.setattr(module, "compiled_function", compiled)
    monkeypatch.setattr(staging, "_why_not", lambda columns, dtype, device: None)
    monkeypatch.setattr(wgmma_launches, "norm_rows", lambda x, gain, eps: _normed(x, gain, eps, names))
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return names


def _normed(x: Tensor, gain: Tensor, eps: float, names: list[str]) -> Tensor:
    """By the kernel that norms rows."""
    form, out = NormForm.of(x.shape[1]), torch.full_like(x, float("nan"))
    defines = {"VT_F16": int(x.dtype == torch.float16), "VT_CHUNKS": form.chunks}
    given = [x, gain, out, x.stride(0), x.shape[1], eps]
    size = (x.shape[0],), (form.threads,)
    emulate("common/rms_norm.cu", "rms_norm", defines, *size, given, shared_bytes=form.shared_bytes)
    names.append("rms_norm")
    return out


def _weight(kind: str, n: int, k: int, seed: int, bias: bool) -> Any:
    source = torch.Generator().manual_seed(seed)
    own = torch.randn(n, generator=source) if bias else None
    codes = torch.randn(n, k, generator=source).to(torch.float8_e4m3fn)
    if kind == "mxfp8":
        scale = torch.randint(122, 126, (n, k // 32), generator=source, dtype=torch.uint8)
        return MXFP8Weight(codes=codes, scale=scale, bias=own)
    if kind == "fp8":
        return FP8Weight(codes=codes, scale=torch.tensor(0.1), bias=own)
    return NVFP4Weight(
        codes=torch.randint(0, 256, (n, k // 2), generator=source, dtype=torch.uint8),
        block_scale=torch.empty(n, k // 16).uniform_(1, 16, generator=source).to(torch.float8_e4m3fn),
        global_scale=torch.tensor(0.01),
        bias=own,
    )


def _matrices(kind: str, hidden: int, width: int, bias: bool = False) -> tuple[Any, Any]:
    """gate and up, down."""
    pack: Any = pack_reference if kind == "nvfp4" else pack_fp8_reference
    pair = [_weight(kind, width, hidden, seed, bias) for seed in (1, 2)]
    return pack(pair, paired=True), pack([_weight(kind, hidden, width, 3, bias)])


def _form(tokens: int, blocks: int, packed: PackedMatrix) -> Form:
    own: dict[str, Any] = {
        "tokens": tokens,
        "warpgroups": 2,
        "cluster": 1,
        "blocks": blocks,
        "chunk": 2,
        "slots": 2,
    }
    if tokens > 32:
        return WgmmaForm(**own)
    return SegmentsForm(**own, block_bytes=packed.format.block_bytes)


def _linear(packed: Any, dtype: torch.dtype, op: str, form: Form, m: int) -> WgmmaSegments | WgmmaLinear:
    if isinstance(form, WgmmaForm):
        return WgmmaLinear(packed, dtype, op, tokens=(m, m), forms=(form,))
    return WgmmaSegments(packed, dtype, op, forms=(form,))


def _h(m: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, hidden, generator=torch.Generator().manual_seed(m)).to(dtype)


CASES = [
    # weights, M, tokens of the forms, hidden, width, blocks of gate and up, of down: whole stages and tails of each
    # length, ranges that end within a group of rows
    ("nvfp4", 17, 24, 80, 144, 2, 1),
    ("nvfp4", 24, 24, 272, 128, 3, 2),
    ("nvfp4", 32, 32, 144, 208, 5, 3),
    ("nvfp4", 33, 48, 80, 176, 3, 1),
    ("nvfp4", 48, 48, 272, 16, 1, 2),
    ("nvfp4", 64, 64, 144, 272, 3, 2),
    ("fp8", 17, 32, 144, 240, 3, 2),
    ("fp8", 24, 24, 80, 112, 2, 1),
    ("mxfp8", 32, 32, 96, 160, 2, 1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "m", "tokens", "hidden", "width", "blocks", "behind"), CASES)
def test_the_bits_are_those_of_both_linears_with_a_launch_less(
    kind: str,
    m: int,
    tokens: int,
    hidden: int,
    width: int,
    blocks: int,
    behind: int,
    dtype: torch.dtype,
    launched: list[str],
) -> None:
    gate_up, down = _matrices(kind, hidden, width, bias=m == 32)
    forms = MlpForms(gate_up=_form(tokens, blocks, gate_up), down=_form(tokens, behind, down))
    h, gain = _h(m, hidden, dtype), torch.linspace(-0.5, 1.5, hidden)
    x = _linear(gate_up, dtype, "linear_swiglu", forms.gate_up, m).normed(h, gain, EPS)
    wanted = _linear(down, dtype, "linear_add", forms.down, m)(x, h)
    assert not wanted.isnan().any()
    apart = list(launched)
    mlp = WgmmaMlp(gate_up, down, dtype, tokens=(m, m), forms=forms)
    mlp.workspace.poison()
    for _ in range(2):  # counters are left as zeros
        launched.clear()
        assert torch.equal(mlp(h, gain, EPS), wanted)
        assert not mlp.workspace.counters.any()
    norms = ["norm_activations"] if m <= 32 else ["rms_norm", "permute_activations"]
    product = apart[-1]
    assert apart == [*norms, product, "permute_activations", product]
    assert launched == [*norms, product, product]


def test_fp8_rows_beyond_32_are_two_rounds_of_launches(launched: list[str]) -> None:
    gate_up, down = _matrices("fp8", 80, 112)
    h, gain = _h(43, 80, torch.bfloat16), torch.linspace(-0.5, 1.5, 80)
    x = WgmmaSegments(gate_up, h.dtype, "linear_swiglu").normed(h, gain, EPS)
    wanted = WgmmaSegments(down, h.dtype, "linear_add")(x, h)
    mlp = WgmmaMlp(gate_up, down, h.dtype, tokens=(17, 64))
    mlp.workspace.poison()
    launched.clear()
    assert torch.equal(mlp(h, gain, EPS), wanted)
    assert launched == ["norm_activations", *["linear_fp8_wgmma_segments"] * 2] * 2


def test_rows_of_any_strides_give_the_same() -> None:
    gate_up, down = _matrices("nvfp4", 80, 144)
    forms = MlpForms(gate_up=_form(24, 2, gate_up), down=_form(24, 1, down))
    mlp = WgmmaMlp(gate_up, down, torch.bfloat16, tokens=(17, 24), forms=forms)
    h, gain = _h(19, 80, torch.bfloat16), torch.linspace(-0.5, 1.5, 80)
    apart = torch.cat([h, h[:, :3]], dim=1)[:, :80]
    assert torch.equal(mlp(apart, gain, EPS), mlp(h, gain, EPS))


def test_it_serves_the_rows_that_it_was_made_for() -> None:
    gate_up, down = _matrices("nvfp4", 80, 144)
    mlp = WgmmaMlp(gate_up, down, torch.bfloat16, tokens=(17, 64))
    assert [m for m in range(80) if mlp.serves(torch.zeros(m, 80))] == list(range(17, 65))
    assert not mlp.serves(torch.zeros(1, 20, 80))
    with pytest.raises(RequestError, match="too many or too few tokens"):
        mlp(_h(16, 80, torch.bfloat16), torch.ones(80), EPS)


def test_what_does_not_fit_together_is_refused() -> None:
    (gate_up, down), (_, other) = _matrices("nvfp4", 80, 144), _matrices("nvfp4", 80, 128)
    for given, tokens, told in (
        ((gate_up, other), (17, 32), "down does not take"),
        ((down, down), (17, 32), "paired rows"),
        ((gate_up, gate_up), (17, 32), "paired rows"),
        ((gate_up, down), (17, 65), "cannot serve"),
        (_matrices("fp8", 80, 144), (0, 33), "cannot serve"),
        ((gate_up, _scaled(80, 144)), (17, 32), "pre_scale"),
    ):
        with pytest.raises(RequestError, match=told):
            WgmmaMlp(*given, torch.bfloat16, tokens=tokens)


def _scaled(hidden: int, width: int) -> Any:
    weight = _weight("nvfp4", hidden, width, 3, False)
    return pack_reference([NVFP4Weight(**{**_fields(weight), "pre_scale": torch.ones(width)})])


def _fields(weight: NVFP4Weight) -> dict[str, Any]:
    return {name: getattr(weight, name) for name in ("codes", "block_scale", "global_scale")}


@pytest.mark.parametrize("size", [1152, 2048])
@pytest.mark.parametrize("m", [1, 17, 24, 25, 32])
def test_segments_of_both_have_one_width_that_holds_all_tokens(m: int, size: int) -> None:
    for hidden, width in ((5120, 17408), (2048, 6144), (80, 144)):
        forms = choose_forms(
            Asked(shape=(2 * width, hidden), block_bytes=size),
            Asked(shape=(hidden, width), block_bytes=size),
            m,
            132,
        )
        assert forms.gate_up.tokens == forms.down.tokens >= m


@pytest.mark.parametrize(("m", "tokens"), [(33, 48), (48, 48), (49, 64), (64, 64)])
def test_beyond_segments_the_forms_are_those_of_the_linears(m: int, tokens: int) -> None:
    gate_up, down = _matrices("nvfp4", 80, 144)
    forms = choose_forms(Asked.of(gate_up), Asked.of(down), m, 132)
    assert forms.gate_up.tokens == forms.down.tokens == tokens
    for packed, op, form in ((gate_up, "linear_swiglu", forms.gate_up), (down, "linear_add", forms.down)):
        linear: Any = WgmmaLinear(packed, torch.bfloat16, op)
        assert isinstance(form, WgmmaForm)
        assert linear._by_tokens[m].multiply.grid == (form.fitted(*packed.shape).blocks, 1, 1)
        assert form.defines.items() <= dict(linear._by_tokens[m].multiply.function.defines).items()
