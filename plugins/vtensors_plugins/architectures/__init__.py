"""Architectures: plugins that say what a model family expects of a checkpoint and build it."""
