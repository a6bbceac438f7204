"""Options of a method in a preset, of which the one of the authors is an object of the laboratory; and oracles."""

from __future__ import annotations

from typing import Any

import torch

import sanc
from sanc.lab.authors import AUTHORS
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minimisation.objective import build_oracle
from sanc.sums.oracle import SumOracle

PRESETS = {"paper": "paper", "authors": AUTHORS, "robust": "robust"}


def composed(method: Any, preset: str, **settings: Any) -> dict[str, Any]:
    """Return the argument `preset`, and those of the settings that the method has in it."""
    name = method if isinstance(method, str) else method.method
    chosen: dict[str, Any] = {"preset": PRESETS[preset]}
    if preset == "authors" and name in ("cr", "crm"):
        chosen["sigma0"] = 5.0
    known = sanc.method_for(name, **chosen).options()
    return chosen | {name: value for name, value in settings.items() if name in known}


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
