"""Norm weights that a converter has already shifted by one, in families whose gain is 1 + weight."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from vtensors.checkpoint import Checkpoint
from vtensors.verification.findings import Finding, finding
from vtensors_plugins.verification.small_values import SmallValues

# Families of transformers 5.24 whose RMSNorm multiplies by (1.0 + weight): models/qwen3_5, qwen3_next, gemma*.
ZERO_CENTERED = ("qwen3_5", "qwen3_next", "gemma")
# Gated norms of the delta net multiply by the weight itself.
_PLAIN = ("linear_attn.norm",)
_NEAR_ONE = (0.5, 1.5)


def norm_means(checkpoint: Checkpoint, small: SmallValues) -> dict[str, float]:
    """Tensor -> mean of every zero-centered norm's weight; empty for a family with plain norms."""
    text = checkpoint.configs.text.get("model_type") or checkpoint.config.get("model_type")
    if not str(text).startswith(ZERO_CENTERED):
        return {}
    means = {}
    for name, module in checkpoint.modules.items():
        is_norm = "norm" in name.rpartition(".")[2] and len(module.shape) == 1
        if not is_norm or name.endswith(_PLAIN) or name in checkpoint.accounting.waived_modules:
            continue
        codes = module.claim.roles["codes"]
        values = small.of(codes)
        if values:
            means[codes.name] = fmean(values)
    return means


def norm_findings(checkpoint: Checkpoint, small: SmallValues) -> Iterator[Finding]:
    """`shifted-norm` for each norm whose mean is near 1, where that holds of most of them.

    One trained gain of 2 is no sign; that the middle of all means is near 1 is.
    """
    means = norm_means(checkpoint, small)
    if not means or not _is_near_one(median(means.values())):
        return
    for name, mean in means.items():
        if _is_near_one(mean):
            yield finding("shifted-norm", name, seen=f"mean {mean:.4g}")


def _is_near_one(value: float) -> bool:
    return _NEAR_ONE[0] <= value <= _NEAR_ONE[1]
