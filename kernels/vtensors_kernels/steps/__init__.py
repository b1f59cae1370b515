"""Kernels of a decode step besides the linears."""
