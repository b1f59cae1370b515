"""Grouped linears of a mixture of experts."""
