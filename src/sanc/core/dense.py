"""The cubic model in the whole space, from the eigenpairs of a Hessian that the oracle has as a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dpotrs

from sanc.core.model import CubicModel, KrylovSubspace, forcing_tolerance, step_control
from sanc.core.oracle import Operator
from sanc.core.point import Point
from sanc.core.space import Floats, NumpySpace, Space, host_array
from sanc.core.spectrum import cubic
from sanc.core.spectrum.krylov import DiagonalBasis, NonFiniteProductError

Dense = TypeVar("Dense", bound="DenseModel")


_SINGULAR_EIGENVALUE_RATIO = 1e-12
"""Ratio of the extreme eigenvalues below which a semidefinite Hessian counts as singular.

Along its null space the gradient is roundoff, and Newton's step would divide that roundoff by a zero eigenvalue.
"""


class EigenSpace(DiagonalBasis):
    """The space of all eigenvectors of B, or a line that is treated as an eigenvector."""

    def __init__(self, values: Floats, eigenvector_rows: Any, projections: Floats) -> None:
        super().__init__(values, projections)
        self._eigenvector_rows = eigenvector_rows

    @property
    def products(self) -> int:
        """The matrix counts as n products, also for a line."""
        return int(self._eigenvector_rows.shape[1])

    @property
    def basis(self) -> Any:
        return self._eigenvector_rows

    def combine(self, *coefficients: Floats) -> Any:
        rows = self._eigenvector_rows
        if not isinstance(rows, np.ndarray):
            return [torch.as_tensor(c, dtype=rows.dtype, device=rows.device) @ rows for c in coefficients]
        return [(c @ rows).astype(rows.dtype, copy=False) for c in coefficients]


@dataclass(frozen=True, slots=True)
class NewtonLine(KrylovSubspace):
    """The line of Newton's step, which the ratio test doubles while f decreases by more than the model predicts.

    Attributes
    ----------
    hessian_norm : float
        ‖Bg‖/‖g‖, an estimate of ‖B‖.
    """

    hessian_norm: float = 0.0

    def longer_step(self, here: Point, sigma: float, trial_count: int) -> cubic.CubicStep | None:
        """Return twice the last step; None after a rejected one, or if the model allows only `trial_count` trials.

        Its predicted decrease is the largest that the model has on this line, at the first step.
        """
        if self.step is None or here.rejected is not None or trial_count > self.model.max_resolves:
            return None
        factor = 2.0**trial_count
        return replace(self.step, u=factor * self.step.u, norm=factor * self.step.norm, sigma=sigma)


@dataclass(frozen=True, kw_only=True)
class DenseModel(CubicModel):
    """Minimises the cubic model in the whole space if the oracle has the Hessian as a matrix.

    If the matrix is positive definite, one Cholesky decomposition gives Newton's step s. Its ‖∇m(s)‖ is σ‖s‖², and if
    the forcing condition allows that, the subspace is the line of s. Otherwise one eigendecomposition gives the step of
    every σ. If the oracle has no matrix, the model uses the Krylov space.

    The second derivatives of losses such as the logistic one vanish as margins grow. Newton's step is therefore too
    short far from the minimiser, and twice the step is tried if f decreases by more than predicted and the model
    `tries_longer_steps`.
    """

    @classmethod
    def of(cls: type[Dense], model: Any) -> Dense:
        """Return this kind of model with the settings of another `CubicModel`."""
        return cls(**{item.name: getattr(model, item.name) for item in fields(CubicModel)})

    def build_in(self, here: Point, operator: Operator) -> KrylovSubspace:
        """Return the line of Newton's step or the whole space; without a matrix, a Krylov space."""
        matrix = operator.matrix()
        if matrix is None:
            return super().build_in(here, operator)
        line = self._newton_line(here, operator, matrix)
        if line is not None:
            return line
        values, eigenvector_rows = eigenpairs(matrix)
        negligible = _SINGULAR_EIGENVALUE_RATIO * float(np.abs(values).max())
        if values[0] > -negligible and np.abs(values).min() <= negligible:
            return super().build_in(here, operator)  # a Krylov space has no null vectors but those in the gradient
        projections = eigenvector_rows @ host_array(here.g)
        return self.whole_space(here, operator, values, eigenvector_rows, projections)

    def _newton_line(self, here: Point, operator: Operator, matrix: Floats) -> KrylovSubspace | None:
        """Return the line of Newton's step, if that minimises the cubic model well enough; None otherwise."""
        if (
            not self.uses_forcing_term
            or here.lanczos_start is not None
            or here.grad_norm == 0.0
            or here.oracle.box is not None
        ):
            return None
        g = host_array(here.g)
        factor, info = dpotrf(matrix, lower=1)
        pivots = np.diagonal(factor)
        if info != 0 or not pivots.min() ** 2 > _SINGULAR_EIGENVALUE_RATIO * pivots.max() ** 2:
            return None
        step, product = dpotrs(factor, -g, lower=1)[0], matrix @ g
        step_norm, hessian_norm = math.sqrt(step @ step), math.sqrt(product @ product) / here.grad_norm
        if not (0.0 < step_norm < math.inf and math.isfinite(hessian_norm)):
            return None
        line = step / step_norm
        values, projections = np.array([line @ (matrix @ line)]), np.array([g @ line])
        krylov = EigenSpace(values, _block(here.space, line[None, :]), projections)
        spectrum = cubic.Spectrum(values, np.ones((1, 1)))
        control = step_control(self, here, hessian_norm)
        if here.units.length_scale:  # Newton's step may be too short at every point, not only at the first
            control = control._replace(allows_longer_steps=self.tries_longer_steps)
        is_limited = step_norm > control.max_step_norm and here.state.last_step_norm > 0.0
        if is_limited or not control.sigma * step_norm * step_norm <= forcing_tolerance(here):
            return None
        cubic_step, control = self.limited_step(here, krylov, spectrum, control)
        return NewtonLine(self, krylov, operator, spectrum, *control, cubic_step, hessian_norm=hessian_norm)

    def whole_space(
        self, here: Point, operator: Operator, values: Floats, eigenvector_rows: Floats, projections: Floats
    ) -> KrylovSubspace:
        """Return the subspace of all eigenvectors, given the gradient in their basis, with its cubic step."""
        at_gradient = here.lanczos_start is None and here.grad_norm > 0.0
        krylov = EigenSpace(values, _block(here.space, eigenvector_rows), projections)
        unit_product_norm = 0.0 if here.units.length_scale else product_norm(values, projections, at_gradient)
        spectrum = cubic.Spectrum(values, _identity(len(values)))
        control = step_control(self, here, unit_product_norm)
        step, control = self.limited_step(here, krylov, spectrum, control)
        return KrylovSubspace(self, krylov, operator, spectrum, *control, step)


@cache
def _identity(dim: int) -> Floats:
    """Return the identity matrix, which is not to be changed."""
    matrix = np.eye(dim)
    matrix.setflags(write=False)
    return matrix


def product_norm(values: Floats, projections: Floats, at_gradient: bool) -> float:
    """Return ‖Bq‖ with the unit vector q of the gradient, from both in the eigenbasis; otherwise the norm of B."""
    if at_gradient:
        return float(np.linalg.norm(values * projections) / np.linalg.norm(projections))
    return float(np.abs(values).max())


def eigenpairs(matrix: Floats) -> tuple[Floats, Floats]:
    """Return the eigenvalues and eigenvectors, as rows, of the symmetric part of a matrix."""
    if not np.isfinite(matrix).all():
        raise NonFiniteProductError("the Hessian is not finite")
    try:
        values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    except np.linalg.LinAlgError as error:
        raise NonFiniteProductError(str(error)) from error
    return values, np.ascontiguousarray(vectors.T)


def _block(space: Space, rows: Floats) -> Any:
    """Return rows as a block of vectors of the space."""
    if isinstance(space, NumpySpace):
        return rows.astype(space.dtype, copy=False)
    return torch.as_tensor(rows, dtype=space.dtype, device=space.device)
