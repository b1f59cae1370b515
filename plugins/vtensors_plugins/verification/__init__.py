"""Checks of a checkpoint's values, chunk by chunk, and the comparison with a reference: the half that needs torch."""
