"""The list of ops."""

from __future__ import annotations

from importlib import import_module

import pytest

from vtensors.errors import RequestError
from vtensors_kernels.ops import OPS, Op, op


@pytest.mark.parametrize("listed", OPS, ids=lambda listed: listed.name)
def test_every_op_has_a_contract_and_a_reference_that_exists(listed: Op) -> None:
    module, _, function = listed.reference.partition(":")
    assert callable(getattr(import_module(module), function))
    assert listed.contract.endswith(".")


def test_decompositions_name_ops() -> None:
    names = {listed.name for listed in OPS}
    assert len(names) == len(OPS)
    assert all(set(listed.decomposition) <= names - {listed.name} for listed in OPS)


def test_an_unknown_op_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="unknown op 'matmul'") as caught:
        op("matmul")
    assert "linear" in str(caught.value)
    assert op("rope").name == "rope"
