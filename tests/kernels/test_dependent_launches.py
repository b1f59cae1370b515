"""Kernels that may start before their predecessor is done: what it writes is not read as if it never changed."""

from __future__ import annotations

import re

import pytest

from vtensors_kernels.compiling.sources import load_source, source_names

# Written once, before any launch that reads them; and what bulk copies alone read.
NEVER_CHANGE = {"blocks", "codes", "block_scale", "row_scale", "bias", "gain", "pre_scale", "global"} | {
    *("weight", "w"),  # plain ones
    *("conv", "norm", "rates", "biases"),  # of a delta net
}
BY_BULK_COPY = {"staged"}
DEPENDENT = [name for name in source_names() if "wait_for_predecessors();" in load_source(name).text]


def promised_constant(text: str) -> set[str]:
    """Parameters of the kernels in a CUDA source that are `const T* __restrict__`."""
    kernels = re.findall(r'extern "C" __global__.*?\n\{|extern "C" __global__.*?\) \{', text, re.DOTALL)
    found = re.findall(r"const [\w ]+\* __restrict__ (\w+)", "\n".join(kernels))
    return set(found)


def test_dependent_kernels_are_found() -> None:
    assert "common/linear_nvfp4_stored.cu" in DEPENDENT
    assert promised_constant(load_source("common/linear_nvfp4_stored.cu").text) == {
        "codes",
        "block_scale",
        "row_scale",
        "bias",
    }


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_an_earlier_kernel_writes_is_no_constant_of_a_dependent_one(name: str) -> None:
    # The compiler moves loads of such a constant above the wait: a race.
    assert promised_constant(load_source(name).text) <= NEVER_CHANGE | BY_BULK_COPY


def test_a_constant_that_changes_is_told() -> None:
    text = 'extern "C" __global__ void f(\n    const unsigned short* __restrict__ x,  // [M, K]\n    int n)\n{\n}'
    assert promised_constant(text) == {"x"}
