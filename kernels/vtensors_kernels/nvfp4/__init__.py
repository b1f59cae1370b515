"""NVFP4 linears on CUDA devices: the packed layout, its kernels and their launchers."""
