import torch
import vtensors
from int8_checkpoint import LINEAR, write_checkpoint
from vtensors_int8_rows.kernel import KERNEL
from vtensors_int8_rows.weight import Int8RowWeight


class TestLinearInt8Rows(vtensors.testing.KernelConformance):
    kernel = KERNEL

    def examples(self):
        codes = torch.arange(-127, 128, dtype=torch.int8).reshape(17, 15)
        weight = Int8RowWeight(codes=codes, scale=torch.arange(1, 18, dtype=torch.float32).reshape(17, 1) / 8)
        return [vtensors.testing.KernelExample(weights=(weight,))]


def test_every_int8_layer_of_a_model_gets_the_kernel_and_logits_are_the_references(tmp_path, monkeypatch):
    write_checkpoint(tmp_path)
    ids = torch.arange(8)[None]
    model = vtensors.load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert [record.kernel for record in model.selected].count("linear_int8_rows") == len(LINEAR)
    monkeypatch.setenv("VT_KERNELS", "int8-row:linear_reference")
    plain = vtensors.load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert "linear_int8_rows" not in {record.kernel for record in plain.selected}
    torch.testing.assert_close(model.logits(ids), plain.logits(ids), rtol=1e-4, atol=1e-4)
