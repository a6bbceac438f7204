"""f, g and Hv of a finite sum on three independent samples of constant size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sanc.oracles.base import Meter, Operator, Oracle, Recent
from sanc.problems import FiniteSum, memory_of, remind, sampler
from sanc.samples import Sample, gatherer
from sanc.settings import Sampling
from sanc.vectors import Floats, NumpySpace, Vector

_ROLES = {"gradient": 0, "hessian": 1, "objective": 2}


class Draws:
    """Independent random streams, one for each (iteration, role), without a new generator for each.

    Philox turns a key and a counter into numbers: the seed makes the key, and each stream has the 2¹²⁸ counters whose
    upper two words are its own.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(seed)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._counter = self._state["state"]["counter"]

    def at(self, iteration: int, role: int) -> np.random.Generator:
        """Return the generator at the start of a stream; the next call moves it away from there."""
        self._counter[2], self._counter[3] = iteration, role
        self._bits.state = self._state
        return self._generator


class FiniteSumOracle(Oracle):
    """Draws the samples of each iteration as a function of (seed, iteration), so that every method sees the same.

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
        self.seed = seed
        self.sampling = sampling
        self.wanted = list(sizes)
        self._subset = sampler(problem)
        self._gatherer = gatherer(problem)
        self._together: tuple[int, ...] = ()  # the samples of this iteration that are gathered at once
        self._draws = Draws(seed)
        self._orders: dict[int, tuple[tuple[int, int], npt.NDArray[np.intp]]] = {}
        self._iteration = -1
        self._samples: list[FiniteSum | Sample | None] = [None, None, None]
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
        if iteration == self._iteration:
            return
        self._iteration = iteration
        self._samples = [None, None, None]
        if self.wanted[0] is not None:
            self._gradient = None
        self._together = ()
        if self._gatherer is not None:
            sizes = {role: size for role, size in enumerate(self.wanted) if size is not None and (products or role != 1)}
            if self._gatherer.small(sum(sizes.values())):
                self._together = tuple(sizes)

    def dismiss(self, role: str) -> None:
        if _ROLES[role] not in self._together:
            self._samples[_ROLES[role]] = None  # the next sample gets its memory, which is still in the cache

    def sample(self, role: str) -> FiniteSum | Sample:
        """Return a sample of this iteration: the same whenever it is asked for."""
        index = _ROLES[role]
        return self._samples[index] or self._drawn(index)

    def _drawn(self, index: int) -> FiniteSum | Sample:
        """Draw a sample, and with it those that are gathered at once."""
        size = self.wanted[index]
        if index in self._together:
            assert self._gatherer is not None
            rows = [self._draw(role, self.wanted[role]) for role in self._together]
            for role, sample in zip(self._together, self._gatherer(rows), strict=True):
                self._samples[role] = sample
        else:
            self._samples[index] = self.problem if size is None else self._subset(self._draw(index, size))
        return self._samples[index]

    def _draw(self, index: int, size: int) -> npt.NDArray[np.intp]:
        """Rows of a sample of this iteration."""
        n = self.problem.n
        if self.sampling == "uniform":
            return self._draws.at(self._iteration, index).choice(n, size, replace=False, shuffle=False)
        epoch, batch = divmod(self._iteration, n // size)  # a last batch that is not full is left out
        known = self._orders.get(index)
        if known is None or known[0] != (epoch, size):
            rng = np.random.default_rng((self.seed, epoch, index))
            self._orders[index] = known = ((epoch, size), buffered_order(n, size, rng))
        return known[1][batch * size : (batch + 1) * size]

    def value(self, x: Vector) -> float:
        if self.wanted[2] is not None:  # an iteration asks once for each point, and the next has another sample
            sample = self.sample("objective")
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
        sample = self.sample("gradient")
        value, g = sample.value_and_gradient(x)
        self.meter.count_gradient(sample.n)
        self._gradient = (x, value, g)
        if self.wanted[0] is None and self.wanted[2] is None:
            self._values.put(value, x)
        return value, g

    def trial(self, x: Vector) -> float:
        sample = self.sample("gradient")
        self.meter.count_value(sample.n)
        return sample.value(x)

    def hessian(self, x: Vector) -> Operator:
        return _SampleHessian(self, x)


def buffered_order(n: int, size: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Order in which a shuffle buffer of `size` rows gives out rows 0 … n−1: never far from where they stood."""
    places = (rng.random(n) * np.minimum(size, np.arange(n, 0, -1))).astype(np.intp).tolist()
    buffer = list(range(min(size, n)))
    order = []
    for step, place in enumerate(places):
        order.append(buffer[place])
        if step + size < n:
            buffer[place] = step + size
        else:
            buffer[place] = buffer[-1]
            buffer.pop()
    return np.array(order, np.intp)


class _SampleHessian(Operator):
    def __init__(self, oracle: FiniteSumOracle, x: Vector) -> None:
        self.oracle, self.x = oracle, x
        self._size = oracle.sizes[1]
        self._product: Callable[[Vector], Vector] | None = None

    def __call__(self, v: Vector, out: Vector | None = None) -> Vector:
        if self._product is None:
            self._product = self.oracle.sample("hessian").hessian(self.x)
        self.oracle.meter.count_product(self._size)
        return self._product(v)

    def gradient(self) -> Vector:
        self.oracle.meter.count_gradient(self._size)
        return self.oracle.sample("hessian").value_and_gradient(self.x)[1]

    def moved(self, to: Vector, u: Floats) -> None:
        tell = getattr(self._product, "moved", None)
        if tell is not None and self.oracle.wanted[1] is None and self.oracle.wanted[2] is None:
            tell(to, u)

    def release(self) -> None:
        if self.oracle.wanted[1] is not None:  # what a sample needs is let go; the whole sum stays as it is
            self._product = None
