"""Decoders on a CUDA device: paged KV cache, delta net slots, batched decode steps replayed as CUDA graphs."""
