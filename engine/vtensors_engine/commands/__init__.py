"""Subcommands of `vtensors` that run a model."""
