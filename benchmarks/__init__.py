"""Comparisons and measurements: run each as `python -m benchmarks.NAME` from the root of the repository."""
