"""Checkpoint conventions: each module is one plugin that knows how one publisher spells a weight on disk."""
