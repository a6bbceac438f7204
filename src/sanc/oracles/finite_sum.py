"""f, g and Hv of a finite sum on three independent samples of constant size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sanc.oracles.base import Meter, Operator, Oracle, Recent
from sanc.oracles.samples import GRADIENT, HESSIAN, OBJECTIVE, Samples
from sanc.problems import FiniteSum, memory_of, remind
from sanc.settings import Sampling
from sanc.vectors import Floats, NumpySpace, Vector


class FiniteSumOracle(Oracle):
    """Answers on the samples of each iteration, which are a function of (seed, iteration): every method sees the same.

    Parameters
    ----------
    problem : FiniteSum
        The whole sum.
    sizes : tuple of (int or None)
        Rows of the gradient, Hessian and objective samples; None is the whole sum.
    seed : int
        Seed of the draws.
    sampling : {"uniform", "buffered"}
        Draw each sample from all rows, or go through the rows in their order with a shuffle buffer of one batch.

    Attributes
    ----------
    samples : Samples
        Those of the current iteration.
    """

    def __init__(
        self,
        problem: FiniteSum,
        sizes: tuple[int | None, int | None, int | None],
        seed: int,
        sampling: Sampling = "uniform",
    ) -> None:
        self.problem = problem
        self.space = NumpySpace(problem.dim, problem.dtype)
        self.meter = Meter()
        self.wanted = list(sizes)
        self.samples = Samples(problem, self.wanted, seed, sampling)
        self._values = Recent()
        self._gradient: tuple[Vector, float, Vector] | None = None

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether all three samples are the whole sum."""
        return self.wanted == [None, None, None]

    @property
    def sizes(self) -> tuple[int, int, int]:
        n, (g, h, f) = self.problem.n, self.wanted
        return n if g is None else g, n if h is None else h, n if f is None else f

    def begin(self, iteration: int, *, products: bool = True) -> None:
        if self.samples.begin(iteration, products) and self.wanted[0] is not None:
            self._gradient = None

    def dismiss(self, role: str) -> None:
        self.samples.dismiss(GRADIENT if role == "gradient" else HESSIAN)

    def value(self, x: Vector) -> float:
        if self.wanted[2] is not None:  # an iteration asks once for each point, and the next has another sample
            sample = self.samples[OBJECTIVE]
            self.meter.count_value(sample.n)
            return sample.value(x)
        known = self._values.get(x)
        if known is not None:
            return known
        self.meter.count_value(self.problem.n)
        return self._values.put(self.problem.value(x), x)

    def knows(self, x: Vector) -> tuple[bool, bool]:
        value = self.wanted[2] is None and (x,) in self._values
        return value, self.wanted[0] is None and self._gradient is not None and self._gradient[0] is x

    def remembered(self, x: Vector) -> Any:
        return memory_of(self.problem, x)

    def remind(self, x: Vector, memory: Any) -> None:
        remind(self.problem, x, memory)

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        if self._gradient is not None and self._gradient[0] is x:
            return self._gradient[1], self._gradient[2]
        sample = self.samples[GRADIENT]
        value, g = sample.value_and_gradient(x)
        self.meter.count_gradient(sample.n)
        self._gradient = (x, value, g)
        if self.wanted[0] is None and self.wanted[2] is None:
            self._values.put(value, x)
        return value, g

    def trial(self, x: Vector) -> float:
        sample = self.samples[GRADIENT]
        self.meter.count_value(sample.n)
        return sample.value(x)

    def hessian(self, x: Vector) -> Operator:
        return _SampleHessian(self, x)


class _SampleHessian(Operator):
    def __init__(self, oracle: FiniteSumOracle, x: Vector) -> None:
        self.oracle, self.x = oracle, x
        self._size = oracle.sizes[1]
        self._product: Callable[[Vector], Vector] | None = None

    def __call__(self, v: Vector, out: Vector | None = None) -> Vector:
        if self._product is None:
            self._product = self.oracle.samples[HESSIAN].hessian(self.x)
        self.oracle.meter.count_product(self._size)
        return self._product(v)

    def gradient(self) -> Vector:
        self.oracle.meter.count_gradient(self._size)
        return self.oracle.samples[HESSIAN].value_and_gradient(self.x)[1]

    def moved(self, to: Vector, u: Floats) -> None:
        tell = getattr(self._product, "moved", None)
        if tell is not None and self.oracle.wanted[1] is None and self.oracle.wanted[2] is None:
            tell(to, u)

    def release(self) -> None:
        if self.oracle.wanted[1] is not None:  # what a sample needs is let go; the whole sum stays as it is
            self._product = None
