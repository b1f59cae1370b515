"""What to quantise, how, and under which scheme: recipes."""
