"""A finite sum whose rows are distributed over several ranks.

Rank 0 has the first rows, rank 1 the next ones, and so on. Every rank draws the same sample of all rows, as a function
of seed and iteration, and evaluates the rows of the sample that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

from sanc.errors import ArgumentError
from sanc.ranks.group import Ranks, digest
from sanc.ranks.oracle import Evaluation, average
from sanc.sums.checks import Array
from sanc.sums.linear import FiniteSum, LinearSum


class SharedSum(FiniteSum):
    """The mean over the components of all ranks.

    Parameters
    ----------
    problem : FiniteSum
        The components of this rank. All ranks pass the same kind of sum, with the same penalty.
    ranks : Ranks
        The ranks that hold the components.

    Attributes
    ----------
    n, dim, dtype
        As in `FiniteSum`, over the components of all ranks.
    """

    def __init__(self, problem: FiniteSum, ranks: Ranks) -> None:
        self.ranks = ranks
        self._local: FiniteSum | None = problem  # None if this rank has no row of the sample
        self._is_subset = False
        self.dim, self.dtype = problem.dim, problem.dtype
        weighted = False
        kind: dict[str, Any] = {"type": type(problem).__name__, "variables": problem.dim, "dtype": str(problem.dtype)}
        if isinstance(problem, LinearSum):
            weighted = problem.weights is not None
            kind |= vars(problem.penalty) | {"weights": weighted, "intercept": problem.intercept}
        remedy = "pass sums of the same loss, variables, type and penalty on all ranks; only the rows may differ."
        ranks.compare(digest(kind).to(ranks.device), ("the kind of sum",), "the kinds of sums", remedy)
        if weighted:
            raise ArgumentError(
                "weights cannot be used with process_group, since each rank scales its weights to a mean of 1: leave "
                "out weights or process_group."
            )
        counts, _ = ranks.exchange([float(problem.n)], "the numbers of rows")
        rows = [int(row[0]) for row in counts]
        self.n, self._first, self._local_count = sum(rows), sum(rows[: ranks.rank]), problem.n

    def subset(self, rows: Array) -> FiniteSum:
        if self._is_subset:
            raise NotImplementedError("a sample of a sum on several ranks cannot be sampled again")
        rows, part = np.asarray(rows), copy(self)
        here = rows[(rows >= self._first) & (rows < self._first + self._local_count)] - self._first
        part._local = self._local.subset(here) if self._local is not None and here.size else None
        part.n, part._local_count, part._is_subset = len(rows), here.size, True
        return part

    def value(self, w: Array) -> float:
        return self._mean("a value", lambda local: (local.value(w), None), vector=False)[0]

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        return self._mean("a gradient", lambda local: local.value_and_gradient(w))

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        product: Any = None if self._local is None else self._local.hessian(w)
        return lambda v: self._mean("a Hessian product", lambda _: (0.0, product(v)))[1]

    def _mean(
        self, label: str, evaluate: Callable[[FiniteSum], tuple[float, Any]], *, vector: bool = True
    ) -> tuple[float, Any]:
        """Return the mean of the values and vectors of all ranks, weighted by their rows of this sample."""
        zero = torch.from_numpy(np.zeros(self.dim, self.dtype)).to(self.ranks.device) if vector else None

        def local() -> Evaluation:
            if self._local is None:
                return [], zero
            value, derivative = evaluate(self._local)
            return [value], torch.tensor(derivative, device=self.ranks.device) if vector else None

        averaged = average(self.ranks, local, label, like=zero, terms=float(self._local_count))
        return averaged.numbers[0], None if averaged.vector is None else averaged.vector.cpu().numpy()
