"""Residuals of rows of data, with their derivatives.

A model is a function ``f(x, *p)`` of one row. `MappedModel` maps any model over rows by `torch.func.vmap`. Most models
are pointwise: the value at a point depends only on that point and the parameters. `PointwiseModel` calls such a model
once, with parameters that broadcast over rows and points, and one backward pass returns the Jacobians of all rows.
`is_pointwise` compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from sanc.leastsquares.row_data import RowData
from sanc.many.algebra import gram

_EQUALITY_TOLERANCE = 1e-5
"""Relative difference beyond roundoff, also in float32, that shows that a model is not pointwise."""


class MappedModel:
    """Residuals of any model, which `torch.func.vmap` maps over rows.

    Parameters
    ----------
    f : callable
        ``f(x, *p)`` returns the curve of one row.
    """

    def __init__(self, f: Callable[..., Tensor]) -> None:
        self.f = f
        self._row_hessian: Callable[..., Tensor] = self._forward_hessian

    def curves(self, p: Tensor, data: RowData) -> Tensor:
        """Return the curves of rows."""
        with torch.no_grad():
            return self._mapped(self._curve, p, data)  # type: ignore[no-any-return]

    def residuals(self, p: Tensor, data: RowData) -> Tensor:
        """Return the weighted residuals of rows."""
        return data.weighted(self.curves(p, data) - data.y)

    def linearised(self, p: Tensor, data: RowData) -> Tensor:
        """Return the columns of the Jacobians of rows, and the residuals as last column, all of them weighted."""
        with torch.no_grad():
            curves, columns = self._mapped(self._with_tangents, p, data)
            return data.weighted(torch.cat([columns, (curves - data.y)[:, None]], 1))

    def hessians(self, p: Tensor, data: RowData) -> Tensor:
        """Return the Hessians of the costs of rows."""
        try:
            return self._mapped(self._row_hessian, p, data, data.y, data.weights).detach()  # type: ignore[no-any-return]
        except (RuntimeError, NotImplementedError):  # an operator without forward derivatives
            self._row_hessian = jacrev(grad(self._cost))
            return self._mapped(self._row_hessian, p, data, data.y, data.weights).detach()  # type: ignore[no-any-return]

    def _mapped(self, function: Callable[..., Any], p: Tensor, data: RowData, *parts: Tensor | None) -> Any:
        """Return a function of parameters and data of one row, for all rows."""
        dims = (0, data.x_dim, *(None if part is None else 0 for part in parts))
        return vmap(function, in_dims=dims)(p, data.x, *parts)

    def _curve(self, p: Tensor, x: Any) -> Tensor:
        return self.f(x, *p)

    def _with_tangents(self, p: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        """Return the curve of one row, and its derivatives by all parameters."""
        directions = torch.eye(len(p), dtype=p.dtype, device=p.device)
        curves, columns = vmap(lambda direction: jvp(lambda q: self._curve(q, x), (p,), (direction,)))(directions)  # type: ignore[misc]
        return curves[0], columns

    def _cost(self, p: Tensor, x: Any, y: Tensor, weights: Tensor | None) -> Tensor:
        """Return half of the sum of squares of one row."""
        r = self._curve(p, x) - y
        return 0.5 * (r if weights is None else r * weights).square().sum()

    def _forward_hessian(self, p: Tensor, *data: Any) -> Tensor:
        """Return the Hessian of the cost of one row by forward-over-reverse differentiation."""
        directions = torch.eye(len(p), dtype=p.dtype, device=p.device)
        return vmap(lambda v: jvp(lambda q: grad(self._cost)(q, *data), (p,), (v,))[1])(directions)  # type: ignore[no-any-return]


class PointwiseModel:
    """Residuals of a model whose value at a point depends only on that point and the parameters.

    Parameters
    ----------
    f : callable
        ``f(x, *p)`` for parameters of the shape (rows, points).
    """

    def __init__(self, f: Callable[..., Tensor]) -> None:
        self.f = f

    def residuals(self, p: Tensor, data: RowData) -> Tensor:
        """Return the weighted residuals of rows."""
        with torch.no_grad():
            return data.weighted(self.f(data.x, *p.T[:, :, None]) - data.y)

    def linearised(self, p: Tensor, data: RowData) -> Tensor:
        """Return the columns of the Jacobians of rows, and the residuals as last column, all of them weighted."""
        with torch.enable_grad():
            parameters = _at_points(p, data)
            curves = self.f(data.x, *parameters)
            derivatives = _derivatives(curves, parameters, torch.ones_like(curves))
        return data.weighted(torch.stack([*derivatives, curves.detach() - data.y], 1))

    def hessians(self, p: Tensor, data: RowData) -> Tensor:
        """Return the Hessians of the costs of rows."""
        n = p.shape[1]
        with torch.enable_grad():
            parameters = _at_points(p, data)
            curves = self.f(data.x, *parameters)
            derivatives = _derivatives(curves, parameters, torch.ones_like(curves), create_graph=True)
            r = data.weighted(data.weighted(curves.detach() - data.y))
            matrix = gram(data.weighted(torch.stack([part.detach() for part in derivatives], 1)))
            for k in range(n):
                second = _derivatives(derivatives[k], parameters[k:], r, retain_graph=True)
                column = torch.stack([part.sum(1) for part in second], 1)
                matrix[:, k, k:] += column
                matrix[:, k + 1 :, k] += column[:, 1:]
        return matrix


def _at_points(p: Tensor, data: RowData) -> list[Tensor]:
    """Return each parameter at all points of all rows, as leaves of a graph."""
    expanded = p.detach()[:, :, None].expand(*p.shape, data.y.shape[1])
    return [part.detach().requires_grad_() for part in expanded.unbind(1)]


def _derivatives(output: Tensor, inputs: list[Tensor], weights: Tensor, **graph: bool) -> list[Tensor]:
    """Return the derivatives at all points, times weights; zeros where the output does not depend on an input."""
    if not output.requires_grad:
        return [torch.zeros_like(output) for _ in inputs]
    derivatives = torch.autograd.grad(output, inputs, weights, allow_unused=True, **graph)
    return [torch.zeros_like(output) if part is None else part for part in derivatives]


def is_pointwise(f: Callable[..., Tensor], p: Tensor, data: RowData, columns: Tensor) -> bool:
    """Return whether a model is pointwise at some rows, given what `MappedModel.linearised` returns there."""
    if len(p) < 2:
        return False  # with one row, a model that mixes rows is not noticed
    try:
        own_columns = PointwiseModel(f).linearised(p, data)
    except Exception:  # whatever the model raises if parameters are no scalars
        return False
    if columns.shape != own_columns.shape:
        return False
    size = torch.zeros_like(columns[:, :, :1])
    size[:, -1, 0] = torch.linalg.vector_norm(data.weighted(data.y), dim=1)
    return bool(same_numbers(columns, own_columns, size).all())


def same_numbers(first: Tensor, second: Tensor, size: Tensor) -> Tensor:
    """Return where two residuals or columns are the same but for roundoff of numbers as large as they or `size`."""
    limit: Tensor = _EQUALITY_TOLERANCE * (torch.linalg.vector_norm(first, dim=-1, keepdim=True) + size)
    same = (first - second).abs() <= limit
    return same if bool(same.all()) else same | ~(first.isfinite() | second.isfinite())
