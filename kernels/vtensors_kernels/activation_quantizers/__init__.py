"""Activation quantizers on CUDA devices: x in 16 bits -> codes and scales, bit for bit those of `vtensors_formats`."""
