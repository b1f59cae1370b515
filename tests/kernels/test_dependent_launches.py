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


# What experts_down_* and experts_finish read early (experts_early_ptx.cuh), and the kernel that each of them follows.
FOLLOWED = "common/experts_linear_nvfp4.cu", "common/experts_linear_fp8.cu"


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_kernel_whose_dependents_read_early_launches_them_after_its_own_wait(name: str) -> None:
    text = load_source(name).text
    waits, launches = (
        [at.start() for at in re.finditer(re.escape(call), text)]
        for call in ("wait_for_predecessors();", "launch_dependents();")
    )
    assert len(launches) == 1
    assert waits[0] < launches[0] < waits[0] + 100


def test_what_its_predecessor_writes_is_not_read_early() -> None:
    text = load_source("common/experts_down_nvfp4.cu").text
    early = set(re.findall(r"load_early\((\w+)", text))
    assert early == {"const", "chosen", "weights", "gate", "shared", "residual"}
    kernel = text[text.index("__global__") :]
    copies = [at.start() for at in re.finditer(r"\bact \+", kernel)]
    assert copies
    assert kernel.index("wait_for_predecessors();") < min(copies)


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_whole_choice_is_read_behind_the_wait_and_from_the_first_level_cache(name: str) -> None:
    # Every warp of a grid reads it: asked for past that cache, its lines have as much to do as all the weights.
    text = load_source(name).text
    found = text[text.index("Item found_item(") : text.index("extern")]
    assert "chosen[" in found
    assert "load_early" not in found
    assert "early = index >= bound || (VT_EPILOGUE == 1 && (grouped != nullptr || m == 1));" in text


HINTED = [name for name in DEPENDENT if "prefetch_bulk(" in load_source(name).text.split("__global__")[-1]]


def test_hints_before_the_wait_leave_no_old_number_in_the_first_level_cache() -> None:
    assert HINTED == ["common/gated_delta_decode.cu"]
    for name in HINTED:
        kernel = load_source(name).text.split("__global__")[-1]
        before = kernel[kernel.index("{") : kernel.index("wait_for_predecessors();")]
        assert set(re.findall(r"(\w+)\((?:slots|positions|pages) \+", before)) == {"load_hint"}
        assert not re.findall(r"\b(?:slots|positions|pages)\[", before)


@pytest.mark.parametrize("name", DEPENDENT)
def test_no_block_leaves_or_writes_before_it_has_waited(name: str) -> None:
    # Kernels wait for the one before them alone: what came before that is complete only if it has waited itself.
    kernel = load_source(name).text.split("__global__")[-1]
    before = kernel[kernel.index("\n{") : kernel.index("wait_for_predecessors();")]
    assert "return;" not in before
    assert not re.findall(
        r"\b(?:out|y|keys|nodes|partials|counters|grouped|history|k_pages|parts)\[[^]]*\] =", before
    )
    if name in FOLLOWED:
        leaving = kernel[: kernel.index("return;")]
        assert leaving.rindex("if (early) wait_for_predecessors();") > leaving.rindex(
            "item.expert >= experts"
        )
