"""Finite sums in closed form, dense or sparse, and their samples."""
