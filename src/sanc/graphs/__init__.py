"""CUDA graphs of oracle calls; only the optimiser imports it. Decisions stay with the one judge on the host."""
