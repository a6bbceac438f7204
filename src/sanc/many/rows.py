"""The state of the rows of a batch, and the interface of the problems that they minimise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
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
    matrix : Tensor
        The Hessians, or the matrices of the model.
    more : dict of Tensor
        What the problem needs later, a row each.
    """

    value: Tensor
    g: Tensor
    matrix: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)

    def is_finite(self) -> Tensor:
        """Return where all numbers are finite."""
        largest = torch.maximum(self.g.abs().amax(1), self.matrix.abs().flatten(1).amax(1))  # NaN if one is NaN
        return self.value.isfinite() & largest.isfinite()


@dataclass(frozen=True, slots=True)
class Before:
    """The points of rows before their last step, with what was evaluated there."""

    x: Tensor
    value: Tensor
    g: Tensor
    more: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Spectra:
    """Eigenvalues of the curvature of free variables, eigenvectors as columns, and the gradients in their bases.

    `lambda_error` is the rounding error of eigenvalues. In Krylov spaces it bounds the smallest one, or is infinite.
    """

    values: Tensor
    vectors: Tensor
    c: Tensor
    lambda_error: Tensor


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
    sigma, unit_length, unit_cubic, last_step_norm, grad_norm, x_norm
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
    sigma_untested, truncated : Tensor
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
    sigma_untested: Tensor
    truncated: Tensor
    trial: Tensor
    next_x: Tensor
    lower: Tensor | None = None
    upper: Tensor | None = None
    free: Tensor | None = None
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    g: Tensor = field(default_factory=lambda: torch.empty(0))
    matrix: Tensor = field(default_factory=lambda: torch.empty(0))
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
            sigma_untested=torch.zeros(count, dtype=torch.bool, device=device),
            truncated=torch.zeros(count, dtype=torch.bool, device=device),
            trial=x,
            next_x=x,
            lower=lower,
            upper=upper,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: Tensor) -> Rows:
        """Return some of the rows, as copies."""
        taken: dict[str, Tensor] = {}
        for names in self._groups():
            stacked = torch.stack([self._entry(name) for name in names])
            taken |= zip(names, stacked.index_select(1, indices).unbind(), strict=True)
        return self._with_entries(taken)

    def put(self, indices: Tensor, others: Rows) -> None:
        """Replace some of the rows."""
        entries: dict[str, Tensor] = {}
        for names in self._groups():
            stacked = torch.stack([self._entry(name) for name in names])
            stacked.index_copy_(1, indices, torch.stack([others._entry(name) for name in names]))
            entries |= zip(names, stacked.unbind(), strict=True)
        changed = self._with_entries(entries)
        for item in fields(self):
            setattr(self, item.name, getattr(changed, item.name))

    def join(self, others: Rows) -> Rows:
        """Return the rows followed by others."""
        joined: dict[str, Tensor] = {}
        for names in self._groups():
            stacks = [torch.stack([rows._entry(name) for name in names]) for rows in (self, others)]
            joined |= zip(names, torch.cat(stacks, 1).unbind(), strict=True)
        return self._with_entries(joined)

    def _groups(self) -> Iterable[list[str]]:
        """Return the names of the tensors that have the same type and shape: each group is copied at once.

        Those of `more` are named more.*.
        """
        groups: dict[Any, list[str]] = {}
        entries = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "more"}
        entries |= {f"{_MORE}{name}": part for name, part in self.more.items()}
        for name, entry in entries.items():
            if entry is not None and entry.numel():
                groups.setdefault((entry.dtype, entry.shape), []).append(name)
        return groups.values()

    def _entry(self, name: str) -> Tensor:
        """Return a tensor by the name that `_groups` gives it."""
        entry: Tensor = self.more[name.removeprefix(_MORE)] if name.startswith(_MORE) else getattr(self, name)
        return entry

    def _with_entries(self, entries: dict[str, Tensor]) -> Rows:
        """Return rows with the tensors that `_groups` names replaced."""
        more = {name.removeprefix(_MORE): part for name, part in entries.items() if name.startswith(_MORE)}
        fixed = {name: part for name, part in entries.items() if not name.startswith(_MORE)}
        return replace(self, **fixed, more=self.more | more)

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
    "sigma", "unit_length", "unit_cubic", "last_step_norm", "grad_norm", "x_norm", "tol",
    "curvature_tol", "lambda_error", "best_grad_norm", "first_value", "step_sigma", "step_norm", "predicted",
    "multiplier", "next_value", "next_sigma", "next_norm", "next_predicted", "next_step_sigma",
)  # fmt: skip
_MORE = "more."
"""Prefix of the names of entries of `Rows.more`."""
_INTEGERS = ("stall", "flat", "nit", "nfev", "njev", "status", "mode", "trials", "halvings", "verdict")


class Problem:
    """The problems of all rows, and the rules in which kinds of problems differ.

    Attributes
    ----------
    eps : float
        Machine epsilon of the values.
    default_tol : bool
        Whether the tolerance is the default one, which is raised to the rounding error of the gradient.
    tries_longer_steps : bool
        Whether longer steps are tried if f decreases by more than predicted.
    confidence : float
        Probability with which the bound of the smallest eigenvalue holds.
    """

    eps: float
    default_tol: bool
    tries_longer_steps = True
    confidence = 1.0

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

    def spectra(self, rows: Rows) -> Spectra:
        """Return eigenpairs of the curvature of all rows."""
        raise NotImplementedError

    def is_complete(self, rows: Rows) -> Tensor:
        """Return where `matrix` is the whole Hessian, with which curvature is tested."""
        return torch.ones(len(rows), dtype=torch.bool, device=rows.x.device)

    def set_whole_hessians(self, rows: Rows, indices: Tensor | None = None) -> None:
        """Replace the matrices of all rows, or of some, by the whole Hessians."""

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
