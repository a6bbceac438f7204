"""Finite sums that `sanc.minimize` minimises, with or without sampling."""

from sanc.sums.linear import FiniteSum, LinearSum
from sanc.sums.losses import Logistic, NonconvexSVM, Softmax

__all__ = ["FiniteSum", "LinearSum", "Logistic", "NonconvexSVM", "Softmax"]
