"""Linears over weights of 16 bits as they are stored, on CUDA devices."""
