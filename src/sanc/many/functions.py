"""The functions of all rows, with their derivatives by torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, jvp, vjp, vmap

from sanc.core.model import MAX_FORCING_TERM, TOLERANCE_FRACTION
from sanc.core.spectrum.curvature import DEFAULT_CONFIDENCE
from sanc.errors import ArgumentError, ArgumentTypeError, first_line
from sanc.many import rules
from sanc.many.cubic import CubicModels
from sanc.many.lanczos import RowLanczos, certified_spectra, step_spectra
from sanc.many.rows import Group, RowPoints, RowProblem, Rows, RowScales, Spectra
from sanc.many.rules import ROBUST_RULES, RowRules
from sanc.many.spectra import decompose
from sanc.minimisation.arguments import require_call
from sanc.minimisation.trees import map_tree

ROW_PERTURBATION = 1e-2
"""Relative change of one row in tests of whether another row changes with it."""
_ROUNDOFF_POWER = 0.5
"""Power of machine epsilon: a relative change of a value beyond it is no roundoff of sums, and shows that rows mix."""


class RowFunction:
    """A function of one row that torch maps over all of them, or a function of all rows.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` of one row, or of all rows if `vectorized`.
    args : sequence
        Further arguments.
    dims : sequence of int or None
        For each argument, 0 if it has an entry for each row along its first dimension, or None if all rows share it.
    vectorized : bool
        Whether `fun` receives all rows in one call.
    build : callable
        Forms the argument x of `fun` from the flat variables of a row.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        dims: Sequence[int | None],
        vectorized: bool,
        build: Callable[[Tensor], Any],
    ) -> None:
        self.fun, self.args, self.dims, self.vectorized, self.build = fun, tuple(args), tuple(dims), vectorized, build
        self._forward = True

    def arguments(self, ids: Tensor) -> tuple[Any, ...]:
        """Return the further arguments of some rows."""
        pairs = zip(self.args, self.dims, strict=True)
        return tuple(arg if dim is None else _rows_of(arg, ids) for arg, dim in pairs)

    def _of_row(self, x: Tensor, *args: Any) -> Any:
        """Return fun of the flat variables of one row."""
        return self.fun(self.build(x), *args)

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one row, mapped over all rows."""
        return vmap(function, in_dims=(0, *self.dims), randomness="different")

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return f of some rows."""
        args = self.arguments(ids)
        with torch.no_grad():
            if self.vectorized:
                return self.fun(vmap(self.build)(x), *args)  # type: ignore[no-any-return]
            return self._mapped(self._of_row)(x, *args)  # type: ignore[no-any-return]

    def gradients(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and gradients of some rows."""
        args = self.arguments(ids)
        if self.vectorized:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                values = self.fun(vmap(self.build)(x), *args)
                (g,) = torch.autograd.grad(values.sum(), x)
            return values.detach(), g
        g, values = self._mapped(grad_and_value(self._of_row))(x, *args)
        return values.detach(), g.detach()

    def hessians(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the Hessians of some rows."""
        args = self.arguments(ids)
        if self.vectorized:
            return self._hessians_of_all(x, args)
        if self._forward:
            try:
                return self._mapped(self._hessian_forward)(x, *args).detach()  # type: ignore[no-any-return]
            except (RuntimeError, NotImplementedError):  # an operator without forward derivatives
                self._forward = False
        return self._mapped(jacrev(grad(self._of_row)))(x, *args).detach()  # type: ignore[no-any-return]

    def products(self, x: Tensor, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function that maps a vector of each row to its product with the Hessian there."""
        args = self.arguments(ids)
        if self.vectorized:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(self.fun(vmap(self.build)(point), *args).sum(), point, create_graph=True)
            return lambda v: torch.autograd.grad(g, point, v, retain_graph=True)[0]

        def product(point: Tensor, v: Tensor, *arguments: Any) -> Tensor:
            if self._forward:
                return jvp(lambda z: grad(self._of_row)(z, *arguments), (point,), (v,))[1]  # type: ignore[no-any-return]
            return vjp(lambda z: grad(self._of_row)(z, *arguments), point)[1](v)[0]  # type: ignore[no-any-return]

        mapped = vmap(product, in_dims=(0, 0, *self.dims), randomness="different")
        return lambda v: mapped(x, v, *args).detach()

    def _hessian_forward(self, x: Tensor, *args: Any) -> Tensor:
        """Return the Hessian of one row by forward-over-reverse differentiation."""

        def gradient(point: Tensor) -> Tensor:
            return grad(self._of_row)(point, *args)  # type: ignore[no-any-return]

        identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
        return vmap(lambda v: jvp(gradient, (x,), (v,))[1])(identity)  # type: ignore[no-any-return]

    def _hessians_of_all(self, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Return the Hessians of a function of all rows: a backward pass for each variable."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.fun(vmap(self.build)(x), *args).sum(), x, create_graph=True)
            columns = []
            for k in range(x.shape[1]):
                (column,) = torch.autograd.grad(g[:, k].sum(), x, retain_graph=True, allow_unused=True)
                columns.append(torch.zeros_like(x) if column is None else column)
        return torch.stack(columns, 1).detach()

    def check(self, x: Tensor, *, stores_hessians: bool = True) -> None:
        """Raise an error unless fun can be evaluated and differentiated, row by row."""
        ids = torch.arange(min(2, len(x)), device=x.device)
        require_call("fun", self.fun, "x", self.args)
        try:
            values = self.values(x[ids], ids)
        except ArgumentError:
            raise
        except Exception as error:
            raise ArgumentError(_failure(self, error)) from error
        if not isinstance(values, Tensor) or values.shape != (len(ids),):
            form = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            wanted = "one value for each row" if self.vectorized else "a scalar for each row"
            raise ArgumentError(f"fun returned {form} for {len(ids)} rows: return {wanted}.")
        if values.is_complex() or not values.is_floating_point():
            raise ArgumentTypeError(f"fun returned values of {values.dtype}: return real floating-point numbers.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                g = self.gradients(x[ids], ids)[1]
                if stores_hessians:
                    self.hessians(x[ids], ids)
                else:
                    self._check_products(x[ids], ids)
        except Exception as error:
            raise ArgumentError(
                f"fun cannot be differentiated twice ({first_line(error)}): use operators of torch with derivatives, "
                "and no in-place changes of captured tensors."
            ) from error
        if g.shape != x[ids].shape:
            raise ArgumentError(f"fun has gradients of shape {tuple(g.shape)} for x of {tuple(x[ids].shape)}.")
        if self.vectorized and len(x) > 1:
            self._check_mixing(x, ids, values)

    def _check_products(self, x: Tensor, ids: Tensor) -> None:
        """Make a Hessian product of each row, by backward derivatives if an operator has no forward ones."""
        try:
            self.products(x, ids)(torch.ones_like(x))
        except (RuntimeError, NotImplementedError):
            self._forward = False
            self.products(x, ids)(torch.ones_like(x))

    def _check_mixing(self, x: Tensor, ids: Tensor, values: Tensor) -> None:
        """Raise an error if the value of a row depends on another row."""
        changed = x[ids].clone()
        changed[0] += ROW_PERTURBATION * (1.0 + changed[0].abs())
        after = self.values(changed, ids)
        size = torch.maximum(values.abs().amax(), (after[0] - values[0]).abs())
        limit = torch.finfo(values.dtype).eps ** _ROUNDOFF_POWER * size
        for now, then in ((after[1], values[1]), (self.values(x[:1], ids[:1])[0], values[0])):
            if now.isfinite() and then.isfinite() and (now - then).abs() > limit:
                raise ArgumentError(
                    "fun mixes rows: the value of one row changed with another row. Return a value for each row that "
                    "depends on that row alone, or leave vectorized out and pass a function of one row."
                )


def _rows_of(arg: Any, ids: Tensor) -> Any:
    """Return the entries of some rows, of a tensor or of a tree of tensors."""
    return map_tree(lambda leaf: leaf[ids] if isinstance(leaf, Tensor) else leaf, arg)


def _failure(function: RowFunction, error: Exception) -> str:
    """Return the message for a function that fails on the first rows."""
    if function.vectorized:
        return (
            f"fun failed on the first rows ({first_line(error)}): it is called with some of the rows at a time, so "
            "pass what belongs to rows in args, with in_dims 0."
        )
    return (
        f"fun cannot be mapped over rows by torch.func.vmap ({first_line(error)}): use torch functions of one row "
        "without .item() and without branches on values (torch.where instead), or pass vectorized=True and a function "
        "of all rows."
    )


class FunctionProblem(RowProblem):
    """Functions of rows, with their Hessians: the rules of `minimize`.

    Parameters
    ----------
    function : RowFunction
        The function.
    eps : float
        Machine epsilon of the values.
    tol, curvature_tol : float
        Tolerances on ‖g‖ and on negative curvature; a `curvature_tol` of None follows from `tol` and the units.
    default_tol : bool
        Whether `tol` is the default.
    rules : RowRules
        The decisions that depend on settings of the method.
    """

    def __init__(
        self,
        function: RowFunction,
        eps: float,
        tol: float,
        curvature_tol: float | None,
        default_tol: bool,
        rules: RowRules = ROBUST_RULES,
    ) -> None:
        self.function, self.eps, self.rules = function, eps, rules
        self.tol, self.curvature_tol, self.default_tol = tol, curvature_tol, default_tol

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        value = self.function.values(x, ids).double()
        return torch.where(x.isfinite().all(1), value, torch.nan)

    def gradients(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.function.gradients(x, ids)[1].double()

    def evaluate(self, x: Tensor, ids: Tensor) -> RowPoints:
        value, g = self.function.gradients(x, ids)
        matrix = self.function.hessians(x, ids).double()
        return RowPoints(x, value.double(), g.double(), 0.5 * (matrix + matrix.mT))

    def spectra(self, rows: Rows) -> Spectra:
        return decompose(rows.point.matrix, rows, self.eps)

    def scales(self, rows: Rows, before: RowPoints | None) -> RowScales:
        tol = rows.tol.clamp(min=self.tol)
        if self.curvature_tol is not None:
            return RowScales(rows.point, rows.scale, tol, torch.full_like(tol, self.curvature_tol))
        unit = torch.where(rows.unit_cubic > 0.0, rows.unit_cubic, 1.0).clamp(max=1.0)
        return RowScales(rows.point, rows.scale, tol, (tol * unit).sqrt())


@dataclass(frozen=True)
class KrylovExtras(Group):
    """Where curvature is certified.

    Attributes
    ----------
    is_certifiable : Tensor
        Whether the spectrum is that of a certificate, and not that of a step.
    """

    is_certifiable: Tensor


class LargeFunctionProblem(FunctionProblem):
    """Functions of rows with too many variables for dense Hessians: steps are made in Krylov spaces.

    At a small gradient, the smallest eigenvalue is bounded from a Krylov space with a random start.
    """

    confidence = DEFAULT_CONFIDENCE

    def evaluate(self, x: Tensor, ids: Tensor) -> RowPoints:
        value, g = self.function.gradients(x, ids)
        no_matrix = torch.zeros(len(x), 1, 1, dtype=torch.float64, device=x.device)
        is_certifiable = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return RowPoints(x, value.double(), g.double(), no_matrix, KrylovExtras(is_certifiable))

    def can_certify(self, rows: Rows) -> Tensor:
        is_certifiable: Tensor = rows.point.extras.is_certifiable
        return is_certifiable

    def prepare_certificate(self, point: RowPoints, ids: Tensor) -> RowPoints:
        return replace(point, extras=KrylovExtras(torch.ones_like(point.extras.is_certifiable)))

    def spectra(self, rows: Rows) -> Spectra:
        x, g = rows.point.x, rows.point.g
        products = self.function.products(x, rows.ids)

        def in_float64(v: Tensor) -> Tensor:
            return products(v.to(x.dtype)).double()

        if bool(rows.point.extras.is_certifiable.all()):
            # All rows have the same start vector, so that no row depends on the others.
            start_vector = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            process = RowLanczos(in_float64, start_vector.to(x.device).expand(x.shape), self.eps)
            return certified_spectra(process, g, rows.curvature_tol, self.confidence, self.eps)
        process = RowLanczos(in_float64, g, self.eps)
        return step_spectra(process, self._relative_residuals(rows, process), x.shape[1])

    def _relative_residuals(self, rows: Rows, process: RowLanczos) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the function for `step_spectra`, with the forcing term of `CubicModel`."""
        reduction = torch.where(rows.best_grad_norm < torch.inf, rows.grad_norm / rows.best_grad_norm, 1.0)
        tolerance = torch.maximum(reduction.clamp(max=MAX_FORCING_TERM) * rows.grad_norm, TOLERANCE_FRACTION * rows.tol)

        def relative_residuals(values: Tensor, c: Tensor, last: Tensor) -> Tensor:
            product_norm = torch.hypot(process.alpha[0], process.beta[0])
            unit = rules.measure_units(rows.point.value, rows.grad_norm, product_norm, rows.x_norm)[1]
            sigma = torch.where(rows.first_length_scale > 0.0, rows.sigma, self.rules.first_sigma(unit))
            return (last * CubicModels(values, c).solve(sigma).y).sum(1).abs() / tolerance

        return relative_residuals
