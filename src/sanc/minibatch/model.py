"""The model on samples: the mean gradient, a diagonal metric, and the curvature of an old Krylov space.

ḡᵀs + ½sᵀB̂s + (σ/3)‖s‖³_M, with B̂ = M^(1/2) Q|T|Qᵀ M^(1/2) for the Krylov space Q of M^(−1/2) B M^(−1/2) that was
built some steps ago, and no curvature outside of it: the step is not confined to the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sanc.core import cubic
from sanc.core.iterate import Draws
from sanc.core.krylov import Krylov
from sanc.core.oracle import Oracle
from sanc.core.record import Record
from sanc.core.settings import MinibatchSettings, Settings
from sanc.core.space import Floats, Space, Vector
from sanc.minibatch.state import State

KRYLOV_DIM = 5
"""Dimension of the Krylov space where the settings leave it open: a sampled Hessian deserves no more."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model and what the model says of it."""

    vector: Vector
    norm: float  # in the metric
    decrease: float
    bend: float  # sᵀBs
    curvature_share: float  # of the decrease, earned along negative curvature


def blend(old: Vector | None, new: Vector, memory: float) -> Vector:
    """Return memory·old + (1 − memory)·new, where there is no old as if it were zero."""
    return new * (1 - memory) if old is None else old * memory + new * (1 - memory)


def learn_gradient(state: State, g: Vector, settings: MinibatchSettings) -> None:
    """Bring the means of the gradient and of its square up to date; there is no mean before noise took over."""
    if not state.first_phase:
        state.momentum, state.averaged = blend(state.momentum, g, settings.averaging), state.averaged + 1
    if settings.metric:
        state.square, state.squared = blend(state.square, g * g, settings.metric_averaging), state.squared + 1


def learn_metric(state: State, settings: MinibatchSettings, space: Space) -> None:
    """Set the metric: M is the root of the gradient's mean square to the power `metric`."""
    if state.square is None:
        return
    root = (state.square / (1 - settings.metric_averaging**state.squared)) ** 0.5
    typical = space.norm(root) / math.sqrt(space.dim)
    if typical > 0.0 and math.isfinite(typical):
        state.scale = (root + 1e-6 * typical) ** (-0.5 * settings.metric)


class Model:
    """The model at one point.

    Parameters
    ----------
    state : State
        Means, metric and Krylov space.
    g : vector
        Gradient of this batch, which is the mean where there is none yet.
    settings : MinibatchSettings
        Memory of the means.
    space : Space
        The vectors' arithmetic.

    Attributes
    ----------
    fresh : bool
        Whether the Krylov space was built at this very point. One that was built elsewhere tells how large the
        curvature is, but not its sign any more.
    """

    def __init__(self, state: State, g: Vector, settings: MinibatchSettings, space: Space) -> None:
        self._state, self._space = state, space
        mean = g if state.averaged == 0 else state.momentum
        assert mean is not None
        self._mean = mean if state.scale is None else mean * state.scale  # in the coordinates of the metric
        self._bias = 1.0 if state.averaged == 0 else 1.0 - settings.averaging**state.averaged
        self.fresh = False
        self._parts: Floats | None = None

    def build(self, x: Vector, oracle: Oracle, settings: Settings, draws: Draws, record: Record) -> None:
        """Build a new Krylov space of M^(−1/2) B M^(−1/2), started at the mean, or at random where that vanishes."""
        state = self._state
        zero = self._space.norm(self._mean) == 0.0
        start = draws.start(self._space) if zero else self._mean
        limit = min(settings.krylov_dim or KRYLOV_DIM, self._space.dim)
        operator = oracle.hessian(x)
        krylov = Krylov(oracle.lanczos(operator, start, state.scale, limit=limit, reorthogonalise=True))
        try:
            while krylov.extend():
                pass
        finally:
            operator.release()
            oracle.meter.paper_calls += krylov.dim * oracle.sizes[1]
        diagonal, off_diagonal = krylov.tridiagonal()
        eigen = cubic.spectrum(diagonal, off_diagonal)
        record.krylov_dim, record.ritz_value = krylov.dim, eigen.leftmost
        # The first vector alone is what a gradient step of the best length would earn, for one evaluation.
        linear = krylov.linear / self._bias
        alone = cubic.solve(cubic.spectrum(diagonal[:1], off_diagonal[:0]), linear[:1], state.sigma)
        whole = cubic.solve(eigen, linear, state.sigma)
        state.worth = whole.decrease > (1 + krylov.dim) * alone.decrease
        state.refreshed = state.iteration
        state.basis, state.ritz, state.ritz_vectors = krylov.basis(), eigen.values, eigen.vectors
        self.fresh = True
        self._parts = None

    def spectrum(self) -> cubic.Spectrum:
        """Return the curvature of the model: that of the Krylov space, and outside of it none (one more direction)."""
        ritz, vectors = self._state.ritz, self._state.ritz_vectors
        if ritz is None or vectors is None:
            return cubic.Spectrum(np.zeros(1), np.ones((1, 1)))
        j = len(ritz)
        values = np.append(ritz if self.fresh else np.abs(ritz), 0.0)
        directions = np.zeros((j + 1, j + 1))
        directions[:j, :j] = vectors
        directions[j, j] = 1.0
        order = np.argsort(values, kind="stable")
        return cubic.Spectrum(values[order], directions[:, order])

    def linear(self) -> Floats:
        """Return the linear term: the parts of the mean in the basis, and the length of what is outside."""
        if self._parts is None:
            space, basis = self._space, self._state.basis
            inside = [] if basis is None else [space.products(basis, self._mean)]
            square, *found = space.read([space.inner(self._mean, self._mean), *inside])
            parts = np.array(found, np.float64)
            outside = math.sqrt(max(square - float(parts @ parts), 0.0))
            if len(parts) == space.dim:  # there is no outside, and what is left of it is rounding
                outside = 0.0
            self._parts = np.append(parts, outside) / self._bias
        return self._parts

    def solve(self, eigen: cubic.Spectrum, draws: Draws) -> Step | None:
        """Minimise the cubic model; with μ = σ‖s‖ the step is Q(u + Qᵀḡ/μ) − ḡ/μ in the coordinates of the metric."""
        state, space, linear = self._state, self._space, self.linear()
        least = cubic.solve(eigen, linear, state.sigma)
        if least.hard:
            least = cubic.solve(eigen, linear, state.sigma, draws.hard_sign())
        if least.multiplier == 0.0:
            return None
        inside = linear[:-1]
        if len(inside) == space.dim:
            vector = space.combine(state.basis, least.u[:-1])
        else:
            vector = self._mean * (-1.0 / (least.multiplier * self._bias))
            if len(inside):
                vector = space.combine(state.basis, least.u[:-1] + inside / least.multiplier, vector)
        if state.scale is not None:
            vector = vector * state.scale
        return Step(vector, least.norm, least.decrease, least.bend, least.curvature_share)
