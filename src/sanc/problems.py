"""Finite sums that `sanc.minimize` samples from."""

from sanc.sums.linear import FiniteSum
from sanc.sums.losses import Logistic, NonconvexSVM, Softmax

__all__ = ["FiniteSum", "Logistic", "NonconvexSVM", "Softmax"]
