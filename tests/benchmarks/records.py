"""A made-up record of the linear benchmark."""

from __future__ import annotations

from typing import Any

import linear_goals as goals


def row(shape: str, m: int, impl: str, us: float, **more: Any) -> dict[str, Any]:
    """A row with everything that the tables read; the floor is 10 µs."""
    n, k = goals.SHAPES[shape]
    return {
        "shape": shape,
        "n": n,
        "k": k,
        "m": m,
        "impl": impl,
        "kernel": "linear_x",
        "dependent_launch": True,
        "us": us,
        "spread": 0.01,
        "floor_us": 10.0,
        "share_of_floor": 10.0 / us,
        **more,
    }


def record(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A complete record of these rows."""
    return {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "toolkit": "NVRTC 13.0",
        "versions": {"torch": "2.11.0", "cupy": "14.2.0", "vtensors": "0.1.0", "marlin": "vllm 0.26.0"},
        "marlin_missing": None,
        "commit": "0123456789abcdef",
        "switches": {},
        "method": {"rotated_bytes": 400_000_000, "graph_us": 3000.0, "replays": 15},
        "complete": True,
        "seconds": 100.0,
        "read_peak": {"bytes": 4_294_967_296, "us": 920.0, "gb_s": 4668},
        "floors": [
            {
                "nbytes": 100_270_080,
                "us": 23.7,
                "how": "bulk",
                "loads_us": 24.4,
                "bulk_us": 23.7,
                "gb_s": 4231,
            },
        ],
        "rows": rows,
        "failures": [],
        **more,
    }
