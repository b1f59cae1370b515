"""From CUDA source to a launchable function: NVRTC, our own cubin cache, launches with attributes."""
