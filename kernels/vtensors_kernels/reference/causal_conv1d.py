"""Depthwise causal convolution with carried history, followed by silu."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """y [T, C] in x's dtype and the new history [W - 1, C].

    x: [T, C], the raw inputs. weight: [C, W] float32; weight[:, W - 1] multiplies the newest input.
    history: [W - 1, C] in x's dtype, the raw inputs before x, oldest first; zeros before the first token.
    float32 inside, rounded once behind the silu.
    """
    tokens, taps = x.shape[0], weight.shape[1]
    padded = torch.cat((history, x))
    wide = padded.to(torch.float32)
    out = wide[:tokens] * weight[:, 0]
    for tap in range(1, taps):
        out = out.addcmul_(wide[tap : tap + tokens], weight[:, tap])
    # A copy, so that the history does not keep the whole prompt alive.
    return F.silu(out).to(x.dtype), padded[tokens:].clone()
