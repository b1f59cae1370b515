"""The built-in scheme records, and that they can be read without torch."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import vtensors_formats
from vtensors_formats.schemes import BUILTIN_SCHEMES


def test_every_scheme_of_the_contract_is_there_with_a_weight_class() -> None:
    names = [scheme.name for scheme in BUILTIN_SCHEMES]
    assert names == ["nvfp4", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8", "bf16", "f16", "f32"]
    for scheme in BUILTIN_SCHEMES:
        module, _, name = scheme.weight_class.partition(":")
        assert issubclass(getattr(import_module(module), name), vtensors_formats.Weight)


def test_schemes_are_listed_without_importing_torch() -> None:
    code = "import sys, vtensors_formats.schemes; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_every_public_name_resolves() -> None:
    for name in vtensors_formats.__all__:
        assert getattr(vtensors_formats, name) is not None
