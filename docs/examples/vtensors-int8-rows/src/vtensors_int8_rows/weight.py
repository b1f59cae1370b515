"""The weight in memory: the codes and scales as stored, and what they mean."""

import attrs
import torch
from vtensors_formats import Weight
from vtensors_formats.values import require_positive, tensor_name


@attrs.frozen(kw_only=True, eq=False)
class Int8RowWeight(Weight):
    """W[n, k] = codes[n, k] * scale[n]. codes: [N, K] int8; scale: [N, 1] float32."""

    codes: torch.Tensor
    scale: torch.Tensor
    scheme = "int8-row"

    @property
    def shape(self):
        return tuple(self.codes.shape)

    def stored(self):
        return self.codes, self.scale

    def rows(self, start, stop):
        self.check_rows(start, stop)
        return attrs.evolve(self, codes=self.codes[start:stop], scale=self.scale[start:stop])

    def dequantize_float32(self):
        return self.codes.to(torch.float32) * self.scale

    def check_codes_and_scales(self, names):
        require_positive(self.scale, tensor=tensor_name(names, "scale"), what="row scale")
