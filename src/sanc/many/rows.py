"""The state of the rows of a batch, and the interface of the problems that they minimise."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from sanc.core.bounds import Box
from sanc.many import rules

CUBIC, LONGER, ESCAPE = 0, 1, 2
"""What the trial point of a row is: a cubic step, a longer one after a success, or an escape step."""
RUNNING, WAITING = -1, -2
"""The status of a row that has not ended, and of one whose gradient is small and whose curvature is to be tested."""


@dataclass
class Evaluation:
    """Values, gradients and curvature at the points of some rows.

    Attributes
    ----------
    value : Tensor
        f, in float64.
    g : Tensor
        The gradients.
    matrix : Tensor or None
        The Hessians, or the matrices of the model; None if the problem has Hessian products only.
    more : dict of Tensor
        What the problem needs later, a row each.
    """

    value: Tensor
    g: Tensor
    matrix: Tensor | None
    more: dict[str, Tensor] = field(default_factory=dict)

    def is_finite(self) -> Tensor:
        """Return where all numbers are finite."""
        finite = self.value.isfinite() & self.g.isfinite().all(1)
        return finite if self.matrix is None else finite & self.matrix.isfinite().flatten(1).all(1)


@dataclass(frozen=True, slots=True)
class Before:
    """The points of rows before their last step, with what was evaluated there."""

    x: Tensor
    value: Tensor
    g: Tensor
    more: dict[str, Tensor]


@dataclass
class Rows:
    """The rows that have not ended. Every tensor has one entry, vector or matrix for each of them.

    Attributes
    ----------
    ids : Tensor
        The numbers of the rows in the call of the user.
    x, value, g, matrix, more
        The current points, with what was evaluated there.
    scale : Tensor
        Units of the variables: norms, gradients and steps of the rules are those of x/scale.
    lower, upper : Tensor or None
        The bounds.
    free : Tensor or None
        The variables that the step may change; None if there are no bounds.
    values, vectors, c : Tensor
        Eigenvalues of the curvature of the free variables, eigenvectors as columns, and the gradient in their basis.
    sigma, unit_length, unit_cubic, last_step_norm, last_grad_norm, grad_norm, x_norm
        As in `sanc.core.point`.
    tol, curvature_tol, lambda_error : Tensor
        Tolerances of the row, and the error of its eigenvalues.
    stall, best_grad_norm, flat : Tensor
        Iterations without progress, the smallest gradient norm, and iterations whose model predicted no decrease beyond
        roundoff.
    first_value : Tensor
        f at the start.
    nit, nfev, njev, status : Tensor
        Counts, and the ending.
    mode, trials, halvings : Tensor
        What the trial point is, trial points of the iteration, and halvings of its escape step.
    trial, step_sigma, step_norm, predicted, multiplier : Tensor
        The trial point, with σ, norm, predicted decrease and μ of its step.
    untested, truncated : Tensor
        Whether no value of f has confirmed σ, and whether bounds truncated the step.
    next_x, next_value, next_sigma, next_norm, next_predicted, next_step_sigma, verdict : Tensor
        The accepted trial point with its step, and the class of the first accepted step of the iteration.
    """

    ids: Tensor
    x: Tensor
    scale: Tensor
    sigma: Tensor
    unit_length: Tensor
    unit_cubic: Tensor
    last_step_norm: Tensor
    last_grad_norm: Tensor
    grad_norm: Tensor
    x_norm: Tensor
    tol: Tensor
    curvature_tol: Tensor
    lambda_error: Tensor
    best_grad_norm: Tensor
    first_value: Tensor
    step_sigma: Tensor
    step_norm: Tensor
    predicted: Tensor
    multiplier: Tensor
    next_value: Tensor
    next_sigma: Tensor
    next_norm: Tensor
    next_predicted: Tensor
    next_step_sigma: Tensor
    stall: Tensor
    flat: Tensor
    nit: Tensor
    nfev: Tensor
    njev: Tensor
    status: Tensor
    mode: Tensor
    trials: Tensor
    halvings: Tensor
    verdict: Tensor
    untested: Tensor
    truncated: Tensor
    trial: Tensor
    next_x: Tensor
    lower: Tensor | None = None
    upper: Tensor | None = None
    free: Tensor | None = None
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    g: Tensor = field(default_factory=lambda: torch.empty(0))
    matrix: Tensor | None = None
    more: dict[str, Tensor] = field(default_factory=dict)
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    vectors: Tensor = field(default_factory=lambda: torch.empty(0))
    c: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def start(cls, ids: Tensor, x: Tensor, lower: Tensor | None, upper: Tensor | None) -> Rows:
        """Return rows at their starting points, before the first evaluation."""
        count, device = len(x), x.device
        numbers: dict[str, Any] = {}
        numbers |= {name: torch.zeros(count, dtype=torch.float64, device=device) for name in _NUMBERS}
        numbers |= {name: torch.zeros(count, dtype=torch.long, device=device) for name in _INTEGERS}
        return cls(
            ids=ids,
            x=x,
            scale=torch.ones(x.shape, dtype=torch.float64, device=device),
            **numbers,
            untested=torch.zeros(count, dtype=torch.bool, device=device),
            truncated=torch.zeros(count, dtype=torch.bool, device=device),
            trial=x,
            next_x=x,
            lower=lower,
            upper=upper,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor) -> Rows:
        """Return some of the rows, as copies."""
        return Rows(**{item.name: _taken(getattr(self, item.name), rows) for item in fields(self)})

    def put(self, rows: Tensor, others: Rows) -> None:
        """Replace some of the rows."""
        self._separate()
        for item in fields(self):
            _put(getattr(self, item.name), rows, getattr(others, item.name))

    def _separate(self) -> None:
        """Copy tensors that share their memory with another one, so that each can be changed in place."""
        known: set[int] = set()
        for item in fields(self):
            entry = getattr(self, item.name)
            if isinstance(entry, Tensor) and entry.numel():
                if entry.data_ptr() in known:
                    setattr(self, item.name, entry.clone())
                known.add(entry.data_ptr())
        for name, part in self.more.items():
            if part.data_ptr() in known:
                self.more[name] = part.clone()
            known.add(part.data_ptr())

    def join(self, others: Rows) -> Rows:
        """Return the rows followed by others."""
        return Rows(**{i.name: _joined(getattr(self, i.name), getattr(others, i.name)) for i in fields(self)})

    def accept(self, found: Evaluation) -> None:
        """Set what was evaluated at x."""
        self.value, self.g, self.matrix, self.more = found.value, found.g, found.matrix, self.more | found.more

    @property
    def box(self) -> Box | None:
        """The bounds; None if there are none."""
        return None if self.lower is None or self.upper is None else Box(self.lower, self.upper)

    @property
    def unit_value(self) -> Tensor:
        """The units of f: the change of f over a unit of length."""
        return self.unit_cubic * self.unit_length**3

    @property
    def ritz_value(self) -> Tensor:
        """The smallest eigenvalues."""
        return self.values[:, 0]

    @property
    def curvature(self) -> Tensor:
        """The largest absolute eigenvalues."""
        return torch.maximum(-self.values[:, 0], self.values[:, -1])


_NUMBERS = (
    "sigma", "unit_length", "unit_cubic", "last_step_norm", "last_grad_norm", "grad_norm", "x_norm", "tol",
    "curvature_tol", "lambda_error", "best_grad_norm", "first_value", "step_sigma", "step_norm", "predicted",
    "multiplier", "next_value", "next_sigma", "next_norm", "next_predicted", "next_step_sigma",
)  # fmt: skip
_INTEGERS = ("stall", "flat", "nit", "nfev", "njev", "status", "mode", "trials", "halvings", "verdict")


def _taken(entry: Any, rows: Tensor) -> Any:
    if isinstance(entry, dict):
        return {name: part[rows] for name, part in entry.items()}
    return entry[rows] if isinstance(entry, Tensor) and entry.ndim and len(entry) else entry


def _put(entry: Any, rows: Tensor, other: Any) -> None:
    if isinstance(entry, dict):
        for name, part in entry.items():
            part[rows] = other[name]
    elif isinstance(entry, Tensor):
        entry[rows] = other


def _joined(entry: Any, other: Any) -> Any:
    if isinstance(entry, dict):
        return {name: torch.cat([part, other[name]]) for name, part in entry.items()}
    return torch.cat([entry, other]) if isinstance(entry, Tensor) else entry


class Problem:
    """The problems of all rows, and the rules in which kinds of problems differ.

    Attributes
    ----------
    dim : int
        Variables of a row.
    eps : float
        Machine epsilon of the values.
    default_tol : bool
        Whether the tolerance is the default one, which is raised to the rounding error of the gradient.
    scales : bool
        Whether variables have units of their own.
    tries_longer_steps : bool
        Whether longer steps are tried if f decreases by more than predicted.
    """

    dim: int
    eps: float
    default_tol: bool
    scales: bool
    tries_longer_steps = True

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return f of some rows, in float64."""
        raise NotImplementedError

    def gradients(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the gradients of some rows, in float64."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, ids: Tensor) -> Evaluation:
        """Return values, gradients and curvature of some rows."""
        raise NotImplementedError

    def prepare(self, rows: Rows, before: Before | None) -> None:
        """Set scales and tolerances of rows at new points; `before` has the points before the last step."""
        raise NotImplementedError

    def is_complete(self, rows: Rows) -> Tensor:
        """Return where `matrix` is the whole Hessian, with which curvature is tested."""
        return torch.ones(len(rows), dtype=torch.bool, device=rows.x.device)

    def complete(self, rows: Rows) -> None:
        """Replace the matrices of rows by the whole Hessians."""

    # Rules for σ and the step norm.

    def first_sigma(self, rows: Rows) -> Tensor:
        """Return the initial σ."""
        return rules.first_sigma(rows.unit_cubic)

    def max_step_norm(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the limits on the step norms, and where they are limits for the first step too."""
        limit = rules.max_step_norm(rows.unit_length, rows.x_norm, rows.last_step_norm)
        return limit, rows.last_step_norm > 0.0

    def after_trial(self, rows: Rows, verdict: Tensor, actual: Tensor, rounding: Tensor) -> Tensor:
        """Return σ after the trial steps."""
        return rules.after_trial(rows.step_sigma, verdict, actual, rows.predicted, rows.step_norm, rounding)
