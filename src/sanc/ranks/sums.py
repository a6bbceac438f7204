"""A finite sum whose rows lie on several ranks: the same sum to all of them.

Rank 0 has the first rows, rank 1 those that follow, and so on. A sample is drawn from all rows, as a function of seed
and iteration, by every rank for itself; each evaluates those that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

from sanc.errors import ArgumentError
from sanc.ranks.group import Ranks, digest
from sanc.ranks.oracle import Answer, average
from sanc.sums.linear import Array, FiniteSum, LinearSum


class SharedSum(FiniteSum):
    """The mean over the components of all ranks.

    Parameters
    ----------
    problem : FiniteSum
        The components of this rank; of all ranks the same kind of sum, with the same penalty.
    """

    def __init__(self, problem: FiniteSum, ranks: Ranks) -> None:
        self.ranks = ranks
        self._own: FiniteSum | None = problem  # None: no row of a sample
        self._whole = True
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
        if not self._whole:
            raise NotImplementedError("a sample of a sum on several ranks is not sampled again")
        rows, part = np.asarray(rows), copy(self)
        here = rows[(rows >= self._first) & (rows < self._first + self._held)] - self._first
        part._own = self._own.subset(here) if self._own is not None and here.size else None
        part.n, part._held, part._whole = len(rows), here.size, False
        return part

    def value(self, w: Array) -> float:
        return self._mean("a value", lambda own: (own.value(w), None), vector=False)[0]

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        return self._mean("a gradient", lambda own: own.value_and_gradient(w))

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        product: Any = None if self._own is None else self._own.hessian(w)
        return lambda v: self._mean("a Hessian product", lambda _: (0.0, product(v)))[1]

    def _mean(
        self, what: str, ask: Callable[[FiniteSum], tuple[float, Any]], *, vector: bool = True
    ) -> tuple[float, Any]:
        """Return the mean of everybody's value and vector, weighted by the rows that each has of this sample."""
        none = torch.from_numpy(np.zeros(self.dim, self.dtype)).to(self.ranks.device) if vector else None

        def answer() -> Answer:
            if self._own is None:
                return [], none
            value, found = ask(self._own)
            return [value], torch.tensor(found, device=self.ranks.device) if vector else None

        (means, total), _ = average(self.ranks, answer, what, like=none, terms=float(self._held))
        return means[0], None if total is None else total.cpu().numpy()
