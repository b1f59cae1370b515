"""`python -m vtensors` is the `vtensors` program."""

from __future__ import annotations

import sys

from vtensors.cli import main

if __name__ == "__main__":
    sys.exit(main())
