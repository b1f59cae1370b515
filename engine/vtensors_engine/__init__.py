"""Runs models: text, sampling, the step loop, the `LLM` class and the `generate` command."""
