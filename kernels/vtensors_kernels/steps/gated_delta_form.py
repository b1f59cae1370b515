"""The gated delta net kernels: what each is compiled with, its grid, and its arguments in order. Torch-free."""

from __future__ import annotations

import attrs

from vtensors.errors import RequestError
from vtensors_kernels.compiling.instantiations import Instantiation

# As in the sources: threads, tokens or warps of a block.
_PREPARE_THREADS, _PREPARE_TILE, _NORM_WARPS = 256, 8, 8
_DECODE_COLUMNS, _DECODE_SPAN = 4, 128
# Columns of the state of a lane and of a block while a prompt is read.
PREFILL_COLUMNS, PREFILL_SPAN = 1, 32


@attrs.frozen(kw_only=True)
class FormLaunch:
    """One launch. source, function, defines: as `Instantiation`. grid and block: three numbers each."""

    source: str
    function: str
    defines: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@attrs.frozen(kw_only=True)
class GatedDeltaForm:
    """A gated delta net as its kernels are compiled for it.

    columns, span: columns of the state of a lane (1, 2 or 4) and of a block (16, 32, 64 or 128, a divisor of DV)
    in `prefill`; they change no bit of a result. Errors: RequestError for what the kernels do not have.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    f16: bool
    columns: int = PREFILL_COLUMNS
    span: int = attrs.field()

    @span.default
    def _span(self) -> int:
        return PREFILL_SPAN if self.value_dim % PREFILL_SPAN == 0 else 16

    def __attrs_post_init__(self) -> None:
        seen = (
            f"{self.key_heads} and {self.value_heads} heads of {self.key_dim} and {self.value_dim}, "
            f"{self.taps} taps"
        )
        sizes = all(size % 16 == 0 and 16 <= size <= 256 for size in (self.key_dim, self.value_dim))
        whole = self.key_heads > 0 and self.value_heads > 0 and self.value_heads % self.key_heads == 0
        if not (sizes and whole and 2 <= self.taps <= 8):
            raise RequestError(
                "there is no gated delta net kernel for this shape",
                seen=seen,
                accepted="head sizes that are multiples of 16 up to 256, value heads a multiple of the key heads, "
                "2 to 8 taps",
            )

    @property
    def channels(self) -> int:
        """C, the channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """HV * DV, the width of z and of the output."""
        return self.value_heads * self.value_dim

    def decode(self, rows: int) -> FormLaunch:
        """One token of each of so many sequences."""
        threads = self._sharers * min(self.value_dim, _DECODE_SPAN) // _DECODE_COLUMNS
        return self._launch("decode", (self.value_heads, rows), threads, with_keys=True, with_taps=True)

    def prepare(self, tokens: int) -> FormLaunch:
        """The convolution of so many tokens of one sequence."""
        units = self.key_heads + -(-self.value_width // _PREPARE_THREADS)
        grid = units, -(-tokens // _PREPARE_TILE)
        return self._launch("prepare", grid, _PREPARE_THREADS, with_keys=True, with_taps=True)

    def prefill(self) -> FormLaunch:
        """The delta rule over any number of tokens of one sequence."""
        launch = self._launch(
            "prefill",
            (self.value_width // self.span, 1),
            self._sharers * self.span // self.columns,
            with_keys=True,
            with_taps=False,
        )
        more = (("VT_COLUMNS", self.columns), ("VT_SPAN", self.span))
        return attrs.evolve(launch, defines=tuple(sorted(launch.defines + more)))

    def norm(self, tokens: int) -> FormLaunch:
        """The gated norm of so many tokens."""
        blocks = -(-tokens * self.value_heads // _NORM_WARPS)
        return self._launch("norm", (blocks, 1), 32 * _NORM_WARPS, with_keys=False, with_taps=False)

    @property
    def instantiations(self) -> tuple[Instantiation, ...]:
        """What is compiled for it."""
        return tuple(
            Instantiation(source=one.source, function=one.function, defines=dict(one.defines), hot=True)
            for one in (self.decode(1), self.prepare(1), self.prefill(), self.norm(1))
        )

    @property
    def _sharers(self) -> int:
        """Lanes that share a column of the state, as gated_delta_state.cuh has it."""
        return 16 if self.key_dim > 128 else 8

    def _launch(
        self, name: str, grid: tuple[int, int], threads: int, *, with_keys: bool, with_taps: bool
    ) -> FormLaunch:
        defines = {"VT_F16": int(self.f16), "VT_VALUE_DIM": self.value_dim}
        if with_keys:
            defines["VT_KEY_DIM"] = self.key_dim
        if with_taps:
            defines["VT_TAPS"] = self.taps
        return FormLaunch(
            source=f"common/gated_delta_{name}.cu",
            function=f"gated_delta_{name}",
            defines=tuple(sorted(defines.items())),
            grid=(*grid, 1),
            block=(threads, 1, 1),
        )
