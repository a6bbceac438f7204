"""Finite sums that `sanc.minimize` samples from."""

from sanc.sums.linear import FiniteSum, Logistic, NonconvexSVM, Softmax

__all__ = ["FiniteSum", "Logistic", "NonconvexSVM", "Softmax"]
