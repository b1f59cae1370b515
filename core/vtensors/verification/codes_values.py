"""Codes about values: codes and scales, norms, fused parts, and the comparison with a reference."""

from __future__ import annotations

from vtensors.verification.code import ERROR, WARNING, Code, rows
from vtensors.verification.codes_structure import EXPORT

_VALUES = rows(
    ERROR,
    ("nan-code", "FP8 codes that are NaN", "finite E4M3 codes", EXPORT),
    ("not-finite", "NaN or infinity in an unquantized tensor", "finite values", EXPORT),
    ("scale-not-finite", "a scale that is NaN or infinite", "finite and above zero", EXPORT),
    ("scale-negative", "a scale below zero", "finite and above zero", EXPORT),
    (
        "scale-out-of-range",
        "a scale that makes weights infinite in float32",
        "weights below 3.4e38",
        EXPORT,
    ),
    (
        "scale-zero",
        "a scale of zero over codes that are not zero",
        "above zero; zero over zero codes only",
        EXPORT,
    ),
    (
        "zero-point",
        "a zero point that is not zero",
        "zero points of 0: asymmetric schemes are not supported",
        "quantize the model symmetrically",
    ),
    ("kv-scale-infinite", "a KV-cache scale is infinite", "finite and above zero", EXPORT),
    ("bad-values", "a plugin's own check refuses the values of a weight", "what the message says", EXPORT),
)
_VALUE_DOUBTS = rows(
    WARNING,
    (
        "kv-scale-sentinel",
        "a KV-cache scale of zero or less, or NaN: never filled",
        "finite and above zero",
        "export the cache's scales again; until then 1.0 is used",
    ),
    (
        "kv-scale-shape",
        "a KV-cache scale with more than one value",
        "one value per layer",
        "per-head scales are not supported: keep the cache in 16 bits",
    ),
    (
        "shifted-norm",
        "norm weights near 1 in a family that adds 1 itself",
        "weights near 0 (gain = 1 + weight)",
        "subtract 1: a converter has added it already",
    ),
    (
        "reciprocal-scale",
        "the size of a scale smells of its reciprocal",
        "a multiplier well below 1, a divisor well above 1",
        "compare the weight with its source (--against); store 1/x if it is inverted",
    ),
    (
        "fused-scales-differ",
        "parts that engines fuse (q|k|v, gate|up, qkv|z) have different weight scales",
        "one scale, or an engine that keeps each",
        "an engine that takes the largest scales the others wrongly; vtensors keeps each part's own",
    ),
    (
        "fused-input-scales-differ",
        "parts that share their input have different input scales",
        "one input scale",
        "an engine that fuses them quantizes the input with one of them; vtensors keeps each part's own",
    ),
    (
        "never-calibrated",
        "a scale is exactly 1.0, the writers' default where nothing was seen",
        "a calibrated scale",
        "calibrate with data that reaches the module",
    ),
    (
        "tied-but-different",
        "the embeddings are declared tied, yet a different head is stored",
        "the same values, or tie_word_embeddings false",
        "set tie_word_embeddings to false if the stored head is meant, else remove it",
    ),
    (
        "all-zero",
        "a weight matrix of nothing but zeros",
        "weights",
        "if it is not meant, the file has a hole: download it again",
    ),
    (
        "unknown-hash",
        "nothing says which hash the file should have (--hash)",
        "a file of a Hub cache",
        "compare it with the Hub by other means",
    ),
)
_AGAINST_ERRORS = rows(
    ERROR,
    (
        "different-weight",
        "the weight is not the reference's (--against)",
        "a cosine above 0.95",
        "a scale, an order of codes or the whole tensor is wrong: " + EXPORT,
    ),
    (
        "shape-differs",
        "a weight has another shape than the reference's (--against)",
        "one shape",
        "compare checkpoints of one model",
    ),
    (
        "missing-here",
        "the reference has a weight that this checkpoint lacks (--against)",
        "every weight of the reference",
        "fetch the whole checkpoint",
    ),
)
_AGAINST_WARNINGS = rows(
    WARNING,
    (
        "worse-than-scheme",
        "the error is larger than rounding to nearest in this scheme gives (--against)",
        "within 3 dB of rounding to nearest",
        "quantize again with weight scales of this tensor's own",
    ),
    (
        "plain-differs",
        "an unquantized weight is not the reference's (--against)",
        "the reference's values",
        "expected where a scale was folded into it (AWQ, SmoothQuant); else export again",
    ),
    (
        "missing-there",
        "the reference lacks a weight that this checkpoint has (--against)",
        "the same weights",
        "nothing, if the reference was saved without it",
    ),
)

VALUE_CODES: tuple[Code, ...] = (*_VALUES, *_VALUE_DOUBTS, *_AGAINST_ERRORS, *_AGAINST_WARNINGS)
