"""What the linear benchmark measures and is held to: shapes, rows M, goals, and how they are read from a record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

# Row of a record: shape, n, k, m, impl, kernel, us, ... as `linear.py` writes it.
Row = Mapping[str, Any]

# N x K of the fused matrices of Qwen3.5-27B, then of Qwen3.5-35B-A3B.
SHAPES_27B = {
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "in_qkvz": (16384, 5120),
    "attn_qkv": (14336, 5120),
    "o_out": (5120, 6144),
    "lm_head": (248320, 5120),
}
SHAPES_35B = {
    "35b_12288x2048": (12288, 2048),
    "35b_2048x4096": (2048, 4096),
    "35b_1024x2048": (1024, 2048),
    "35b_2048x512": (2048, 512),
}
SHAPES = {**SHAPES_27B, **SHAPES_35B}
# Unquantized ones, where a launch costs more than the bytes: of the 27B, then of the 35B. Measured when asked for.
SHAPES_SMALL = {"in_proj_ba": (96, 5120), "router": (257, 2048), "shared_gate": (1, 2048)}
TOKENS = (1, 2, 4, 8, 16, 32, 64)

OURS, OURS_APART = "vtensors", "vtensors_no_pdl"
MARLIN, MARLIN_SCALED = "marlin_nvfp4", "marlin_nvfp4_published"
# Ours on FP8 and MXFP8 weights of the same shape; peers: MARLIN_FP8, and SCALED_MM on quantized activations.
OURS_FP8, OURS_FP8_BLOCK, OURS_MXFP8 = "vtensors_fp8", "vtensors_fp8_block", "vtensors_mxfp8"
# Ours on FP8 weights with FP8 activations, quantizing them included: a stored scale; one per token, and per row of the
# weight; a stored scale by the kernels that multiply in 16 bits.
OURS_W8A8, OURS_W8A8_TOKEN = "vtensors_fp8_w8a8", "vtensors_fp8_w8a8_token"
OURS_W8A8_EMULATED = "vtensors_fp8_w8a8_emulated"
W8A8 = (OURS_W8A8, OURS_W8A8_TOKEN, OURS_W8A8_EMULATED)
OURS_BF16 = "vtensors_bf16"
CUBLAS, SCALED_MM, MARLIN_FP8 = "cublas_bf16", "scaled_mm_fp8", "marlin_fp8"


def size_of(shape: str) -> tuple[int, int]:
    """(N, K) of a shape's name. Raises KeyError for another."""
    return SHAPES[shape] if shape in SHAPES else SHAPES_SMALL[shape]


# M -> geometric mean over the 27B's shapes of Marlin's time over ours, and the least for any shape.
WANTED_RATIOS = {
    1: (1.5, 1.2),
    2: (1.5, 1.2),
    4: (1.5, 1.2),
    8: (1.4, 1.15),
    16: (1.2, 1.05),
    32: (1.15, 1.0),
    64: (1.15, 1.0),
}
# Shape -> floor over time at M = 1.
WANTED_SHARES = {
    "gate_up": 0.85,
    "in_qkvz": 0.85,
    "attn_qkv": 0.85,
    "lm_head": 0.90,
    "down": 0.76,
    "o_out": 0.76,
}
STRETCH_SHARE, STRETCH_BYTES, STRETCH_TOKENS = 0.90, 45e6, (1, 2, 4)
STRETCH_RATIO = {64: 1.3}
# Of FP8 weights with 16-bit activations: rows M and the goals of `fp8_goals`.
FP8_FLOOR_TOKENS, FP8_W8A8_TOKENS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
WANTED_FP8_SHARE, WANTED_FP8_RATIO, WANTED_W8A8_RATIO = 0.85, 1.15, 1.0


@attrs.frozen(kw_only=True)
class Goal:
    """One goal. wanted: least value. got: measured, None = not measured. stretch: beyond what is asked."""

    what: str
    wanted: float
    got: float | None
    where: str = ""
    share: bool = False
    stretch: bool = False

    @property
    def verdict(self) -> str:
        """`met`, `missed` or `not measured`."""
        if self.got is None:
            return "not measured"
        return "met" if self.got >= self.wanted else "missed"

    def told(self, value: float | None) -> str:
        """A value as the goal counts: a percentage of the floor or a ratio."""
        if value is None:
            return "-"
        return f"{value * 100:.1f} %" if self.share else f"{value:.2f}x"


def nvfp4_bytes(n: int, k: int) -> int:
    """Bytes of codes and block scales."""
    return n * k // 2 + n * k // 16


def find(rows: Iterable[Row], shape: str, m: int, impl: str) -> Row | None:
    """The row of that implementation, or None."""
    return next((r for r in rows if (r["shape"], r["m"], r["impl"]) == (shape, m, impl)), None)


def marlin_row(rows: Sequence[Row], shape: str, m: int) -> Row | None:
    """Marlin as measured, else its published time scaled, else None."""
    return find(rows, shape, m, MARLIN) or find(rows, shape, m, MARLIN_SCALED)


def ratio(rows: Sequence[Row], shape: str, m: int, impl: str = OURS) -> float | None:
    """Marlin's time over that of the implementation, or None where one of them is missing."""
    mine, marlin = find(rows, shape, m, impl), marlin_row(rows, shape, m)
    return None if mine is None or marlin is None else float(marlin["us"]) / float(mine["us"])


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Every goal with what the rows say of it. A mean needs all six shapes, a worst one at least one."""
    found: list[Goal] = []
    for m, (mean, least) in WANTED_RATIOS.items():
        ratios = {shape: r for shape in SHAPES_27B if (r := ratio(rows, shape, m)) is not None}
        whole = geometric_mean(list(ratios.values())) if len(ratios) == len(SHAPES_27B) else None
        found.append(Goal(what=f"M = {m}: geometric mean against Marlin", wanted=mean, got=whole))
        worst = min(ratios, key=lambda shape: ratios[shape]) if ratios else None
        found.append(
            Goal(
                what=f"M = {m}: worst shape against Marlin",
                wanted=least,
                got=None if worst is None else ratios[worst],
                where=worst or "",
            )
        )
        if m in STRETCH_RATIO:
            what = f"M = {m}: geometric mean against Marlin"
            found.append(Goal(what=what, wanted=STRETCH_RATIO[m], got=whole, stretch=True))
    for shape, wanted in WANTED_SHARES.items():
        what = f"M = 1: {shape}, share of the floor"
        found.append(Goal(what=what, wanted=wanted, got=_share(rows, shape, 1), share=True))
    for shape, (n, k) in SHAPES_27B.items():
        if nvfp4_bytes(n, k) > STRETCH_BYTES:
            for m in STRETCH_TOKENS:
                what = f"M = {m}: {shape}, share of the floor"
                got = _share(rows, shape, m)
                found.append(Goal(what=what, wanted=STRETCH_SHARE, got=got, share=True, stretch=True))
    return found


def fp8_goals(rows: Sequence[Row]) -> list[Goal]:
    """The goals of FP8 weights with 16-bit activations; none where nothing of them was measured.

    Against FP8 activations whichever of W8A8 is fastest counts, quantizing included.
    """
    mine = {(r["shape"], r["m"]): float(r["us"]) for r in rows if r["impl"] == OURS_FP8}
    if not mine:
        return []
    found = []
    for m in FP8_FLOOR_TOKENS:
        large = [r for r in rows if r["impl"] == OURS_FP8 and r["m"] == m and r["bytes"] >= STRETCH_BYTES]
        shares = [float(r["share_of_floor"]) for r in large]
        mean = geometric_mean(shares) if shares else None
        what = f"FP8, M = {m}: geometric mean share of the floor, weights of 45 MB and more"
        found.append(Goal(what=what, wanted=WANTED_FP8_SHARE, got=mean, share=True))
    for what, wanted, impls, tokens in (
        ("against Marlin FP8", WANTED_FP8_RATIO, (MARLIN_FP8,), FP8_FLOOR_TOKENS),
        ("against W8A8 with its quantizer", WANTED_W8A8_RATIO, W8A8, FP8_W8A8_TOKENS),
    ):
        ratios = {
            (shape, m): min(float(r["us"]) for r in theirs) / us
            for (shape, m), us in mine.items()
            if m in tokens
            and (theirs := [r for r in rows if (r["shape"], r["m"]) == (shape, m) and r["impl"] in impls])
        }
        worst = min(ratios, key=lambda at: ratios[at]) if ratios else None
        where = "" if worst is None else f"{worst[0]}, M = {worst[1]}"
        got = None if worst is None else ratios[worst]
        said = f"FP8, M <= {max(tokens)}: worst shape {what}"
        found.append(Goal(what=said, wanted=wanted, got=got, where=where))
    return found


def _share(rows: Sequence[Row], shape: str, m: int) -> float | None:
    row = find(rows, shape, m, OURS)
    return None if row is None or row["share_of_floor"] is None else float(row["share_of_floor"])
