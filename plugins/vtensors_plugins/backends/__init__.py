"""Backends: plugins that register kernels."""
