"""Ops and the kernels that compute them: contracts in `ops`, their plain-torch spec in `reference`."""
