"""A finite sum whose rows lie on several ranks: the same sum to all of them.

Rank 0 has the first rows, rank 1 those that follow, and so on. A sample is drawn from all rows, as a function of seed
and iteration, by every rank for itself; each evaluates those that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sanc.errors import ArgumentError, RanksError
from sanc.ranks.group import Ranks, digest
from sanc.sums.linear import Array, FiniteSum, LinearSum


class SharedSum(FiniteSum):
    """The mean over the components of all ranks.

    Parameters
    ----------
    problem : FiniteSum
        The components of this rank; of all ranks the same kind of sum, with the same penalty.
    """

    def __init__(self, problem: FiniteSum, ranks: Ranks) -> None:
        self.ranks, self._own = ranks, problem
        self.dim, self.dtype = problem.dim, problem.dtype
        weighted = False
        kind: dict[str, Any] = {"type": type(problem).__name__, "variables": problem.dim, "dtype": str(problem.dtype)}
        if isinstance(problem, LinearSum):
            weighted = problem.weights is not None
            kind |= vars(problem.penalty) | {"weights": weighted, "intercept": problem.intercept}
        remedy = "pass sums of the same loss, variables, type and penalty on all ranks, each with its own rows."
        ranks.compare(digest(kind).to(ranks.device), ("the kind of sum",), "the kinds of sums", remedy)
        if weighted:
            raise ArgumentError(
                "weights cannot be used with process_group: each rank has scaled its own to a mean of 1. Leave one out."
            )
        counts, _ = ranks.exchange([float(problem.n)], "the numbers of rows")
        rows = [int(row[0]) for row in counts]
        self.n, self._first, self._held = sum(rows), sum(rows[: ranks.rank]), problem.n

    def subset(self, rows: Array) -> FiniteSum:
        rows = np.asarray(rows)
        here = rows[(rows >= self._first) & (rows < self._first + self._held)] - self._first
        return _Part(self, self._own.subset(here) if here.size else None, len(rows), here.size)

    def _whole(self) -> _Part:
        return _Part(self, self._own, self.n, self._held)

    def value(self, w: Array) -> float:
        return self._whole().value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        return self._whole().value_and_gradient(w)

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        return self._whole().hessian(w)


class _Part(FiniteSum):
    """A sample of a shared sum; `own` are the components that this rank has of it, None where that is none."""

    def __init__(self, whole: SharedSum, own: FiniteSum | None, n: int, held: int) -> None:
        self._whole, self._own = whole, own
        self.n, self.dim, self.dtype = n, whole.dim, whole.dtype
        self._share = held / n

    def subset(self, rows: Array) -> FiniteSum:
        raise NotImplementedError("a sample of a sum on several ranks is not sampled again")

    def value(self, w: Array) -> float:
        return self._sum(lambda own: (own.value(w), None), "a value", vector=False)[0]

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        return self._sum(lambda own: own.value_and_gradient(w), "a gradient")

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        product = None if self._own is None else self._own.hessian(w)

        def times(v: Array) -> Array:
            def ask(own: FiniteSum) -> tuple[float, Array]:
                assert product is not None
                return 0.0, product(v)

            total: Array = self._sum(ask, "a Hessian product")[1]
            return total

        return times

    def _sum(
        self, ask: Callable[[FiniteSum], tuple[float, Any]], what: str, *, vector: bool = True
    ) -> tuple[float, Any]:
        """Add up everybody's value and vector, each times the share of rows that it is the mean of."""
        ranks, problem = self._whole.ranks, None
        value, own = 0.0, np.zeros(self.dim, self.dtype) if vector else None
        try:
            if self._own is not None:
                value, found = ask(self._own)
                value, own = value * self._share, found * self.dtype.type(self._share) if vector else None
        except Exception as raised:
            problem = raised
        sent = None if own is None else torch.from_numpy(np.ascontiguousarray(own)).to(ranks.device)
        told, total = ranks.exchange([float(problem is not None), value], what, sent)
        if problem is not None:
            raise problem
        failed = [rank for rank, row in enumerate(told) if row[0]]
        if failed:
            raise RanksError(f"rank {failed[0]} failed where {what} is computed, and its own error says why.")
        return sum(row[1] for row in told), None if total is None else total.cpu().numpy()
