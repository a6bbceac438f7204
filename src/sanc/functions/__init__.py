"""Oracles of NumPy and torch functions that the caller passes with or without their derivatives."""
