"""The canonical Weight: codes and scales as stored, and the exact reference dequantization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from vtensors.errors import RequestError
from vtensors_formats.activations import ActivationQuantizer
from vtensors_formats.values import require_positive, tensor_name

BLOCK_BYTES = 64 << 20


@attrs.frozen(kw_only=True, eq=False)
class Weight(ABC):
    """A weight matrix [N, K] in one scheme, whoever wrote it; out = in @ W^T + bias.

    bias: [N] float, or None.
    pre_scale: [K] float, or None. Multiplies the activation before it is quantized or used (AWQ); it is no
    part of `dequantize`, as in nvidia-modelopt 0.47 (nn/modules/tensor_quantizer.py, `pre_quant_scale`).
    activation: the quantizer that the checkpoint declares for this weight's input; None = 16-bit activations.
    """

    bias: Tensor | None = None
    pre_scale: Tensor | None = None
    activation: ActivationQuantizer | None = None

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The scheme's name, for example `nvfp4`."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Logical shape: (N, K), or the tensor's own shape for a plain tensor of another rank."""

    @abstractmethod
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that make up the matrix, codes first, then scales; without bias and pre_scale."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop as a view: no copy; per-row and per-block scales, bias and shape are cut to fit.

        Raises RequestError unless 0 <= start <= stop <= N.
        """

    @abstractmethod
    def dequantize_float32(self) -> Tensor:
        """float32 [N, K] in one piece, bit for bit what the publisher's own dequantization gives."""

    @abstractmethod
    def check_codes_and_scales(self, names: Mapping[str, str]) -> None:
        """The part of `check_values` that a scheme must bring."""

    @property
    def nbytes(self) -> int:
        """Stored bytes of codes and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored())

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.stored()[0].device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in dtype: computed in float32 exactly as the publisher does, then rounded once.

        Another dtype than float32 is filled in row blocks, so that at most 64 MiB of float32 exist at a time.
        """
        if dtype == torch.float32 or prod(self.shape) * 4 <= BLOCK_BYTES:
            return self.dequantize_float32().to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for start, stop, block in self.dequantize_blocks(BLOCK_BYTES, dtype):
            out[start:stop] = block
        return out

    def dequantize_blocks(
        self, max_bytes: int = BLOCK_BYTES, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yields (start, stop, rows start..stop in dtype): at most max_bytes as float32, at least one row."""
        row_bytes = 4 * max(1, prod(self.shape[1:]))
        step = max(1, max_bytes // row_bytes)
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            yield start, stop, self.rows(start, stop).dequantize_float32().to(dtype)

    def to(self, device: torch.device | str) -> Self:
        """The same weight with every tensor on device; nothing is copied that is there already."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in attrs.fields(type(self))
            if isinstance(value := getattr(self, field.name), Tensor | ActivationQuantizer)
        }
        return attrs.evolve(self, **moved)

    def check_values(self, names: Mapping[str, str]) -> None:
        """Raises WeightValueError, naming tensor, first index and value, if codes or scales hold what no
        writer means.

        names: role -> the checkpoint's tensor name, for messages; roles are `codes`, `block_scale`,
        `global_scale`, `scale`, `input_scale`, `pre_scale`.
        """
        self.check_codes_and_scales(names)
        if self.pre_scale is not None:
            tensor = tensor_name(names, "pre_scale")
            require_positive(self.pre_scale, tensor=tensor, what="activation pre-scale")
        if self.activation is not None:
            self.activation.check_values(names)

    def check_rows(self, start: int, stop: int) -> None:
        """Raises RequestError unless 0 <= start <= stop <= N."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise RequestError(
                "rows outside the weight",
                seen=f"{start}..{stop}",
                accepted=f"0 <= start <= stop <= {self.shape[0]}",
            )


def cut_rows(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Rows start..stop of a per-row tensor ([N] or [N, 1]); None and scalars pass."""
    return tensor if tensor is None or tensor.ndim == 0 else tensor[start:stop]
