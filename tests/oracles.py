"""Oracles of small objectives, and the iteration on samples of one."""

from __future__ import annotations

from typing import Any

import torch

import sanc
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minimisation.objective import build_oracle
from sanc.sums.oracle import SumOracle


def diagonal_oracle(eigenvalues: Any) -> tuple[Any, Any]:
    """Return the oracle of a quadratic with a diagonal Hessian, and the point zero."""
    diagonal = torch.as_tensor(eigenvalues, dtype=torch.float64)
    oracle, x, _ = build_oracle(
        lambda x: 0.5 * (diagonal * x * x).sum(), torch.zeros_like(diagonal), jac=None, hess=None, hessp=None, args=()
    )
    return oracle, x


def iteration_on(problem, method="sanc", batch=29, seed=0, **options):
    """Return the iteration on samples, and the oracle that draws them."""
    return MinibatchIteration(sanc.method_for(method, **options), seed), SumOracle(problem, (batch,) * 3, seed)
