"""CUDA graphs of oracle calls, for the optimiser's driver. The host makes all decisions, as in eager steps."""
