"""The scripts of benchmarks/ import one another as `python benchmarks/linear.py` finds them."""

from __future__ import annotations

import sys

from project.source_tree import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
