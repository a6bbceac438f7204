"""Many independent problems at once: the rules of `minimize`, for all rows of a batch together."""

from sanc.many.minimizing import minimize_many
from sanc.many.result import ManyResult, Minimum

__all__ = ["ManyResult", "Minimum", "minimize_many"]
