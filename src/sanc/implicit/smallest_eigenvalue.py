"""The curvature of a minimum: bounds on λ_min and Ritz pairs for linear systems, by products or the whole Hessian."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sanc.autograd.internals import intermediate_entries
from sanc.core.matrix_curvature import measure_matrix_curvature
from sanc.core.oracle import Oracle
from sanc.core.space import Vector
from sanc.core.spectrum.curvature import Certificate, explore, without_curvature
from sanc.implicit.linear_systems import RitzSpace, ritz_space_of

ALWAYS_FORMED_DIM = 100
"""Largest dimension in which the Hessian is always formed: a hundred products are cheap."""
_MAX_FORMED_DIM, _MAX_DIM_PER_PRODUCT = 1000, 4
"""Largest dimension in which it is formed at all, and the largest one relative to the products of the run. Bound,
Newton step and one derivative take one to two times the products of the run. A column of a block takes between a
fiftieth and all of the time of a product, on problems with 90 to 640 variables."""
_MAX_COLUMN_ENTRIES = 2**22
"""Entries of the intermediate results of one block of columns, 32 MB in float64: it has as many columns as fit."""
_LOWER_BOUND_TOLERANCE = 0.5
"""Relative error of the lower bound of λ_min. The bound only scales the error estimate, so a factor of two suffices."""
_MIN_BLOCK_COLUMNS = 16
"""Columns of a block from which the Hessian of a large space is formed."""

GradientOf = Callable[[Tensor], Tensor]
"""∇f as a function of x that torch differentiates."""


@dataclass(frozen=True)
class Curvature:
    """Bounds on λ_min at a point, and what is known for linear systems with the Hessian.

    Attributes
    ----------
    certificate : Certificate
        The bounds.
    ritz_space : RitzSpace
        Ritz pairs of the Hessian; all of them if it was formed.
    norm : float
        Estimate of ‖H‖.
    is_formed : bool
        Whether the Hessian was formed, so that these are all its eigenpairs beyond roundoff.
    """

    certificate: Certificate
    ritz_space: RitzSpace
    norm: float
    is_formed: bool = False

    @property
    def eigenpairs(self) -> RitzSpace | None:
        """All eigenpairs with positive values; None if only some are known."""
        return self.ritz_space if self.is_formed else None


def forms_hessian(dim: int, run_products: int, max_products: int | None) -> bool:
    """Return whether all columns of the Hessian are expected to cost less than the products that they replace."""
    if max_products is not None and max_products < dim:
        return False
    return dim <= max(ALWAYS_FORMED_DIM, min(_MAX_FORMED_DIM, _MAX_DIM_PER_PRODUCT * run_products))


def curvature_by_products(
    oracle: Oracle,
    x: Vector,
    *,
    gradient_tolerance: float,
    confidence: float,
    max_products: int | None,
    seed: int,
) -> Curvature:
    """Bound λ_min by the Lanczos process from a random start, and keep its Ritz pairs."""
    explored = explore(
        oracle,
        x,
        gradient_tolerance=gradient_tolerance,
        curvature_tolerance=0.0,
        confidence=confidence,
        max_products=max_products,
        seed=seed,
        thorough=True,
        relative_error=_LOWER_BOUND_TOLERANCE,
    )
    norm = 0.0 if explored.spectrum is None else explored.spectrum.norm / explored.product_scale
    return Curvature(explored.certificate, ritz_space_of(explored, oracle.space), norm)


def curvature_of_matrix(hessian: Tensor, grad_norm: float, gradient_tolerance: float) -> Curvature:
    """Return the eigenpairs of the whole Hessian; λ_min is then certain up to roundoff."""
    eps, dim = torch.finfo(hessian.dtype).eps, len(hessian)
    common = {"grad_norm": grad_norm, "gradient_tolerance": gradient_tolerance, "curvature_tolerance": 0.0}
    if not bool(torch.isfinite(hessian).all()):
        unknown = without_curvature(**common, confidence=1.0, products=dim)
        return Curvature(unknown, RitzSpace(np.empty(0)), math.nan)
    measured = measure_matrix_curvature(hessian.double().cpu().numpy(), eps)
    certificate = measured.certificate(**common)
    if not measured.is_symmetric:
        certificate = replace(certificate, error_bound=math.inf)
    regular = measured.values > measured.error
    vectors = torch.as_tensor(measured.vectors[:, regular].T, dtype=hessian.dtype, device=hessian.device)
    ritz_space = RitzSpace(measured.values[regular], vectors.contiguous())
    return Curvature(certificate, ritz_space, measured.norm, is_formed=True)


def hessian_columns(gradient: GradientOf, x: Tensor, free_indices: Tensor | None) -> Tensor | None:
    """Return the rows and columns of the Hessian that belong to the free variables, by products in blocks.

    Return None if torch cannot compute them, and in a large space if blocks are so small that they cost as much as
    single products.
    """
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        g = gradient(leaf)
    block_columns = max(1, _MAX_COLUMN_ENTRIES // (intermediate_entries(g) or _MAX_COLUMN_ENTRIES))
    indices = torch.arange(len(x), device=x.device) if free_indices is None else free_indices
    if len(indices) > ALWAYS_FORMED_DIM and block_columns < _MIN_BLOCK_COLUMNS:
        return None
    if not g.requires_grad:  # f is linear
        return torch.zeros(len(indices), len(indices), dtype=x.dtype, device=x.device)

    def products(rows_of_identity: Tensor, *, batched: bool) -> Tensor:
        vectors = rows_of_identity if batched else rows_of_identity[0]
        (rows,) = torch.autograd.grad(
            g, leaf, vectors, retain_graph=True, materialize_grads=True, is_grads_batched=batched
        )
        return rows if batched else rows[None]

    start, parts = 0, list[Tensor]()
    while start < len(indices):
        chosen = indices[start : start + block_columns]
        rows_of_identity = torch.zeros(len(chosen), len(x), dtype=x.dtype, device=x.device)
        rows_of_identity[torch.arange(len(chosen), device=x.device), chosen] = 1.0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an operator without a rule for batches is slow in them
                parts.append(products(rows_of_identity, batched=block_columns > 1)[:, indices])
        except Exception:
            if block_columns == 1:
                return None
            block_columns = 1  # an operator that cannot be batched
            continue
        start += len(chosen)
    return torch.cat(parts)
