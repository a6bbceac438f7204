"""The three samples of an iteration of a finite sum: how they are drawn, and how small ones are made quickly.

The rows of a small sample of a linear model are multiplied in a few microseconds, in which Python does little else.
Their samples are therefore gathered together, those of the next iterations with them, and what all three of an
iteration need at the current point is measured at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sanc.problems import Array, FiniteSum, Logistic, NonconvexSVM, _Linear, part, pool
from sanc.rows import Copied, Picked, Pool
from sanc.settings import Sampling

GRADIENT, HESSIAN, OBJECTIVE = range(3)
"""The roles of samples."""
_TOGETHER = 1 << 17
"""Entries of X up to which samples are gathered together: they fit the cache of a core."""
_FEW_STREAMS = 6
"""Streams from which on it is faster to draw in all of them at once."""
_AHEAD = 32
"""Most iterations whose samples are gathered together."""


class Draws:
    """Independent random streams, one for each (iteration, role), without a new generator for each.

    Philox turns a key and a counter into numbers: the seed makes the key, and each stream has the 2¹²⁸ counters whose
    upper two words are its own.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(seed)
        self._generator = np.random.Generator(self._bits)
        state: Any = self._bits.state
        words = {name: given.tolist() for name, given in state["state"].items()}  # lists, which are read faster
        self._state = state | {"state": words, "buffer": state["buffer"].tolist()}
        self._counter: list[int] = words["counter"]

    def at(self, iteration: int, role: int) -> np.random.Generator:
        """Return the generator at the start of a stream; the next call moves it away from there."""
        self._counter[2:] = iteration, role
        self._bits.state = self._state
        return self._generator

    def choice(self, n: int, size: int, iteration: int, role: int) -> npt.NDArray[np.intp]:
        """Draw `size` of n rows, in a stream."""
        return self.at(iteration, role).choice(n, size, replace=False, shuffle=False)

    def choices(self, n: int, size: int, streams: Sequence[tuple[int, int]]) -> npt.NDArray[np.intp]:
        """Draw in several streams at once what `choice` draws in each of them.

        That is Floyd's algorithm: the i-th row is a random one of the first n − size + i + 1, or the last of these
        where that was drawn before. Random numbers up to a limit are the upper halves of the limit times 32 random
        bits; where the lower half is small, there may be a second try. All else that NumPy does takes as long for few
        rows as for many, so it is worth doing for all streams together, where few rows are drawn a second time.
        """
        few = size * size <= 16 * n and size < n < 2**32  # of more, or of more than a twentieth, NumPy draws otherwise
        if not few or len(streams) < _FEW_STREAMS or sys.byteorder != "little":
            return np.array([self.choice(n, size, *stream) for stream in streams])
        words = np.empty((len(streams), -(-size // 2)), np.uint64)
        for place, stream in enumerate(streams):
            self.at(*stream)
            words[place] = self._bits.random_raw(words.shape[1])
        last = np.arange(n - size, n, dtype=np.uint32)
        wide = words.view(np.uint32)[:, :size] * (last + 1).astype(np.uint64)
        low, high = wide.view(np.uint32)[:, ::2], wide.view(np.uint32)[:, 1::2]
        odd: Array = np.any(low <= last, axis=1)
        # Sorted with their places, those that were drawn before come after an equal one.
        bits = size.bit_length()
        keys: Array = high.astype(np.int32 if n << bits < 2**31 else np.int64)
        ordered = np.sort((keys << bits) + np.arange(size, dtype=keys.dtype))
        where, after = np.nonzero(np.diff(ordered >> bits) == 0)
        again = ordered[where, after + 1] & ((1 << bits) - 1)
        rows, instead = high.astype(np.intp), last[again].astype(np.intp)
        odd[where[np.any(rows[where] == instead[:, None], axis=1)]] = True  # one may have been drawn before as such
        rows[where, again] = instead
        for place in np.nonzero(odd)[0].tolist():
            rows[place] = self.choice(n, size, *streams[place])
        return rows


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


class Samples:
    """Draws the samples of each iteration as a function of (seed, iteration), so that every method sees the same.

    Parameters
    ----------
    problem : FiniteSum
        The whole sum.
    wanted : list of (int or None)
        Rows of the gradient, Hessian and objective samples; None is the whole sum. Its owner may change it.
    seed : int
        Seed of the draws.
    sampling : {"uniform", "buffered"}
        Draw each sample from all rows, or go through the rows in their order with a shuffle buffer of one batch.
    """

    def __init__(self, problem: FiniteSum, wanted: list[int | None], seed: int, sampling: Sampling) -> None:
        self.problem, self.wanted = problem, wanted
        self._seed, self._sampling = seed, sampling
        self._draws = Draws(seed)
        self._orders: dict[int, tuple[tuple[int, int], npt.NDArray[np.intp]]] = {}
        self._pool = pool(problem) if any(size is not None for size in wanted) else None
        self._iteration = -1
        self._now: list[FiniteSum | Sample | None] = [None, None, None]
        self._gatherer: Gatherer | None = None
        if self._pool is not None and isinstance(problem, Logistic | NonconvexSVM):
            self._gatherer = Gatherer(problem, self._pool)
        self._key: tuple[Any, ...] = ()  # what decides on the next two
        self._together: dict[int, int] = {}  # roles and sizes of the samples that are gathered
        self._ahead: dict[int, list[Sample]] = {}  # samples of later iterations …
        self._end = 0  # … up to this one

    def begin(self, iteration: int, products: bool) -> bool:
        """Go to an iteration, which makes Hessian products or not; false where it is the one it was."""
        if iteration == self._iteration:
            return False
        self._iteration = iteration
        self._now = [None, None, None]
        if self._gatherer is not None and self._key != (products, *self.wanted):
            self._key = (products, *self.wanted)
            sizes = {k: size for k, size in enumerate(self.wanted) if size is not None and (products or k != HESSIAN)}
            self._together = sizes if sum(sizes.values()) <= self._gatherer.most else {}
            self._ahead = {}
        return True

    def dismiss(self, role: int) -> None:
        """Let go of a sample that is not expected to be asked for again."""
        if role not in self._together:
            self._now[role] = None  # the next sample gets its memory, which is still in the cache

    def __getitem__(self, role: int) -> FiniteSum | Sample:
        """Return a sample of this iteration: the same whenever it is asked for."""
        sample = self._now[role]
        if sample is None:
            if role in self._together:
                for other, one in zip(self._together, self._gathered(), strict=True):
                    self._now[other] = one
                return self[role]
            size = self.wanted[role]
            sample = self.problem
            if size is not None:
                sample = part(self.problem, self._draw([self._iteration], {role: size})[0][0], self._pool)
            self._now[role] = sample
        return sample

    def _gathered(self) -> list[Sample]:
        """Return the samples of this iteration; where one follows another, those to come are gathered with them."""
        now, sizes = self._iteration, self._together
        if now not in self._ahead:
            assert self._gatherer is not None
            count = 1
            if now == self._end:  # a run that ends early shall not have drawn much for nothing
                count = max(1, min(now // 8, _AHEAD, self._gatherer.most // sum(sizes.values())))
            self._end = now + count
            self._ahead = dict(enumerate(self._gatherer(self._draw(range(now, self._end), sizes)), start=now))
        return self._ahead.pop(now)

    def _draw(self, iterations: Sequence[int], sizes: Mapping[int, int]) -> list[npt.NDArray[np.intp]]:
        """Return, for each role, the rows of its samples in some iterations, one below the other."""
        if self._sampling == "buffered":
            return [np.array([self._batch(k, role, size) for k in iterations]) for role, size in sizes.items()]
        drawn: dict[int, Array] = {}
        for size in set(sizes.values()):
            roles = [role for role in sizes if sizes[role] == size]
            rows = self._draws.choices(self.problem.n, size, [(k, role) for role in roles for k in iterations])
            drawn.update(zip(roles, np.split(rows, len(roles)), strict=True))
        return [drawn[role] for role in sizes]

    def _batch(self, iteration: int, role: int, size: int) -> npt.NDArray[np.intp]:
        """Rows that come next out of the shuffle buffer."""
        epoch, batch = divmod(iteration, self.problem.n // size)  # a last batch that is not full is left out
        known = self._orders.get(role)
        if known is None or known[0] != (epoch, size):
            rng = np.random.default_rng((self._seed, epoch, role))
            self._orders[role] = known = ((epoch, size), buffered_order(self.problem.n, size, rng))
        return known[1][batch * size : (batch + 1) * size]


class Gatherer:
    """Makes samples of a linear model.

    Parameters
    ----------
    problem : Logistic or NonconvexSVM
        The whole sum.
    drawn_from : Pool
        Its rows.

    Attributes
    ----------
    most : int
        Rows that are gathered together at most.
    """

    def __init__(self, problem: _Linear, drawn_from: Pool) -> None:
        self._problem, self._pool = problem, drawn_from
        self._labels: Array | None = None  # of all rows, in the form the loss uses
        self.most = _TOGETHER * problem.n // max(1, self._pool.size) if self._pool.quick else 0

    def __call__(self, rows: Sequence[Array]) -> list[list[Sample]]:
        """Make the samples of several iterations: for each kind of them, the rows of an iteration below the other."""
        parts, end = [], 0
        for one in rows:
            parts.append(slice(end, end + one.shape[1]))
            end += one.shape[1]
        order = np.hstack([np.sort(one)[:, ::-1] for one in rows])
        if self._labels is None:
            self._labels = self._problem._used(self._problem.y)
        labels = self._labels.take(order)
        samples = []
        for X, mine in zip(self._pool.rows(order, parts), labels, strict=True):
            shared = Shared(self._problem, X, mine)
            samples.append([Sample(shared, X[part], mine[part], part) for part in parts])
        return samples


class Shared:
    """All rows of an iteration, measured together at the point where a sample is asked first."""

    __slots__ = ("_X", "_labels", "inverse", "losses", "penalty", "problem", "slope", "state", "w")

    def __init__(self, problem: _Linear, X: Copied | Picked, labels: Array) -> None:
        self.problem, self._X, self._labels = problem, X, labels
        self.w: Array | None = None

    def known(self, w: Array) -> bool:
        """Whether w is the point where all was measured; the first is. Nobody changes it, so it is known by itself."""
        if self.w is None:
            self.losses, self.state = self.problem._losses(self._X.scores(w), self._labels)
            self.inverse = self.problem.penalty.inverse(w)
            self.penalty, self.slope = self.problem.penalty.value_and_gradient(w, self.inverse)
            self.w = w
        return self.w is w


class Sample:
    """The mean over the rows of a sample, with the penalty; as a `FiniteSum`, but that it has no subsets.

    Attributes
    ----------
    n : int
        Rows.
    """

    __slots__ = ("_X", "_labels", "_part", "_shared", "n")

    def __init__(self, shared: Shared, X: Copied | Picked, labels: Array, part: slice) -> None:
        self._shared, self._X, self._labels, self._part = shared, X, labels, part
        self.n = len(labels)

    def value(self, w: Array) -> float:
        """f(w)."""
        shared, problem = self._shared, self._shared.problem
        if shared.known(w):
            losses, penalty = shared.losses[self._part], shared.penalty
        else:
            losses, _ = problem._losses(self._X.scores(w), self._labels)
            penalty = problem.penalty.value(w)
        return float(np.add.reduce(losses)) / self.n + penalty

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        """f(w) and ∇f(w)."""
        shared, problem = self._shared, self._shared.problem
        if shared.known(w):
            losses, state = shared.losses[self._part], self._state()
            penalty, g = shared.penalty, shared.slope + 0.0  # which it keeps
        else:
            losses, state = problem._losses(self._X.scores(w), self._labels)
            penalty, g = problem.penalty.value_and_gradient(w)
        slope = problem._slope(state, self._labels)
        slope /= self.n
        return float(np.add.reduce(losses)) / self.n + penalty, self._X.pull(slope, g)

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        """Return v ↦ ∇²f(w) v."""
        shared, problem = self._shared, self._shared.problem
        if shared.known(w):
            state, curvature = self._state(), problem.penalty.curvature(w, shared.inverse)
        else:
            _, state = problem._losses(self._X.scores(w), self._labels)
            curvature = problem.penalty.curvature(w)
        bend = problem._bend(state)
        bend /= self.n
        return self._X.curved(bend, curvature)

    def _state(self) -> tuple[Array, ...]:
        part = self._part
        return tuple([entry[part] for entry in self._shared.state])
