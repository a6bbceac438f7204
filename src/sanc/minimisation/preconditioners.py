"""Preconditioners as a caller passes them: matrices, diagonals, linear operators and functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.core.runs.preconditioned import Factor, PreconditionedOracle, PreconditionedVariables
from sanc.core.space import Floats, NumpySpace, Space, Vector
from sanc.errors import ArgumentError, ArgumentTypeError, shown

MAX_OPERATOR_VARIABLES = 2000
"""Largest number of variables for which an operator is formed as a matrix: its factors take about a second."""


def precondition(
    precond: Any, oracle: Oracle, x: Vector, others: Mapping[str, Any]
) -> tuple[PreconditionedOracle, Vector, PreconditionedVariables]:
    """Return the oracle of f(Ly), its start y = L⁻¹x, and the variables y; `others` cannot be used with it."""
    for name, other in others.items():
        if other is not None:
            raise ArgumentError(f"precond cannot be used with {name}: leave one of them out.")
    changed = PreconditionedOracle(oracle, build_factor(precond, oracle.space))
    return changed, changed.solve(x), PreconditionedVariables(changed)


def build_factor(precond: Any, space: Space) -> Factor:
    """Return the factor L of a preconditioner M = LLᵀ; raise an error if M is not symmetric positive definite."""
    matrix = _entries(precond, space)
    if not np.isfinite(matrix).all():
        raise ArgumentError(f"precond = {shown(precond)} holds NaN or infinity: pass finite numbers.")
    if matrix.ndim == 1:
        values: Any = np.sort(matrix)
        limit = float(np.finfo(space.dtype).tiny) if isinstance(space, NumpySpace) else torch.finfo(space.dtype).tiny
    else:
        asymmetry = float(np.abs(matrix - matrix.T).max())
        if asymmetry > np.sqrt(space.eps) * float(np.abs(matrix).max()):
            raise ArgumentError(
                f"precond is not symmetric, by {asymmetry:.2g}: pass a symmetric positive definite matrix."
            )
        matrix = 0.5 * (matrix + matrix.T)
        values = np.linalg.eigvalsh(matrix)
        limit = len(values) * np.finfo(np.float64).eps * values[-1]  # the roundoff of eigenvalues
    if not values[0] > limit:
        raise ArgumentError(
            f"precond is not positive definite, with an eigenvalue of {values[0]:.3g}: pass a symmetric positive "
            "definite matrix, such as one with a multiple of the identity added."
        )
    factor = np.sqrt(matrix) if matrix.ndim == 1 else scipy.linalg.cholesky(matrix, lower=True)
    return Factor(_like(factor, space), float(np.sqrt(values[0])), float(np.sqrt(values[-1])))


def _entries(precond: Any, space: Space) -> Floats:
    """Return M as a float64 matrix, or its diagonal."""
    n, forms = space.dim, "its diagonal, a square matrix, a LinearOperator or a function of a vector"
    if isinstance(precond, Tensor):
        precond = (precond.to_dense() if precond.layout != torch.strided else precond).detach().cpu().numpy()
    is_operator = isinstance(precond, LinearOperator) or scipy.sparse.issparse(precond)
    if is_operator and tuple(precond.shape) != (n, n):
        raise ArgumentError(f"precond has shape {tuple(precond.shape)} for {n} variables: pass {forms}.")
    if is_operator or callable(precond):
        if n > MAX_OPERATOR_VARIABLES:
            raise ArgumentError(
                f"precond is an operator for {n} variables, more than {MAX_OPERATOR_VARIABLES}: pass its diagonal, or "
                "the matrix."
            )
        return np.stack([_product(precond, column, space, is_operator) for column in np.eye(n)], axis=1)
    try:
        array = np.asarray(precond, np.float64)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"precond = {shown(precond)} is no preconditioner: pass {forms}.") from None
    if array.shape not in ((n,), (n, n)):
        raise ArgumentError(f"precond has shape {array.shape} for {n} variables: pass {forms}.")
    return array


def _product(precond: Any, v: Floats, space: Space, is_operator: bool) -> Floats:
    """Return Mv of an operator, or of a function of the caller, which gets a vector like x."""
    returned: Any
    if is_operator:
        returned = precond @ v
    else:
        returned = precond(v.astype(space.dtype) if isinstance(space, NumpySpace) else _like(v, space))
    try:
        product = np.asarray(returned.detach().cpu() if isinstance(returned, Tensor) else returned, np.float64)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"precond returned {shown(returned)}: return the product, a vector like v.") from None
    if product.size != len(v):
        raise ArgumentError(f"precond returned {product.size} numbers for {len(v)} variables: return a vector like v.")
    return product.reshape(-1)


def _like(array: Floats, space: Space) -> Tensor:
    """Return an array as a tensor of the type and on the device of x."""
    if isinstance(space, NumpySpace):
        return torch.from_numpy(np.ascontiguousarray(array, space.dtype))
    return torch.from_numpy(np.ascontiguousarray(array)).to(space.device, space.dtype)
