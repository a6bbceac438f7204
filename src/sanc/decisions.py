"""What is decided within a step of the paper's iteration, on numbers that lie on the device.

A recorded step asks nobody: from the coefficients of its Krylov space it works out the cubic step and what is to be
done if that fails, evaluates both, takes the one or the other, and moves σ. `Desk` is where the numbers of this lie and
does it in Python, on the host's memory; `sanc.kernels` has the same for a GPU. Both fill in the same `Report`, from
which the host keeps its books.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sanc import cubic, escape
from sanc.engine import Draft, Engine
from sanc.judge import Judge, Verdict
from sanc.krylov import NonFiniteProductError
from sanc.lanczos import Recorded, lanczos
from sanc.oracles.layout import Layout
from sanc.record import Branch
from sanc.vectors import Floats, TorchSpace

Product = Callable[[Tensor], Tensor]

FAR = {torch.float32: 1e30, torch.float64: 1e290}
"""Points nearer than this to 0 are finite."""


class Outcome(IntEnum):
    """What became of a step."""

    MOVED = 0  # it was judged, whether it was taken or not
    VANISHED = 1  # the gradient is zero, which is for the host to deal with
    REFUSED = 2  # the loss or the gradient is not finite
    FROZEN = 3  # nothing was to be changed: the host has something to deal with first


class Note(IntEnum):
    """What there is to say about a step."""

    NOTHING = 0
    LOSS = 1
    GRADIENT = 2
    OBJECTIVE = 3
    PRODUCT = 4
    ROUNDING = 5
    TRIAL = 6


NOTES = {
    Note.NOTHING: "",
    Note.LOSS: "the loss of the gradient sample is not finite",
    Note.GRADIENT: "the gradient of the gradient sample is not finite",
    Note.OBJECTIVE: "the loss of the objective sample is not finite",
    Note.PRODUCT: "the Hessian product of Lanczos iteration {dim} is not finite",
    Note.ROUNDING: "the cubic step vanishes in the rounding of x",
    Note.TRIAL: "the trial value is not finite",
}

PLANS = (Branch.STAYED, Branch.CURVATURE, Branch.GRADIENT)
VERDICTS = (Verdict.UNSUCCESSFUL, Verdict.SUCCESSFUL, Verdict.VERY_SUCCESSFUL)


class Report(NamedTuple):
    """A step in numbers.

    Attributes
    ----------
    outcome, note : float
        An `Outcome` and a `Note`.
    sigma, next_sigma : float
        σ of this step and of the next.
    value, before : float
        f(x) on the gradient sample and on the objective sample.
    grad_norm, x_norm : float
        ‖g‖ and ‖x‖.
    dim : float
        Lanczos iterations that count.
    ritz_value : float
        Left-most Ritz value.
    decrease, norm, share : float
        What the model promises of the cubic step, its length, and how much of that is negative curvature's.
    tried : float
        Whether there was a cubic step to be judged.
    plan, length : float
        What was to be done if it failed, an index into `PLANS`, and how far.
    reached, there : float
        f on the objective sample at the cubic step, and where the plan leads.
    verdict : float
        Index into `VERDICTS`.
    escaped : float
        Whether the plan was followed.
    """

    outcome: float = Outcome.MOVED
    note: float = Note.NOTHING
    sigma: float = 1.0
    next_sigma: float = 1.0
    value: float = math.nan
    before: float = math.nan
    grad_norm: float = math.nan
    x_norm: float = math.nan
    dim: float = 0.0
    ritz_value: float = math.nan
    decrease: float = math.nan
    norm: float = 0.0
    share: float = math.nan
    tried: float = 0.0
    plan: float = 0.0
    length: float = 0.0
    reached: float = math.nan
    there: float = math.nan
    verdict: float = 0.0
    escaped: float = 0.0


class Orders(NamedTuple):
    """What the host sends along with a step: two coins for signs, and σ where it knows that better, else NaN."""

    coin: float = 1.0
    hard: float = 1.0
    sigma: float = math.nan


class Desk:
    """The numbers of a recorded step, and the decisions on them.

    Parameters
    ----------
    engine : Engine
        Its settings and rules.
    layout : Layout
        The leaves.
    limit : int
        Dimension of the Krylov space.
    escapes : bool
        Whether a rejected step is replaced by another.

    Attributes
    ----------
    orders : Tensor
        The `Orders` of the next step.
    state : Tensor
        σ, and whether nothing may change.
    weights : Tensor
        Of the rows of the basis in the cubic step, in the other step, and of the gradient in that.
    report : Tensor
        The `Report` on the last step.
    """

    def __init__(self, engine: Engine, layout: Layout, limit: int, escapes: bool) -> None:
        self.engine, self.layout, self.limit, self.escapes = engine, layout, limit, escapes
        dtype, device = layout.kind
        self.space = TorchSpace(layout.dim, dtype, device)
        self.far = FAR[dtype]
        self.orders = torch.tensor(Orders(), dtype=torch.float64, device=device)
        self.state = torch.tensor([1.0, 1.0], dtype=torch.float64, device=device)
        self.weights = torch.zeros(2 * limit + 1, dtype=torch.float64, device=device)
        self.report = torch.tensor(Report(), dtype=torch.float64, device=device)

    def exchange(self, orders: Orders | None) -> None:
        """Send the report on the last step to the host, for `read`, and put down the orders for the next."""
        self._sent = self.report.tolist()
        if orders is not None:
            self.orders.copy_(torch.tensor(orders, dtype=torch.float64))

    def read(self) -> Report:
        """Return the report that was sent last; on a device the host waits for that, and for nothing after it."""
        return Report(*self._sent)

    def norm(self, x: Tensor) -> Tensor:
        """‖x‖ in float64, not read."""
        length: Tensor = torch.linalg.vector_norm(x).double()
        return length

    def lanczos(self, product: Product, start: Tensor, rows: Tensor, reorthogonalise: bool) -> Tensor:
        """Fill `rows` with an orthonormal basis and return the coefficients; see `sanc.lanczos`."""
        coefficients = lanczos(product, start, rows, reorthogonalise=reorthogonalise)
        rows.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # the coefficients tell; no weight is ≠ 0 there
        return coefficients

    def decide(self, value: Tensor, before: Tensor, x_norm: Tensor, coefficients: Tensor) -> None:
        """Work out the cubic step and the plan; fills `weights` and the report as far as it is known."""
        orders = Orders(*self.orders.tolist())
        sigma, frozen = self.state.tolist()
        if not math.isnan(orders.sigma):
            sigma, frozen = orders.sigma, 0.0
            self.state.copy_(torch.tensor([sigma, frozen], dtype=torch.float64))
        weights = np.zeros(2 * self.limit + 1)
        numbers = [float(value), float(before), float(x_norm), *coefficients.tolist()]
        report = self._decide(orders, sigma, bool(frozen), numbers, weights)
        self.report.copy_(torch.tensor(report, dtype=torch.float64))
        self.weights.copy_(torch.from_numpy(weights))

    def _decide(self, orders: Orders, sigma: float, frozen: bool, numbers: Sequence[float], weights: Floats) -> Report:
        value, before, x_norm, *coefficients = numbers
        engine, grad_norm = self.engine, coefficients[0]
        engine.judge = judge = Judge(engine.settings, self.space.eps, sigma)
        report = Report(sigma=sigma, next_sigma=sigma, value=value, before=before, x_norm=x_norm, grad_norm=grad_norm)
        if frozen:
            return report._replace(outcome=Outcome.FROZEN)

        def refused(note: Note) -> Report:
            judge.reject()
            return report._replace(outcome=Outcome.REFUSED, note=note, next_sigma=judge.sigma)

        if not (math.isfinite(value) and math.isfinite(grad_norm)):
            return refused(Note.GRADIENT if math.isfinite(value) else Note.LOSS)
        if grad_norm == 0.0:
            return report._replace(outcome=Outcome.VANISHED)
        krylov = Recorded(coefficients, None, self.space)
        eigen: cubic.Spectrum | None = None
        found: cubic.CubicStep | None = None
        draft = Draft(sigma=sigma, grad_norm=grad_norm)
        try:
            eigen, found = engine.grow(krylov, self.space, draft)
            found = found or cubic.minimise(eigen, krylov.linear, sigma)
            if found.hard:
                found = cubic.minimise(eigen, krylov.linear, sigma, engine.hard_sign(krylov, eigen, orders.hard))
            report = report._replace(
                ritz_value=draft.ritz_value, decrease=found.decrease, norm=found.norm, share=found.curvature_share
            )
            if found.norm <= self.space.eps * x_norm:
                judge.forget()
                report = report._replace(note=Note.ROUNDING)
            elif not x_norm + found.norm < self.far:
                judge.reject()
                report = report._replace(note=Note.TRIAL)
            else:
                report = report._replace(tried=1.0)
        except NonFiniteProductError:
            judge.reject()
            report = report._replace(note=Note.PRODUCT)
        report = report._replace(dim=draft.krylov_dim, next_sigma=judge.sigma)
        if report.tried and found is not None:
            if not math.isfinite(before):
                return refused(Note.OBJECTIVE)
            weights[: len(found.u)] = found.u
        if not self.escapes:
            return report
        s = engine.settings
        plan = escape.choose(draft.ritz_value, grad_norm, s.L1, s.L2, s)
        if plan.branch is Branch.CURVATURE and eigen is not None:
            v = eigen.leftmost_vector
            slope = float(krylov.linear @ v) if s.sign == "descent" else 0.0
            sign = -math.copysign(1.0, slope) if slope else orders.coin
            weights[self.limit : self.limit + len(v)] = (plan.length * sign) * v
        elif plan.branch is Branch.GRADIENT:
            weights[2 * self.limit] = -plan.length
        return report._replace(plan=PLANS.index(plan.branch), length=plan.length)

    def combine(self, x: Tensor, g: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the point of the cubic step and that of the plan."""
        n, weights = self.limit, self.weights.to(x.dtype)
        trial = torch.addmv(x, rows.T, weights[:n])
        if not self.escapes:
            return trial, trial
        return trial, torch.addmv(torch.addcmul(x, g, weights[2 * n]), rows.T, weights[n : 2 * n])

    def conclude(self, x: Tensor, trial: Tensor, other: Tensor, reached: Tensor, there: Tensor) -> None:
        """Take the cubic step if f falls enough, else the other one if f is finite there, else stay; move σ."""
        report = Report(*self.report.tolist())._replace(reached=float(reached), there=float(there))
        point = x
        if report.outcome == Outcome.MOVED:
            verdict = Verdict.UNSUCCESSFUL
            if report.tried:
                judge = Judge(self.engine.settings, self.space.eps, report.sigma)
                actual = report.before - report.reached
                verdict = judge.try_step(actual, report.decrease, report.norm, report.grad_norm, 0.0)
                report = report._replace(next_sigma=judge.sigma, verdict=VERDICTS.index(verdict))
            at = report.before if report.tried else report.value
            length = report.length * (report.grad_norm if PLANS[int(report.plan)] is Branch.GRADIENT else 1.0)
            if verdict.accepted:
                point = trial
            elif report.plan and report.x_norm + length < self.far and math.isfinite(at + report.there):
                point = other
                report = report._replace(escaped=1.0)
            self.state[0] = report.next_sigma
        elif report.outcome == Outcome.REFUSED:
            self.state[0] = report.next_sigma
        elif report.outcome == Outcome.VANISHED:
            self.state[1] = 1.0
        self.report.copy_(torch.tensor(report, dtype=torch.float64))
        self.layout.write(point)
