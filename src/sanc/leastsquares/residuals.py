"""Residual vectors and Jacobians of functions of the caller: torch, NumPy, sparse matrices and linear operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.core.meter import Meter
from sanc.core.space import Floats
from sanc.errors import ArgumentError, ArgumentTypeError, in_place_error, shown
from sanc.functions.differences import COMPLEX_STEP, DIFFERENCE_POWERS, ERROR_POWERS
from sanc.leastsquares.matrices import JacobianMatrix, fits_in_memory
from sanc.leastsquares.networks import NetworkResiduals

MAX_DENSE_VARIABLES = 300
"""Largest number of variables of a dense model: its eigenvalues take about ten milliseconds."""
MAX_DENSE_ENTRIES = 20_000_000
"""Largest number of entries of a Jacobian that is stored as a dense matrix: 160 MB in float64."""


class Residuals:
    """Calls the functions of the caller with points of their form, and counts the calls.

    Parameters
    ----------
    fun : callable
        Returns the residuals.
    build : callable
        Converts a flat array to the form of the caller's points.
    is_torch : bool
        Whether the points are tensors.
    jac : callable, str or None
        The Jacobian, a scheme of differences, or None for automatic differentiation.
    args : tuple
        Further arguments of the functions.

    Attributes
    ----------
    meter : Meter
        The counters of the calls.
    box : Box or None
        Bounds that differences do not leave.
    count : int or None
        Number of residuals; None before the first call.
    network : NetworkResiduals or None
        The residuals of a network, which compute their Jacobian themselves.
    """

    def __init__(self, fun: Any, build: Callable[[Any], Any], is_torch: bool, jac: Any, args: tuple[Any, ...]) -> None:
        self.fun, self.build, self.is_torch, self.args = fun, build, is_torch, args
        self.jac = jac if jac is not None or is_torch else "3-point"
        self.meter = Meter()
        self.box: Box | None = None
        self.count: int | None = None
        self.network = fun if isinstance(fun, NetworkResiduals) and jac is None else None

    @property
    def is_differenced(self) -> bool:
        """Whether the Jacobian is computed from differences."""
        return isinstance(self.jac, str)

    @property
    def is_automatic(self) -> bool:
        """Whether torch differentiates the residuals."""
        return self.jac is None

    def relative_jacobian_error(self, eps: float) -> float | None:
        """Return the relative error of the Jacobian; None: the machine precision."""
        return float(eps ** ERROR_POWERS[self.jac]) if self.is_differenced and self.jac != "cs" else None

    # Residuals.

    def __call__(self, x: Floats) -> Floats:
        """Return the residuals at x, and count the call."""
        self.meter.count_value(1)
        returned = self._call(self.build(x))
        r = self._as_vector(returned, x.dtype)
        if self.count is None:
            self.count = len(r)
        elif len(r) != self.count:
            raise ArgumentError(
                f"fun returned {len(r)} residuals after {self.count}: return the same number each time."
            )
        return r

    def _call(self, point: Any) -> Any:
        """Call the function; raise errors with a remedy for those of torch that have a known cause."""
        try:
            return self.fun(point, *self.args)
        except (RuntimeError, TypeError) as error:
            if self.is_automatic and "numpy" in str(error).lower():
                raise ArgumentTypeError(
                    f"fun is no torch function ({error}): pass x0 as an array, or write fun with torch operations."
                ) from error
            if "in-place" in str(error):
                raise in_place_error(error) from error
            raise

    @staticmethod
    def _as_vector(returned: Any, dtype: Any) -> Floats:
        """Return residuals as a flat array; raise an error if they are none."""
        array = returned.detach().cpu().numpy() if isinstance(returned, Tensor) else returned
        try:
            array = np.asarray(array)
            if array.dtype.kind not in "fiub":
                raise TypeError("not real numbers")
            flat = array.astype(dtype).reshape(-1)
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"fun returned {shown(returned)}: return an array of real residuals.") from None
        if flat.size == 0:
            raise ArgumentError("fun returned no residual: return at least one.")
        return flat

    # Jacobians.

    def jacobian(self, x: Floats, r: Floats) -> Any:
        """Return the Jacobian at x, and count it: an array, a sparse matrix or a linear operator."""
        self.meter.count_gradient(1)
        m, n = len(r), len(x)
        if callable(self.jac):
            return self._checked(self.jac(self.build(x), *self.args), m, n, x.dtype)
        if self.is_differenced:
            return self._differences(x, r)
        if self.network is not None and fits_in_memory(m, n):
            return JacobianMatrix(self.network.jacobian(self.build(x)).detach())
        if n > MAX_DENSE_VARIABLES or m * n > MAX_DENSE_ENTRIES:
            return self._autograd_operator(x, m)
        return self._autograd_matrix(x, m)

    @staticmethod
    def _checked(returned: Any, m: int, n: int, dtype: Any) -> Any:
        """Return a Jacobian of the caller; raise an error if it does not fit."""
        if type(returned) is np.ndarray and returned.shape == (m, n) and returned.dtype == dtype:
            return returned.copy()
        if isinstance(returned, Tensor):
            returned = (returned.to_dense() if returned.layout != torch.strided else returned).detach().cpu().numpy()
        is_operator = isinstance(returned, LinearOperator)
        if not (is_operator or scipy.sparse.issparse(returned)):
            try:
                array = np.asarray(returned)
                if array.dtype.kind not in "fiub":
                    raise TypeError("not real numbers")
                returned = array.astype(dtype)
            except (TypeError, ValueError):
                raise ArgumentTypeError(
                    f"jac returned {shown(returned)}: return a matrix, a sparse matrix or a LinearOperator."
                ) from None
            if returned.size == m * n:
                returned = returned.reshape(m, n)
        if tuple(returned.shape) != (m, n):
            raise ArgumentError(
                f"jac returned shape {tuple(returned.shape)}: return ({m}, {n}), a row for each residual and a column "
                "for each variable."
            )
        if n <= MAX_DENSE_VARIABLES and m * n <= MAX_DENSE_ENTRIES:
            if is_operator:
                return np.asarray(returned @ np.eye(n, dtype=dtype), dtype)
            if scipy.sparse.issparse(returned):
                return returned.toarray().astype(dtype)
        return returned.tocsr() if scipy.sparse.issparse(returned) else returned

    def _differences(self, x: Floats, r: Floats) -> Floats:
        """Return the Jacobian by differences within the bounds."""
        columns = [self._column(x, r, k) for k in range(len(x))]
        return np.stack(columns, axis=1)

    def _column(self, x: Any, r: Any, k: int) -> Any:
        """Return ∂r/∂x_k."""
        size = max(1.0, abs(float(x[k])))
        if self.jac == "cs":
            moved = x.astype(np.result_type(x.dtype, np.complex64))
            moved[k] += 1j * COMPLEX_STEP * size
            self.meter.count_value(1)
            returned = np.asarray(self._call(self.build(moved)))
            if not np.iscomplexobj(returned) or returned.size != len(r):
                raise ArgumentError(
                    f'fun returned {shown(returned)} at a complex point: with jac = "cs", return complex residuals. '
                    'Pass jac = "3-point" if fun cannot.'
                )
            return (np.imag(returned).reshape(-1) / (COMPLEX_STEP * size)).astype(x.dtype)
        h = float(np.finfo(x.dtype).eps) ** DIFFERENCE_POWERS[str(self.jac)] * size
        lower, upper = (-np.inf, np.inf) if self.box is None else (float(self.box.lower[k]), float(self.box.upper[k]))
        below, above = float(x[k]) - lower, upper - float(x[k])
        if max(below, above) <= 0.0:
            return np.zeros_like(r)
        if self.jac == "3-point" and min(below, above) >= h:
            ahead, behind = self._moved(x, k, h), self._moved(x, k, -h)
            return (self(ahead) - self(behind)) / (ahead[k] - behind[k])
        step = h if above >= min(below, 2.0 * h) else -h
        step = float(np.copysign(min(h, 0.5 * (above if step > 0.0 else below)), step))
        once = self._moved(x, k, step)
        step = once[k] - x[k]
        if self.jac == "2-point":
            return (self(once) - r) / step
        twice = self._moved(x, k, 2.0 * step)
        twice[k] = min(max(twice[k], lower), upper)
        return (4.0 * self(once) - self(twice) - 3.0 * r) / (2.0 * step)

    @staticmethod
    def _moved(x: Floats, k: int, h: float) -> Floats:
        """Return a copy of x with h added to its k-th entry."""
        moved = x.copy()
        moved[k] += h
        return moved

    # Automatic differentiation.

    def _residual_tensor(self, flat: Tensor) -> Tensor:
        """Return the residuals of a flat tensor as a flat tensor."""
        returned = self._call(self.build(flat))
        if not isinstance(returned, Tensor):
            raise ArgumentTypeError(
                f"fun returned {type(returned).__name__} for a torch tensor, so it cannot be differentiated: write it "
                "with torch operations, or pass jac."
            )
        return returned.reshape(-1)

    def _autograd_matrix(self, x: Floats, m: int) -> Floats:
        """Return the dense Jacobian, by forward or reverse mode, whichever needs fewer passes."""
        flat = torch.from_numpy(x.copy())
        transform = torch.func.jacfwd if len(x) <= m else torch.func.jacrev
        try:
            matrix: Any = transform(self._residual_tensor)(flat)
        except (RuntimeError, NotImplementedError):  # an operator without a rule for this mode
            matrix = torch.autograd.functional.jacobian(self._residual_tensor, flat)  # type: ignore[no-untyped-call]
        return np.asarray(matrix.detach().cpu().numpy(), x.dtype)

    def _autograd_operator(self, x: Floats, m: int) -> LinearOperator:
        """Return the Jacobian as products Jv and Jᵀu."""
        with torch.enable_grad():
            flat = torch.from_numpy(x.copy()).requires_grad_()
            r = self._residual_tensor(flat)
            u = torch.zeros_like(r, requires_grad=True)
            (transposed,) = torch.autograd.grad(r, flat, u, create_graph=True)

        def forward(v: Any) -> Any:
            given = torch.from_numpy(np.ascontiguousarray(v, x.dtype).reshape(-1))
            (product,) = torch.autograd.grad(transposed, u, given, retain_graph=True, materialize_grads=True)
            return product.cpu().numpy()

        def backward(w: Any) -> Any:
            given = torch.from_numpy(np.ascontiguousarray(w, x.dtype).reshape(-1)).to(r)
            (product,) = torch.autograd.grad(r, flat, given, retain_graph=True, materialize_grads=True)
            return product.cpu().numpy()

        return LinearOperator((m, len(x)), matvec=forward, rmatvec=backward, dtype=x.dtype)

    def second_order_product(self, x: Floats, w: Floats) -> Callable[[Floats], Floats]:
        """Return the product v ↦ Σ w_i ∇²r_i(x) v of automatic differentiation."""
        with torch.enable_grad():
            flat = torch.from_numpy(x.copy()).requires_grad_()
            r = self._residual_tensor(flat)
            (g,) = torch.autograd.grad(
                r, flat, torch.from_numpy(w.copy()).to(r), create_graph=True, materialize_grads=True
            )

        def multiply(v: Floats) -> Floats:
            if not g.requires_grad:  # the residuals are linear
                return np.zeros_like(x)
            given = torch.from_numpy(np.ascontiguousarray(v, x.dtype))
            (product,) = torch.autograd.grad(g, flat, given, retain_graph=True, materialize_grads=True)
            return np.asarray(product.cpu().numpy(), x.dtype)

        return multiply
