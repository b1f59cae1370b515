"""A kernel's record is refused at registration where selection could not rely on it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from fake_plugins import candidate, module
from kernel_specs import kernel
from vtensors.manager import Plugins
from vtensors.record_checks import check_record

PACKED = kernel("k", layout="packed")
STORED = kernel("k")


def test_sound_records_have_no_problem() -> None:
    probed = kernel("k", probe=lambda request: None, fingerprint=lambda request: "")
    for record in (PACKED, STORED, probed, kernel("k", tokens=(33, 64), cost=lambda request: 1.0)):
        assert check_record(record) is None


@pytest.mark.parametrize(
    ("record", "change", "words"),
    [
        (PACKED, {"prepare": None}, "layout 'packed' and has no prepare"),
        (PACKED, {"prepare": "repack"}, "as prepare, not a function"),
        (STORED, {"prepare": lambda weights, request: None}, "although it reads the layout 'stored'"),
        (STORED, {"layout": ""}, "as layout, not a name"),
        (STORED, {"tokens": (0, 4)}, "1 <= fewest <= most"),
        (STORED, {"tokens": (8, 4)}, "1 <= fewest <= most"),
        (STORED, {"tokens": (True, None)}, "1 <= fewest <= most"),
        (STORED, {"tokens": (1, 4, 8)}, "1 <= fewest <= most"),
        (STORED, {"tokens": 32}, "1 <= fewest <= most"),
        (STORED, {"tokens": [1, None]}, "1 <= fewest <= most"),
        (STORED, {"numerics": 3}, "as numerics, not words"),
        (STORED, {"name": "linear,fast"}, "VT_KERNELS cannot spell"),
        (STORED, {"name": "!linear"}, "VT_KERNELS cannot spell"),
        (STORED, {"name": "linear_*"}, "VT_KERNELS cannot spell"),
        (STORED, {"name": "linear\nfast"}, "does not fit on a line"),
        (STORED, {"cost": -1.0}, "as cost"),
        (STORED, {"cost": float("nan")}, "as cost"),
        (STORED, {"cost": float("inf")}, "as cost"),
        (STORED, {"cost": True}, "as cost"),
        (STORED, {"cost": "cheap"}, "as cost"),
        (STORED, {"probe": lambda request: None}, "has a probe only"),
        (STORED, {"fingerprint": lambda request: ""}, "has a fingerprint only"),
        (STORED, {"probe": 1, "fingerprint": 2}, "as probe, not a function"),
        (STORED, {"targets": ("sm90a",)}, "has the target 'sm90a'"),
        (STORED, {"targets": ()}, "names no target"),
        (STORED, {"schemes": ()}, "names no scheme"),
        (STORED, {"op": ""}, "as op"),
        (STORED, {"bind": None}, "as bind, not a function"),
    ],
)
def test_a_field_that_selection_cannot_use_is_named(record: Any, change: dict[str, Any], words: str) -> None:
    problem = check_record(attrs.evolve(record, **change))
    assert problem is not None
    assert words in problem


def test_a_plugin_with_such_a_record_is_quarantined_with_the_kernels_name() -> None:
    broken = attrs.evolve(PACKED, name="linear_fast", prepare=None)
    plugin = module("fast", {"vtensors_kernels": lambda: [broken]})
    plugins = Plugins.discover(third_parties=[candidate("fast", plugin)], environ={})
    (status,) = plugins.quarantined
    assert "KernelSpec 'linear_fast' reads the layout 'packed' and has no prepare" in str(status.error)
    assert "linear_fast" not in plugins.registry.kernels
