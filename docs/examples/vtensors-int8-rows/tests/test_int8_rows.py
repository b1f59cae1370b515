import torch
import vtensors
from int8_checkpoint import write_checkpoint
from vtensors_int8_rows import CONVENTION, SCHEME
from vtensors_int8_rows.weight import Int8RowWeight


class TestInt8Rows(vtensors.testing.ConventionConformance):
    convention = CONVENTION

    def example(self, folder):
        return vtensors.testing.Example(directory=folder, expected=write_checkpoint(folder))


class TestInt8Row(vtensors.testing.SchemeConformance):
    scheme = SCHEME

    def weights(self):
        codes = torch.arange(-128, 127, dtype=torch.int8).reshape(17, 15)
        scale = torch.arange(1, 18, dtype=torch.float32).reshape(17, 1) / 8
        weight = Int8RowWeight(codes=codes, scale=scale)
        return [vtensors.testing.WeightExample(weight=weight, expected=codes.to(torch.float32) * scale)]

    def damaged(self):
        codes = torch.ones(2, 2, dtype=torch.int8)
        scales = ([[1.0], [float("nan")]], [[-1.0], [1.0]], [[float("inf")], [1.0]])
        return [Int8RowWeight(codes=codes, scale=torch.tensor(scale)) for scale in scales]
