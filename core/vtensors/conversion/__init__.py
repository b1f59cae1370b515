"""Checkpoints rewritten: planned from headers, carried out tensor by tensor, named when whole."""

from __future__ import annotations

from vtensors.conversion.deciding import PLAIN_DTYPES, Target
from vtensors.conversion.planning import DEFAULT_SHARD_BYTES, ConversionPlan, plan_conversion
from vtensors.conversion.running import WrittenFile, run_plan
from vtensors.conversion.targets import parse_target
from vtensors.conversion.units import Assignment, Fate, Unit

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "PLAIN_DTYPES",
    "Assignment",
    "ConversionPlan",
    "Fate",
    "Target",
    "Unit",
    "WrittenFile",
    "parse_target",
    "plan_conversion",
    "run_plan",
]
