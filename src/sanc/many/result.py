"""The result of many minimisations, a row each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sanc.core.runs.status import Status
from sanc.core.spectrum.curvature import Certificate
from sanc.errors import missing_attribute
from sanc.many.lanczos import MAX_CERTIFICATE_DIM
from sanc.minimisation.result import Result
from sanc.minimisation.trees import map_tree

_SAME_POINT_TOLERANCE = 1e-4
"""Relative distance of points, in units of max(1, ‖x‖), below which they are one minimum: √tol of float64."""


@dataclass(frozen=True)
class RowMinimum:
    """A minimum that several starts reached.

    Attributes
    ----------
    x : array, Tensor or pytree of these
        The point with the lowest value.
    fun : float
        f there.
    row : int
        The row that reached it.
    rows : Tensor
        All rows that ended at this point.
    certificate : Certificate
        The certificate of `row`.
    """

    x: Any
    fun: float
    row: int
    rows: Tensor
    certificate: Certificate


_ROW_REMEDIES = {
    **dict.fromkeys(("grad", "gradient"), "use jac"),
    **dict.fromkeys(("loss", "value", "f", "cost"), "use fun, the values at x"),
    **dict.fromkeys(("hess", "hess_inv"), "no such matrix is kept; lambda_min has the smallest eigenvalue of each row"),
    "history": "pass a callback",
    "message": "use status, or the message of one row, such as result[0].message",
}
"""What to use in place of attributes that the results of rows do not have."""


@dataclass(frozen=True, repr=False)
class ManyResult:
    """The results of all rows. Every tensor, or array if `x0` was one, has an entry for each row.

    Attributes
    ----------
    x : array, Tensor or pytree of these
        The final points, in the form of `x0`.
    fun : array or Tensor
        The values there.
    jac : array, Tensor or pytree of these
        The gradients there.
    success : array or Tensor
        Whether a row reached a second-order point as far as it could be tested.
    status : array or Tensor
        Why a row ended: a `sanc.Status` as integer.
    nit, nfev, njev : array or Tensor
        Numbers of iterations, of values, and of gradients with curvature.
    grad_norm : array or Tensor
        ‖∇f‖; with bounds, the norm over the free variables. Of fits in variables scaled by the columns of the Jacobian.
    lambda_min, lambda_error : array or Tensor
        The smallest eigenvalue of the Hessian, with bounds of the free variables, and its rounding error.
    tol, curvature_tol : array or Tensor
        The tolerances of the row: the default is raised to the rounding error of the gradient where a row stalled.
    active, multipliers : array, Tensor, pytree or None
        With bounds: −1 at the lower bound, 1 at the upper one, otherwise 0; and the gradient at active bounds.
    rounds : int
        Evaluations of the batch: each of them has a trial point of every row that had not ended.
    confidence : float
        Probability with which λ_min is above the bound of a certificate; 1 with dense Hessians.
    flat : Tensor
        The final points as rows of a matrix, whatever the form of `x0`.
    """

    x: Any
    fun: Any
    jac: Any
    success: Any
    status: Any
    nit: Any
    nfev: Any
    njev: Any
    grad_norm: Any
    lambda_min: Any
    lambda_error: Any
    tol: Any
    curvature_tol: Any
    active: Any
    multipliers: Any
    rounds: int
    confidence: float = 1.0
    flat: Tensor = field(default_factory=lambda: torch.empty(0))

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, _ROW_REMEDIES)

    def __len__(self) -> int:
        return len(self.flat)

    def certificate(self, row: int) -> Certificate:
        """Return the certificate of a row, from the whole Hessian or a Krylov space; then `products` is their limit."""
        error = float(self.lambda_error[row])
        is_dense = self.confidence == 1.0
        return Certificate(
            grad_norm=float(self.grad_norm[row]),
            lambda_min=float(self.lambda_min[row]),
            error_bound=error,
            ritz_error=error if is_dense else 0.0,
            residual=0.0,
            asymmetry=0.0,
            confidence=self.confidence,
            gradient_tolerance=float(self.tol[row]),
            curvature_tolerance=float(self.curvature_tol[row]),
            products=self.flat.shape[1] if is_dense else min(self.flat.shape[1], MAX_CERTIFICATE_DIM),
        )

    def __getitem__(self, row: int) -> Result[Any]:
        """Return the result of a row, as that of `minimize`, without its history."""
        status = _status(int(self.status[row]))
        return Result(
            message=status.sentence,
            success=status.success,
            status=status,
            fun=float(self.fun[row]),
            x=_row_of(self.x, row),
            jac=_row_of(self.jac, row),
            nit=int(self.nit[row]),
            nfev=int(self.nfev[row]),
            njev=int(self.njev[row]),
            certificate=self.certificate(row),
            **({} if self.active is None else {"active": _row_of(self.active, row)}),
            **({} if self.multipliers is None else {"multipliers": _row_of(self.multipliers, row)}),
        )

    @property
    def best(self) -> Result[Any]:
        """The result of the successful row with the lowest value; of all rows if none was successful."""
        fun, success = torch.as_tensor(self.fun), torch.as_tensor(self.success)
        chosen = success if bool(success.any()) else torch.ones_like(success)
        return self[int(torch.where(chosen & ~fun.isnan(), fun, torch.inf).argmin())]

    def minima(self, distance: float = _SAME_POINT_TOLERANCE) -> list[RowMinimum]:
        """Return the distinct minima of the successful rows, the lowest first.

        Rows are of one minimum if their points differ by at most `distance` times max(1, ‖x‖). With different problems
        in the rows this has no meaning; it is for many starts of one.
        """
        fun, success = torch.as_tensor(self.fun).cpu(), torch.as_tensor(self.success).cpu()
        order = torch.argsort(fun, stable=True)
        points, pending = self.flat.cpu(), order[success[order]]
        minima = []
        while len(pending):
            row = int(pending[0])
            scale = max(1.0, float(points[row].norm()))
            near = torch.linalg.vector_norm(points[pending] - points[row], dim=1) <= distance * scale
            rows, pending = pending[near].sort().values, pending[~near]
            minima.append(RowMinimum(_row_of(self.x, row), float(fun[row]), row, rows, self.certificate(row)))
        return minima

    def __repr__(self) -> str:
        count, status = len(self), np.asarray(torch.as_tensor(self.status).cpu())
        lines = [f"{count} rows, {int(torch.as_tensor(self.success).sum())} successful, {self.rounds} rounds"]
        for number, rows in sorted(Counter(status.tolist()).items()):
            lines.append(f"{rows:>9}  {_status(number).sentence}")
        return "\n".join(lines)


def _status(number: int) -> Status:
    """Return the status with a number."""
    return next(status for status in Status if status == number)


def _row_of(form: Any, row: int) -> Any:
    """Return the entry of a row of a tensor, an array or a tree of them."""
    return map_tree(lambda leaf: leaf[row], form)
