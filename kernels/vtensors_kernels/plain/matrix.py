"""One or several weights of 16 bits as one matrix on the device: the layout `plain-rows`."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats import PlainWeight
from vtensors_kernels.alignment import aligned
from vtensors_kernels.packed_matrix import bytes_of


@attrs.frozen(kw_only=True, eq=False)
class PlainMatrix:
    """y = x @ rows.T + bias.

    rows: [N, K] bfloat16 or float16, contiguous, aligned to 16 bytes. bias: [N] float32, or None.
    """

    rows: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.rows.shape[0], self.rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Of the rows and the bias."""
        return bytes_of(self.rows, self.bias)


def stack_rows(weights: Sequence[PlainWeight]) -> PlainMatrix:
    """The rows of the weights below one another; the stored tensor itself where there is one.

    weights: [N_i, K] of one dtype on one device; a bias either all have or none.
    Errors: RequestError for weights that do not go together.
    """
    tensors = [weight.tensor for weight in weights]
    first = tensors[0] if tensors else None
    if first is None or any(
        tensor.ndim != 2 or tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors
    ):
        seen = ", ".join(f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RequestError("parts of one matrix share dtype and device", seen=seen or "no weight")
    biases = [weight.bias for weight in weights if weight.bias is not None]
    if biases and len(biases) < len(weights):
        raise RequestError(
            "only some parts have a bias", seen=f"{len(biases)} of {len(weights)}", accepted="all or none"
        )
    return PlainMatrix(
        rows=aligned(first if len(tensors) == 1 else torch.cat(tensors), 16),
        bias=torch.cat([bias.float() for bias in biases]) if biases else None,
    )
