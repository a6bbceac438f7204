"""The first choice of a method: its model, that is the Krylov space (2.2, 2.4) and the cubic steps in it (2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from sanc.core import cubic, units
from sanc.core.iterate import LANCZOS_START, Iterate, generator
from sanc.core.judge import LONGER
from sanc.core.krylov import Krylov

Model: TypeAlias = Callable[[Iterate], Iterator[cubic.CubicStep]]
"""Proposes steps, the next one where the last was rejected."""

_FORCING = 0.2
"""Share of ‖g‖ to which ‖∇m‖ is brought at least, far from a solution."""
_LOST = 10
"""Lanczos iterations that are made where the step is lost in the rounding of x and the gradient is not zero."""
_ENOUGH = 0.5
"""Share of the gradient asked for below which ‖∇m‖ is not brought."""


def build(at: Iterate, *, solves: bool) -> None:
    """2.2 and 2.4: start Lanczos at the gradient; where that vanishes, at the direction given or at random."""
    s, start = at.settings, at.start
    if start is None and at.record.grad_norm == 0.0:
        start = at.space.normal(generator(at.state, LANCZOS_START))
    at.operator = at.oracle.hessian(at.x)
    at.krylov = Krylov(
        at.oracle.lanczos(
            at.operator,
            at.g if start is None else start,
            limit=s.krylov_dim,
            store=s.lanczos == "store",
            reorthogonalise=s.reorthogonalise,
            linear=None if start is None else at.g,
        )
    )
    _grow(at, at.krylov, solves)
    assert at.spectrum is not None
    at.record.ritz_value = at.spectrum.leftmost


def _grow(at: Iterate, krylov: Krylov, solves: bool) -> None:
    """Build the space, until the model is minimised well enough in it.

    Along negative curvature the model promises most where it knows least: with "forcing" the space ends with the
    first that it shows, near to the gradient, as truncated conjugate gradients do.
    """
    s, norm = at.settings, at.record.grad_norm
    limit = min(s.krylov_dim or at.space.dim, at.space.dim)
    test_at, latest, shift, tolerance = 1, 0, math.nan, _tolerance(at)
    forcing = s.krylov_stop == "forcing"
    ritz_tolerance = math.inf if forcing else max(s.epsilon, norm) / 2
    while True:
        krylov.extend()
        at.record.krylov_dim = j = krylov.dim
        if j == 1:
            _measure(at, krylov)
        last = krylov.invariant or j >= limit or (forcing and at.oracle.exact and not krylov.definite)
        if not last:
            # Eigenpairs are O(j²): a long basis is tested less often, or where the μ of the last step promises it.
            waits = j < test_at or (j < latest and krylov.slope(shift) > 2.0 * tolerance)
            if waits or (solves and krylov.least_slope(at.judge.sigma) > tolerance):
                continue
        at.spectrum = cubic.spectrum(*krylov.tridiagonal())
        if last or krylov.left_by(at.spectrum.vectors[:, 0]) <= ritz_tolerance:
            step = _bounded(at) if solves else None
            if last or step is None or _enough(at, krylov, step, tolerance):
                return
            if forcing and krylov.from_gradient:
                test_at, latest, shift = j + 1, max(j + 8, j + j // 5), step.multiplier
                continue
        test_at = j + max(1, j // 5)


def _tolerance(at: Iterate) -> float:
    """Return what ‖∇m‖ may be at most; "forcing" may ask for less where the step is short."""
    if at.settings.krylov_stop == "paper":
        return at.settings.gradient_tolerance
    norm = at.record.grad_norm
    fell = norm / at.state.slope if at.state.slope > 0.0 else 1.0
    return max(min(_FORCING, fell) * norm, _ENOUGH * at.goal)


def _enough(at: Iterate, krylov: Krylov, step: cubic.CubicStep, tolerance: float) -> bool:
    """2.2: whether ‖∇m(s)‖ = β_j |u_j| is small enough."""
    grad_norm, left = at.record.grad_norm, krylov.left_by(step.u)
    if left > tolerance:
        return False
    if at.settings.krylov_stop == "forcing":
        if at.vanishes(step):  # across a valley it may, where a step along the valley does not
            return grad_norm > 0.0 and krylov.dim >= _LOST
        return left <= max(step.norm / _length(at) * grad_norm, _ENOUGH * at.goal)
    return True


def _measure(at: Iterate, krylov: Krylov) -> None:
    """Find the units and σ at the first point, and the longest step from here."""
    s = at.settings
    if not at.units.length:
        curvature = math.hypot(krylov.alpha[0], krylov.residual)
        size, slope = at.size, at.record.grad_norm
        if not krylov.from_gradient or slope <= at.space.eps * curvature * size:
            slope = 0.0  # a stationary point, whose gradient says nothing
        at.units = units.measured(at.record.value, slope, curvature, size)
        if s.sigma0 is None:
            at.judge.move(units.FIRST * at.units.cubic)
        at.guessed = s.first_radius is not None
    if s.first_radius is not None:
        at.longest = max(s.first_radius * _length(at), LONGER * at.state.reach)


def _length(at: Iterate) -> float:
    """Return a length that is neither large nor small here."""
    return max(at.units.length, 0.1 * at.size)


def _bounded(at: Iterate) -> cubic.CubicStep:
    """Minimise the model, with σ raised where the step is far longer than the last.

    σ speaks of where the last steps led, and along another direction it may let the model run far out of what it
    was seen to hold in. The first step of all is Newton's, unless negative curvature leaves its length to a guess.
    """
    assert at.krylov is not None
    assert at.spectrum is not None
    step = at.solve(at.judge.sigma)
    if step.norm > at.longest and (at.state.reach > 0.0 or at.spectrum.leftmost < step.multiplier):
        at.guessed = True
        least = cubic.least_sigma(at.spectrum, at.krylov.linear, step, at.longest)
        at.judge.shorten(lambda sigma: at.solve(sigma).norm, at.longest, least)
        step = at.solve(at.judge.sigma)
    return step


def no_steps(at: Iterate) -> Iterator[cubic.CubicStep]:
    """Propose no cubic step; the Krylov space, where one is wanted, shows negative curvature only."""
    return iter(())


def cubic_steps(at: Iterate) -> Iterator[cubic.CubicStep]:
    """2.3: minimise m(s) = gᵀs + ½sᵀBs + (σ/3)‖s‖³ in the Krylov space, globally, for the σ of the judge.

    Where the judge rejected the step, the next one is the minimiser of its new σ, in the same space.
    """
    for _ in range(1 + at.settings.resolves):
        step = at.solve(at.judge.sigma)
        record = at.record
        record.sigma, record.model_decrease, at.cubic_norm = at.judge.sigma, step.decrease, step.norm
        record.curvature_share = step.curvature_share
        if step.decrease <= 0.0:  # g = 0 and no negative curvature: a second-order point of this space
            record.note = "the model has its minimum here"
            return
        yield step
