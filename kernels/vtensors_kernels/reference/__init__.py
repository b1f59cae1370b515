"""One file per op: the plain-torch implementation that is its specification and runs on every device."""
