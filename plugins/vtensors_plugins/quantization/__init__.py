"""What to quantize, how, and under which scheme: recipes."""
