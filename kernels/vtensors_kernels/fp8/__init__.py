"""FP8 and MXFP8 linears with 16-bit activations on CUDA devices: the packed layout, its kernels and launchers."""
