"""The result of `minimize`: SciPy's `OptimizeResult`, printed so that it fits a screen."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from torch import Tensor

from sanc.core.record import Calls, Record
from sanc.core.runs.status import Status
from sanc.core.spectrum.curvature import Certificate
from sanc.errors import TERMINAL_WIDTH, missing_attribute

PointT = TypeVar("PointT", bound=Tensor | NDArray[Any])
"""A point that is one tensor or one array."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Entries = dict[str, Any]  # SciPy's class is not typed: with it type checkers would accept any attribute
    P = TypeVarWithDefault("P", default=Any)  # a point in the form of `x0`
else:
    Entries, P = OptimizeResult, TypeVar("P")

_PRINTED_FIRST = ("message", "success", "status", "fun", "x", "jac")
"""Entries that are printed first, in SciPy's order."""
_NESTED_LINES = 8
"""Lines of a nested point, beyond which only the number of entries is printed: a result then has at most 45 lines."""


_OTHER_ATTRIBUTES = {
    **dict.fromkeys(("grad", "gradient"), "use jac"),
    **dict.fromkeys(("loss", "value", "f", "cost"), "use fun, the value at x"),
    **dict.fromkeys(("params", "solution", "xopt"), "use x"),
    **dict.fromkeys(("n_iter", "niter", "iterations"), "use nit"),
    **dict.fromkeys(("converged", "is_converged"), "use success"),
    **dict.fromkeys(
        ("hess", "hess_inv"),
        "no such matrix is kept; certificate has bounds of the smallest eigenvalue, and torch.func.hessian(fun)(x) "
        "returns the Hessian of a function of torch",
    ),
    "allvecs": "collect the points in a callback",
    "record": "use history[-1], the record of the last iteration",
    "optimality": "use the norm of jac, and with bounds the norm of jac - multipliers",
    **dict.fromkeys(("maxcv", "constr_violation"), "the only constraints are bounds, and no point violates them"),
    "execution_time": "use history[-1].seconds",
}
"""Attributes of the results of other minimisers, and what to use instead."""


class Result(Entries, Generic[P]):
    """SciPy's result, whose `repr` abbreviates long vectors and prints the number of records in the history.

    The intermediate result of a callback has only `x`, `fun`, `nit`, `record` and `state`.

    Attributes
    ----------
    x : array, Tensor or pytree of these
        The final point, in the form of `x0`.
    fun : float
        The value of f there.
    jac : array, Tensor or pytree of these
        The gradient there, in the form of `x0`.
    success : bool
        Whether the run reached a second-order point as far as it could be tested.
    status : Status
        Why the run ended.
    message : str
        The same as a sentence.
    nit : int
        Number of iterations.
    nfev, njev, nhev : int
        Numbers of values, gradients and Hessian products, without certificates, probes for negative curvature, and
        tests of how the run ends.
    history : list of Record
        The records of all iterations.
    calls : Calls
        Evaluations of components.
    certificate : Certificate or None
        The certificate of the final point.
    hvp : str
        How torch computed Hessian products; empty if it did not.
    active, multipliers, weakly_active : array, Tensor or pytree of these
        With bounds: −1 at the lower bound, 1 at the upper one, otherwise 0; the gradient at active bounds; and where
        the multiplier of an active bound is zero within its error.
    record : Record
        In a callback: the record of the last iteration.
    state : dict
        In a callback: the state that `resume` accepts.
    """

    x: P
    fun: float
    jac: P
    success: bool
    status: Status
    message: str
    nit: int
    nfev: int
    njev: int
    nhev: int
    history: list[Record]
    calls: Calls
    certificate: Certificate | None
    hvp: str
    active: P
    multipliers: P
    weakly_active: P
    record: Record
    state: dict[str, Any]

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise missing_attribute(self, name, _OTHER_ATTRIBUTES) from None

    def __repr__(self) -> str:
        names = [
            *(name for name in _PRINTED_FIRST if name in self),
            *(name for name in self if name not in _PRINTED_FIRST),
        ]
        width = max(map(len, names), default=0)
        lines = []
        for name in names:
            first, *others = _lines(self[name], TERMINAL_WIDTH - width - 2)
            lines += [f"{name:>{width}}: {first}", *(" " * (width + 2) + line for line in others)]
        return "\n".join(lines)

    __str__ = __repr__


class LeastSquaresResult(Result[P]):
    """The result of `least_squares`, with the names of SciPy. `fun` are the residuals, and `jac` is their Jacobian.

    Attributes
    ----------
    cost : float
        The sum of squares, halved, or the loss.
    fun : array or Tensor
        The residuals.
    jac : array, Tensor or operator
        Their Jacobian.
    grad : array or Tensor
        The gradient of the cost.
    optimality : float
        The largest entry of the gradient that is not held by a bound.
    active_mask : ndarray
        −1 at a lower bound, 1 at an upper one, otherwise 0.
    second_order : bool
        Whether the model of the last step had the second-order term.
    """

    cost: float
    fun: Any
    jac: Any
    grad: Any
    optimality: float
    active_mask: NDArray[np.int_]
    second_order: bool


def cause_of_start(status: Status, **parts: Any) -> str:
    """Return which part is not finite at the starting point, and the remedy; empty for another status.

    `parts` are arrays and numbers by their names in the message, in the order in which they are computed.
    """
    if status is not Status.NOT_FINITE:
        return ""
    for name, part in parts.items():
        array = part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            index = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
            place = f"Entry {index[0] if len(index) == 1 else index} of the {name}" if index else name
            return f" {place} is {array[index]}: pass an x0 where it is finite, or correct the function."
    return f" Finite there: {', '.join(parts)}. Correct the second derivatives, or leave them out."


def _lines(value: Any, width: int) -> list[str]:
    """Return a value as a few lines of this width."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        with np.printoptions(threshold=6, edgeitems=2, precision=4):
            entries = " ".join(str(value.reshape(-1)).split()) if value.ndim else str(value)
        text = entries + (f" ({'×'.join(map(str, value.shape))})" if value.size > 6 or value.ndim > 1 else "")
    elif isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_is_array_or_mapping, value))):
        return _nested(value, width)
    elif isinstance(value, list):
        text = f"{len(value)} × {type(value[0]).__name__}" if value else "none"
    elif isinstance(value, IntEnum):
        text = f"{value:d} ({value.name})"
    else:
        text = str(value)
    return textwrap.wrap(text, width) or [""]


def _nested(value: Any, width: int) -> list[str]:
    """Return a nested point as lines, one key after the other."""
    items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    lines: list[str] = []
    for number, (key, part) in enumerate(items):
        if len(lines) >= _NESTED_LINES:
            return [*lines, f"… and {len(items) - number} more"]
        first, *others = _lines(part, max(20, width - len(str(key)) - 2))
        lines += [f"{key}: {first}", *(" " * (len(str(key)) + 2) + line for line in others)]
    return lines or ["empty"]


def _is_array_or_mapping(part: Any) -> bool:
    """Return whether an entry of a list makes it a nested point."""
    return isinstance(part, np.ndarray | Tensor | Mapping)
