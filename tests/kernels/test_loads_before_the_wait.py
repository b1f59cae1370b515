"""Weights that kernels ask for while the kernels before them still run: compilers must leave those loads in front."""

from __future__ import annotations

import pytest

from vtensors_kernels.compiling.instantiations import Instantiation
from vtensors_kernels.compiling.machine_code import find_disassembler, read_machine_code
from vtensors_kernels.compiling.nvrtc import find_toolkit
from vtensors_kernels.plain import small
from vtensors_kernels.steps import norm_router

TARGET = "sm_90a"
FORMS = [form for form in (*small.INSTANTIATIONS, *norm_router.INSTANTIATIONS) if TARGET in form.targets]
# Loads of weights past the first-level cache, and griddepcontrol.wait.
LOAD, WAIT = "LDG.E.NA.", "ACQBULK"


@pytest.mark.parametrize("form", FORMS, ids=[form.label for form in FORMS])
def test_the_first_weights_are_asked_for_before_the_wait(form: Instantiation) -> None:
    toolkit, disassembler = find_toolkit(), find_disassembler()
    if isinstance(toolkit, str) or isinstance(disassembler, str):
        pytest.skip(toolkit if isinstance(toolkit, str) else str(disassembler))
    # Opcodes come in the order in which they first stand in the code.
    opcodes = list(read_machine_code(form.compile(TARGET, toolkit), disassembler)[form.function].opcodes)
    first = next(place for place, opcode in enumerate(opcodes) if opcode.startswith(LOAD))
    assert first < opcodes.index(WAIT)
