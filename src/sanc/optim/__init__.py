"""The optimisers of the family, for training with PyTorch."""

from sanc.optim.optimizers import ARC, CR, CRM, NCD, SANC, SCR, CubicOptimizer

__all__ = ["ARC", "CR", "CRM", "NCD", "SANC", "SCR", "CubicOptimizer"]
