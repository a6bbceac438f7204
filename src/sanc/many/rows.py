"""The state of the rows of a batch, and the interface of the problems that they minimise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sanc.core.bounded.bounds import Box
from sanc.many.rules import ROBUST_RULES

PENDING, CUBIC, LONGER, ESCAPE = -1, 0, 1, 2
"""What the trial point of a row is: not proposed yet, a cubic step, a longer one after a success, or an escape step."""
RUNNING, WAITING = -1, -2
"""The status of a row that has not ended, and of one whose gradient is small and whose curvature is to be tested."""

AnyGroup = TypeVar("AnyGroup", bound="Group")


class Group:
    """Tensors of one purpose, each with an entry, vector or matrix for each row.

    Subclasses are dataclasses, whose fields may also be groups or None.
    """

    def take(self: AnyGroup, indices: Tensor) -> AnyGroup:
        """Return some of the rows, as copies."""
        return self._mapped(_once(lambda entry: entry.index_select(0, indices)))

    def put(self: AnyGroup, indices: Tensor, others: AnyGroup, unchanged: AnyGroup | None = None) -> AnyGroup:
        """Return the rows with some of them replaced by others.

        `unchanged` are the rows that were taken at these indices before they changed. A tensor that `others` still
        share with them is not copied: if only σ has changed, only σ is copied.
        """
        return self._mapped(
            _once(lambda entry, other, old: entry if other is old else entry.index_copy(0, indices, other)),
            others,
            self if unchanged is None else unchanged,
        )

    def join(self: AnyGroup, *others: AnyGroup) -> AnyGroup:
        """Return the rows followed by others."""
        return self._mapped(_once(lambda *entries: torch.cat(entries)), *others)

    def where(self: AnyGroup, chosen: Tensor, others: AnyGroup) -> AnyGroup:
        """Return the rows where `chosen` is true, and the rows of `others` elsewhere."""
        return self._mapped(
            _once(lambda entry, other: entry if entry is other else torch.where(_like(chosen, entry), entry, other)),
            others,
        )

    def _mapped(self: AnyGroup, function: Callable[..., Tensor], *others: AnyGroup) -> AnyGroup:
        """Return a group of the results of a function of the tensors with the same name in several groups."""
        columns = zip(vars(self).items(), *(vars(other).values() for other in others), strict=True)
        return type(self)(**{name: _applied(function, entry, *entries) for (name, entry), *entries in columns})


def _once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is computed once for the same tensors: tensors that groups share stay shared.

    For example, `rows.accepted.trial.x` may be the tensor `rows.trial.x`. `take` then selects rows from it once, and
    both names have the one result. The tensors live as long as the groups, so that no two of them have the same `id`.
    """
    results: dict[tuple[int, ...], Tensor] = {}

    def computed(*entries: Tensor) -> Tensor:
        identities = tuple(map(id, entries))
        if identities not in results:
            results[identities] = function(*entries)
        return results[identities]

    return computed


def _applied(function: Callable[..., Tensor], entry: Any, *others: Any) -> Any:
    """Apply a function to tensors, or to all tensors of groups; None stays None."""
    if isinstance(entry, Group):
        return entry._mapped(function, *others)
    return None if entry is None else function(entry, *others)


def _like(chosen: Tensor, entry: Tensor) -> Tensor:
    """Return a mask of rows with as many dimensions as a tensor."""
    return chosen if entry.ndim == 1 else chosen.reshape(-1, *[1] * (entry.ndim - 1))


@dataclass(frozen=True)
class RowPoints(Group):
    """Points, with what was evaluated there.

    Attributes
    ----------
    x : Tensor
        The points.
    value : Tensor
        f, in float64.
    g : Tensor
        The gradients.
    matrix : Tensor
        The Hessians, or the matrices of the model.
    extras : Group or None
        What else the problem evaluates at points and needs later; None: nothing.
    """

    x: Tensor
    value: Tensor
    g: Tensor
    matrix: Tensor
    extras: Any = None

    def are_finite(self) -> bool:
        """Return whether all numbers are finite, and small enough that their sum is."""
        return math.isfinite((self.value.sum() + self.g.sum() + self.matrix.sum()).item())

    def is_finite(self) -> Tensor:
        """Return where all numbers are finite."""
        largest = torch.maximum(self.g.abs().amax(1), self.matrix.abs().flatten(1).amax(1))  # NaN if one is NaN
        return torch.maximum(largest, self.value.abs()) < torch.inf


@dataclass(frozen=True)
class Spectra(Group):
    """The spectra of the curvature of free variables.

    Attributes
    ----------
    values, vectors : Tensor
        The eigenvalues, ascending, and the eigenvectors as columns.
    c : Tensor
        The gradients in the bases of the eigenvectors.
    lambda_error : Tensor
        The rounding errors of the eigenvalues. In Krylov spaces they bound those of the smallest ones, or are infinite.
    """

    values: Tensor
    vectors: Tensor
    c: Tensor
    lambda_error: Tensor

    @property
    def ritz_value(self) -> Tensor:
        """The smallest eigenvalues."""
        return self.values[:, 0]

    @property
    def hessian_norm(self) -> Tensor:
        """The largest absolute eigenvalues."""
        return torch.maximum(-self.values[:, 0], self.values[:, -1])


@dataclass(frozen=True)
class RowTrials(Group):
    """Trial points, with their steps.

    Attributes
    ----------
    mode : Tensor
        What the trial point is.
    x : Tensor
        The trial points.
    sigma, norm, predicted, multiplier : Tensor
        σ, norm, predicted decrease and μ of the step.
    truncated : Tensor
        Whether bounds truncated the step.
    """

    mode: Tensor
    x: Tensor
    sigma: Tensor
    norm: Tensor
    predicted: Tensor
    multiplier: Tensor
    truncated: Tensor

    @classmethod
    def pending(cls, x: Tensor) -> RowTrials:
        """Return rows without a trial point."""
        zero = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        mode = torch.full(zero.shape, PENDING, device=x.device)
        return cls(mode, x, zero, zero, zero, zero, zero.bool())


@dataclass(frozen=True)
class Accepted(Group):
    """The trial points that are accepted in an iteration so far.

    Attributes
    ----------
    trial : RowTrials
        The trial points.
    value : Tensor
        Their values.
    sigma : Tensor
        σ of the next iteration.
    verdict : Tensor
        The class of the first accepted step of the iteration.
    """

    trial: RowTrials
    value: Tensor
    sigma: Tensor
    verdict: Tensor


@dataclass(frozen=True)
class RowScales:
    """What a problem determines at new points of its rows.

    Attributes
    ----------
    point : RowPoints
        The points, whose `matrix` and `extras` the problem may have completed.
    scale : Tensor
        Units of the variables.
    tol, curvature_tol : Tensor
        Tolerances on the gradient norm and on negative curvature.
    step_growth, gradient_growth : Tensor or None
        Ratios of the norms of steps and gradients in the new units to those in the old ones; None: the units are the
        same.
    """

    point: RowPoints
    scale: Tensor
    tol: Tensor
    curvature_tol: Tensor
    step_growth: Tensor | None = None
    gradient_growth: Tensor | None = None


@dataclass
class Rows(Group):
    """The rows that have not ended. Only `ManyIteration`, its `RowProposals` and `RowRun` change them.

    Attributes
    ----------
    ids : Tensor
        The numbers of the rows in the call of the user.
    point, spectra : RowPoints, Spectra
        The current points, and the spectra of their curvature.
    trial, accepted : RowTrials, Accepted
        The trial points, and the accepted ones.
    lower, upper : Tensor or None
        The bounds.
    free : Tensor or None
        The variables that the step may change; None if there are no bounds.
    scale : Tensor
        Units of the variables: norms, gradients and steps of the rules refer to x/scale.
    sigma, first_length_scale, unit_cubic, last_step_norm, grad_norm, x_norm
        As in `sanc.core.point`.
    sigma_unconfirmed : Tensor
        Whether no value of f has confirmed σ.
    tol, curvature_tol : Tensor
        Tolerances of the row.
    first_value : Tensor
        f at the start.
    best_grad_norm, stalled_iterations, flat_iterations : Tensor
        The smallest gradient norm, iterations without progress, and iterations whose model predicted no decrease beyond
        roundoff.
    nit, nfev, njev, status : Tensor
        Counts, and the ending.
    trial_count, halvings : Tensor
        Trial points of the iteration, and halvings of its escape step.
    """

    ids: Tensor
    point: RowPoints
    spectra: Spectra
    trial: RowTrials
    accepted: Accepted
    lower: Tensor | None
    upper: Tensor | None
    free: Tensor | None
    scale: Tensor
    sigma: Tensor
    sigma_unconfirmed: Tensor
    first_length_scale: Tensor
    unit_cubic: Tensor
    last_step_norm: Tensor
    grad_norm: Tensor
    x_norm: Tensor
    tol: Tensor
    curvature_tol: Tensor
    first_value: Tensor
    best_grad_norm: Tensor
    stalled_iterations: Tensor
    flat_iterations: Tensor
    nit: Tensor
    nfev: Tensor
    njev: Tensor
    status: Tensor
    trial_count: Tensor
    halvings: Tensor

    @classmethod
    def start(cls, ids: Tensor, point: RowPoints, lower: Tensor | None, upper: Tensor | None) -> Rows:
        """Return rows at their starting points, whose scales, tolerances and spectra are still to be set."""
        zero = torch.zeros_like(point.value)
        none, count = zero.bool(), zero.long()
        trial = RowTrials.pending(point.x)
        return cls(
            ids=ids,
            point=point,
            spectra=Spectra(point.g, point.matrix, point.g, zero),
            trial=trial,
            accepted=Accepted(trial, zero, zero, count),
            lower=lower,
            upper=upper,
            free=None,
            scale=torch.ones_like(point.g),
            sigma=zero,
            sigma_unconfirmed=none,
            first_length_scale=zero,
            unit_cubic=zero,
            last_step_norm=zero,
            grad_norm=zero,
            x_norm=zero,
            tol=zero,
            curvature_tol=zero,
            first_value=point.value,
            best_grad_norm=torch.full_like(zero, torch.inf),
            stalled_iterations=count,
            flat_iterations=count,
            nit=count,
            nfev=torch.ones_like(count),
            njev=torch.ones_like(count),
            status=torch.full_like(count, RUNNING),
            trial_count=count,
            halvings=count,
        )

    def restarted(self, point: RowPoints) -> Rows:
        """Return the rows as at a start, at lower points beside a saddle: with their counts, scales and tolerances."""
        return replace(
            Rows.start(self.ids, point, self.lower, self.upper),
            first_value=self.first_value,
            scale=self.scale,
            tol=self.tol,
            nit=self.nit,
            nfev=self.nfev,
            njev=self.njev,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def set(self, indices: Tensor, others: Rows, unchanged: Rows | None = None) -> None:
        """Replace some of the rows, in place, as `put` does."""
        changed = self.put(indices, others, unchanged)
        for item in fields(self):
            setattr(self, item.name, getattr(changed, item.name))

    def discard_trials(self) -> None:
        """Leave out the trial points of rows that begin an iteration, so that none are copied with the rows."""
        self.trial = RowTrials.pending(self.point.x)
        self.accepted = Accepted(self.trial, self.trial.sigma, self.trial.sigma, self.trial_count)

    @property
    def box(self) -> Box | None:
        """The bounds; None if there are none."""
        return None if self.lower is None or self.upper is None else Box(self.lower, self.upper)

    @property
    def unit_value(self) -> Tensor:
        """The units of f: the change of f over the length scale."""
        return self.unit_cubic * self.first_length_scale**3


class RowProblem:
    """The problems of all rows, and the rules in which kinds of problems differ.

    Attributes
    ----------
    eps : float
        Machine epsilon of the values.
    default_tol : bool
        Whether the tolerance is the default one, which is raised to the rounding error of the gradient.
    tries_longer_steps : bool
        Whether longer steps are tried if f decreases by more than predicted.
    is_bounded_below : bool
        Whether f is known to be bounded below, so that no row is unbounded.
    confidence : float
        Probability with which the bound of the smallest eigenvalue holds.
    outputs : tuple of str
        Names of what the run keeps of `RowPoints.extras`.
    rules : RowRules
        The decisions that depend on settings of the method.
    """

    eps: float
    default_tol: bool
    rules = ROBUST_RULES
    tries_longer_steps = True
    is_bounded_below = False
    confidence = 1.0
    outputs: tuple[str, ...] = ()

    def values(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return f of some rows, in float64."""
        raise NotImplementedError

    def gradients(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the gradients of some rows, in float64."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, ids: Tensor) -> RowPoints:
        """Return points of some rows, with values, gradients and curvature."""
        raise NotImplementedError

    def evaluate_trials(self, x: Tensor, ids: Tensor) -> tuple[Tensor, RowPoints | None]:
        """Return f at trial points of some rows, and the evaluated points if that costs little more.

        The latter is for problems that try no longer steps, so that a row moves only to its last trial point.
        """
        return self.values(x, ids), None

    def scales(self, rows: Rows, before: RowPoints | None) -> RowScales:
        """Return scales and tolerances of rows at new points; `before` has the points before the last step."""
        raise NotImplementedError

    def spectra(self, rows: Rows) -> Spectra:
        """Return eigenpairs of the curvature of all rows."""
        raise NotImplementedError

    def can_certify(self, rows: Rows) -> Tensor:
        """Return where curvature can be certified: where `matrix` is the whole Hessian."""
        return torch.ones(len(rows), dtype=torch.bool, device=rows.ids.device)

    def prepare_certificate(self, point: RowPoints, ids: Tensor) -> RowPoints:
        """Return points at which curvature can be certified: with the whole Hessians as their matrices."""
        return point

    # Rules for σ and the step norm.

    def first_sigma(self, rows: Rows) -> Tensor:
        """Return the initial σ."""
        return self.rules.first_sigma(rows.unit_cubic)

    def max_step_norm(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Return the limits on the step norms, and where they hold for all steps as in `RowRules.limited_sigma`."""
        limit = self.rules.max_step_norm(rows.first_length_scale, rows.x_norm, rows.last_step_norm)
        return limit, rows.last_step_norm > 0.0

    def after_trial(self, rows: Rows, verdict: Tensor, actual: Tensor, value_rounding: Tensor) -> Tensor:
        """Return σ after the trial steps."""
        trial = rows.trial
        return self.rules.after_trial(trial.sigma, verdict, actual, trial.predicted, trial.norm, value_rounding)
