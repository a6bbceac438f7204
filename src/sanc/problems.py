"""Finite sums in closed form: logistic regression, the nonconvex SVM and softmax regression, dense or sparse.

A subset of a sum is again a sum of the same kind, the mean over its own rows with the same penalty; that is all that
sampling needs. How small samples are made faster than that is the matter of `sanc.oracles.samples`.

What costs time is reading X. The scores Xw are therefore computed once for value, gradient and Hessian at the same w,
and a dense X too large for the cache is gone through in blocks of rows that fit it: a gradient or a product then reads
X from memory once, not twice. The blocks are shared out to as many threads as torch may use; they are summed in one
order, so that gradients and products do not depend on the number of threads; scores for a value alone come from one
product of BLAS, whose threads may round differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse

from sanc.errors import ArgumentError, ArgumentTypeError, nearest, require_integer
from sanc.rows import Pool, Rows
from sanc.threads import each

__all__ = ["FiniteSum", "Logistic", "NonconvexSVM", "Softmax"]

Array: TypeAlias = npt.NDArray[Any]
PenaltyKind = Literal["nonconvex", "l2", "none"]

_BLOCK = 1 << 20
"""Bytes of X in a block: it stays in the cache of a core while it is read twice."""
_LARGE = 1 << 22
"""Bytes of X above which it is gone through in blocks."""
_FEW = 32
"""Rows a block has at least; where they do not fit, X is not divided."""
_PARTS = 64
"""Parts, each of them some blocks, that are handed to threads."""
_FEW_ENTRIES = 1 << 13
"""Entries of X, about, up to which a product takes less than what saves it."""
_POINTS = 2
"""Points at which a sum remembers its scores: the current one and a trial."""
_FELL = 0.01
"""Where the loss falls below this part of what it was, scores are not made from the old ones."""
_DERIVED = 8
"""Most points in a row whose scores are made from those of the point before: rounding does not add up for longer."""


class FiniteSum(ABC):
    """f(w) = (1/n) Σ f_i(w): what `sanc.minimize` samples from. Subclass it for a sum of your own.

    Attributes
    ----------
    n : int
        Components of the sum.
    dim : int
        Variables.
    dtype : numpy.dtype
        Type of the variables.
    """

    n: int
    dim: int
    dtype: np.dtype[Any]

    @abstractmethod
    def subset(self, rows: Array) -> FiniteSum:
        """Return the mean over these components."""

    @abstractmethod
    def value(self, w: Array) -> float:
        """f(w)."""

    @abstractmethod
    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        """f(w) and ∇f(w)."""

    @abstractmethod
    def hessian(self, w: Array) -> Callable[[Array], Array]:
        """Return v ↦ ∇²f(w) v; what depends on w alone is computed once.

        What is returned may have a method ``moved(to, u)``. It is called before f is asked for at ``to`` = w + Σ uᵢvᵢ,
        the vᵢ being all the vectors that were multiplied so far: where their products with the data are kept, f needs
        none there.
        """


class _Penalty:
    """λ Σ w²/(1+w²) or (λ/2)‖w‖²: value, gradient, and the diagonal of the Hessian."""

    def __init__(self, kind: PenaltyKind, strength: float) -> None:
        kinds = ("nonconvex", "l2", "none")
        if kind not in kinds:
            raise ArgumentError(f"penalty = {kind!r} is not known: {nearest(str(kind), kinds)}.")
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < np.inf:
            raise ArgumentError(f"strength = {strength!r} cannot be used: pass a finite number ≥ 0.")
        self.kind = kind if strength > 0 else "none"
        self.strength = float(strength)

    def inverse(self, w: Array) -> Array | None:
        """1/(1+w²), from which the rest is made, where the penalty is of that kind."""
        if self.kind != "nonconvex":
            return None
        total: Array = w * w
        total += 1
        return 1.0 / total

    def value(self, w: Array) -> float:
        if self.kind == "nonconvex":
            return self.strength * float(w.dot(w * self.inverse(w)))
        return 0.5 * self.strength * float(w.dot(w)) if self.kind == "l2" else 0.0

    def value_and_gradient(self, w: Array, inverse: Array | None = None) -> tuple[float, Array | float]:
        if self.kind == "nonconvex":
            inverse = self.inverse(w) if inverse is None else inverse
            slope: Array = w * inverse
            value = self.strength * float(w.dot(slope))
            slope *= inverse
            slope *= 2 * self.strength
            return value, slope
        return self.value(w), self.strength * w if self.kind == "l2" else 0.0

    def curvature(self, w: Array, inverse: Array | None = None) -> Array | float:
        if self.kind == "nonconvex":  # (1 − 3w²)/(1 + w²)³
            inverse = self.inverse(w) if inverse is None else inverse
            assert inverse is not None
            bend: Array = 4 * inverse
            bend -= 3
            bend *= inverse
            bend *= inverse
            bend *= 2 * self.strength
            return bend
        return self.strength if self.kind == "l2" else 0.0


class _Block:
    """Some rows of X, not copied where X is dense, and their labels in the form the loss uses."""

    __slots__ = ("X", "_turned", "begin", "labels")

    def __init__(self, X: Any, labels: Array, begin: int = 0) -> None:
        self.X, self.labels, self.begin, self._turned = X, labels, begin, None

    @property
    def turned(self) -> Any:
        """Xᵀ: the same numbers, read the other way."""
        if self._turned is None:
            self._turned = self.X.T
        return self._turned


class _Point:
    """What is known at one w: the sum of the losses and, for each block, what slopes and curvature are made from.

    `derived` counts the points since the last one whose scores were computed from w itself.
    """

    __slots__ = ("bends", "derived", "loss", "states", "w")

    def __init__(self, w: Array, loss: float, states: list[list[Any]], derived: int = 0) -> None:
        self.w, self.loss, self.states, self.derived = w.copy(), loss, states, derived
        self.bends: list[list[Any]] | None = None

    def belongs(self, w: Array) -> bool:
        """Whether this is w as it is now, not as it was before someone changed it in place."""
        if self.w.item(0) != w.item(0):
            return False
        return self.w.dtype == w.dtype and self.w.shape == w.shape and bool((self.w == w).all())


class _Product:
    """v ↦ ∇²f(w) v where X is one block, with the scores Xv of the first vectors kept.

    They are kept as long as a combination of them is cheaper than another product with X.
    """

    __slots__ = ("_bend", "_block", "_curvature", "_divisor", "_kept", "_most", "_point", "_sum")

    def __init__(self, owner: _Linear, block: _Block, point: _Point, curvature: Array | float) -> None:
        assert point.bends is not None
        self._sum, self._block, self._point, self._curvature = owner, block, point, curvature
        self._bend, self._divisor = point.bends[0][0], owner.n
        if owner._separate:
            self._bend, self._divisor = self._bend / owner.n, 1
        self._kept: list[Array] | None = []
        self._most = owner._worth_keeping() if point.derived < _DERIVED else 0

    def __call__(self, v: Array) -> Array:
        owner = self._sum
        z = owner._scores(self._block, v)
        if self._kept is not None and len(self._kept) < self._most:
            self._kept.append(z)
            bent = z * self._bend
        else:
            self._kept = None
            bent = owner._bent(self._bend, z)
        result = owner._pull(self._block, bent)
        if self._divisor != 1:
            result /= self._divisor
        result += self._curvature * v
        return result

    def moved(self, to: Array, u: Array) -> None:
        """Let the sum know its scores at ``to`` = w + Σ uᵢvᵢ, the vᵢ being all the vectors it was multiplied by."""
        if self._kept and len(self._kept) == len(u):
            self._sum._derive(self._point, self._block, to, u, self._kept)


class _Linear(FiniteSum):
    """A loss of the linear scores Xw, in which row i has its own label."""

    X: Any
    y: Array
    penalty: _Penalty
    _divides = True
    _separate = True  # each second derivative is a number, by which `_bent` multiplies
    _recalls = False  # whether that is so and a state still tells the scores it was made from

    def __init__(self, X: Any, y: Any, penalty: PenaltyKind, strength: float) -> None:
        self.penalty = _Penalty(penalty, strength)
        self.X = _matrix(X)
        self.n, self.features = self.X.shape
        self.dtype = self.X.dtype
        self.y = self._labels(_vector(y, self.n))
        self.dim = self.features
        self._forget()

    def subset(self, rows: Array) -> _Linear:
        rows = np.asarray(rows)
        if rows.size == 0 or rows.min() < 0 or rows.max() >= self.n:
            raise ArgumentError(f"rows = {rows!r:.60} cannot be used: pass row numbers from 0 to {self.n - 1}.")
        return self._part(self.X[rows], rows)

    def _part(self, X: Any, rows: Array) -> _Linear:
        """Return the mean over rows of which X consists."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part._forget()
        part.n = len(rows)
        part.X = X
        part.y = self.y[rows]
        return part

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_points": [], "_parts": None}

    def _forget(self) -> None:
        self._points: list[_Point] = []
        self._parts: list[list[_Block]] | None = None

    # ------------------------------------------------------------------ the loss of the rows of one block

    @abstractmethod
    def _labels(self, y: Array) -> Array:
        """Check the labels and return them in the form that is kept."""

    def _used(self, y: Array) -> Array:
        """Labels in the form that `_measure` and `_slope` use."""
        return y

    @abstractmethod
    def _losses(self, z: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
        """Losses at the scores z, which are taken over, and what slopes and bends are made from: the state."""

    def _measure(self, z: Array, labels: Array) -> tuple[float, tuple[Array, ...]]:
        """Sum of the losses at the scores z, which are taken over, and the state."""
        losses, state = self._losses(z, labels)
        return float(np.add.reduce(losses)), state

    @abstractmethod
    def _slope(self, state: tuple[Array, ...], labels: Array) -> Array:
        """First derivatives of the losses by their scores."""

    @abstractmethod
    def _bend(self, state: tuple[Array, ...]) -> Array:
        """Second derivatives, or what `_bent` makes them from."""

    def _recalled(self, state: tuple[Array, ...], labels: Array) -> Array:
        """Scores that a state was made from, in an array of their own; only where `_recalls` is set."""
        raise NotImplementedError

    def _bent(self, bend: Array, z: Array) -> Array:
        """Second derivatives times a change z of the scores, which is taken over."""
        z *= bend
        return z

    def _scores(self, block: _Block, w: Array) -> Array:
        z: Array = block.X @ w
        return z

    def _pull(self, block: _Block, r: Array) -> Array:
        """Xᵀr."""
        g: Array = block.turned @ r
        return g

    # ------------------------------------------------------------------ the sum

    def value(self, w: Array) -> float:
        return self._visit(w)[0].loss / self.n + self.penalty.value(w)

    def value_and_gradient(self, w: Array) -> tuple[float, Array]:
        point, g = self._visit(w, slopes=True)
        penalty, slope = self.penalty.value_and_gradient(w)
        g /= self.n
        g += slope
        return point.loss / self.n + penalty, g

    def hessian(self, w: Array) -> Callable[[Array], Array]:
        point, parts = self._visit(w)[0], self._divided()
        if point.bends is None:
            point.bends = each(lambda k: [self._bend(state) for state in point.states[k]], len(parts))
        bends, curvature = point.bends, self.penalty.curvature(w)
        if len(parts) == 1 == len(parts[0]):
            return _Product(self, parts[0][0], point, curvature)

        def product(v: Array) -> Array:
            def partial(k: int) -> Array:
                return _sum(
                    self._pull(block, self._bent(bend, self._scores(block, v)))
                    for block, bend in zip(parts[k], bends[k], strict=True)
                )

            result = _sum(each(partial, len(parts)))
            result /= self.n
            result += curvature * v
            return result

        return product

    def _worth_keeping(self) -> int:
        """Return how many vectors of scores are combined in half the time of a product with X; 0 for a small X."""
        if not self._recalls or isinstance(self.X, Rows):
            return 0
        entries = self.X.size if isinstance(self.X, np.ndarray) else self.X.nnz
        return entries // (2 * self.n) if entries > _FEW_ENTRIES else 0

    def _derive(self, point: _Point, block: _Block, w: Array, u: Array, scores: list[Array]) -> None:
        """Measure the loss at w, whose scores are those of `point` and a combination of others."""
        z = self._recalled(point.states[0][0], block.labels)
        room = np.empty_like(z)
        for factor, part in zip(u.tolist(), scores, strict=True):
            z += np.multiply(part, factor, out=room)
        loss, state = self._measure(z, block.labels)
        if loss < _FELL * point.loss:  # so may the scores, beside which the rounding of the old ones is large
            return
        known = _Point(w, loss, [[state]], point.derived + 1)
        self._points = [known, point]  # from which the next trial may come, too

    def _visit(self, w: Array, slopes: bool = False) -> tuple[_Point, Array]:
        """Return what is known at w and, where `slopes` is set, Xᵀ times the slopes, from one reading of X."""
        known = self._known(w)
        if known is not None and not slopes:
            return known, _NOTHING
        parts = self._divided()
        states: Sequence[list[Any] | None] = [None] * len(parts) if known is None else known.states
        if len(parts) == 1:
            done = [self._read(parts[0], w, states[0], slopes)]
            total = done[0][2]
        elif self._separate and not slopes:  # what is read once needs no blocks, and BLAS has threads of its own
            scores, total = self.X @ w, _NOTHING
            done = each(lambda k: self._cut(parts[k], scores), len(parts))
        else:
            done = each(lambda k: self._read(parts[k], w, states[k], slopes), len(parts))
            total = _sum(part[2] for part in done) if slopes else _NOTHING
        if known is None:
            known = _Point(w, sum([part[0] for part in done]), [part[1] for part in done])
            self._points = [known, *self._points[: _POINTS - 1]]
        return known, total

    def _cut(self, blocks: list[_Block], scores: Array) -> tuple[float, list[Any], Array]:
        """Measure the losses of some blocks at once, from the scores of all rows; then as `_read`."""
        begin, end = blocks[0].begin, blocks[-1].begin + len(blocks[-1].labels)
        loss, state = self._measure(scores[begin:end], np.concatenate([block.labels for block in blocks]))
        states = []
        for block in blocks:
            part = slice(block.begin - begin, block.begin - begin + len(block.labels))
            states.append(tuple([entry[part] for entry in state]))
        return loss, states, _NOTHING

    def _read(
        self, blocks: list[_Block], w: Array, known: list[Any] | None, slopes: bool
    ) -> tuple[float, list[Any], Array]:
        """Go through some blocks: the sum of their losses, their states and, if asked, Xᵀ times their slopes."""
        states: list[Any] = [] if known is None else known
        loss, total = 0.0, _NOTHING
        for place, block in enumerate(blocks):
            if known is None:
                part, state = self._measure(self._scores(block, w), block.labels)
                loss += part
                states.append(state)
            if slopes:
                pulled = self._pull(block, self._slope(states[place], block.labels))
                total = pulled if total is _NOTHING else np.add(total, pulled, out=total)
        return loss, states, total

    def _known(self, w: Array) -> _Point | None:
        for place, point in enumerate(self._points):
            if point.belongs(w):
                if place:
                    self._points = [point, *self._points[:place], *self._points[place + 1 :]]
                return point
        return None

    def _divided(self) -> list[list[_Block]]:
        """Return the blocks of X, in parts: one block where X is sparse or fits the cache."""
        if self._parts is None:
            labels = self._used(self.y)
            size = self._rows_of_a_block()
            if size >= self.n:
                self._parts = [[_Block(self.X, labels)]]
                return self._parts
            blocks = [_Block(self.X[k : k + size], labels[k : k + size], k) for k in range(0, self.n, size)]
            length = -(-len(blocks) // _PARTS)
            self._parts = [blocks[k : k + length] for k in range(0, len(blocks), length)]
        return self._parts

    def _rows_of_a_block(self) -> int:
        if not isinstance(self.X, np.ndarray) or not self._divides or self.X.nbytes <= _LARGE:
            return self.n
        rows = _BLOCK // (self.X.itemsize * self.features)
        return rows if rows >= _FEW else self.n


class Logistic(_Linear):
    """Logistic regression: the mean of log(1 + e^z) − y z with z = xᵀw, plus a penalty.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels 0 or 1.
    penalty : {"nonconvex", "l2", "none"}
        "nonconvex" is strength · Σ w²/(1+w²), the paper's; "l2" is strength/2 · ‖w‖².
    strength : float
        Weight of the penalty.

    Examples
    --------
    >>> import numpy as np, sanc
    >>> X = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]])
    >>> problem = sanc.problems.Logistic(X, [0, 1, 1], penalty="nonconvex", strength=0.1)
    >>> round(problem.value(np.zeros(2)), 6)
    0.693147
    """

    _recalls = True

    def __init__(self, X: Any, y: Any, penalty: PenaltyKind = "nonconvex", strength: float = 1.0) -> None:
        super().__init__(X, y, penalty, strength)

    def _labels(self, y: Array) -> Array:
        return _among(y, (0, 1), "(y + 1) / 2 turns −1 and 1 into them").astype(self.dtype)

    def _used(self, y: Array) -> Array:
        return 1 - 2 * y  # the loss is log(1 + e^t) with t = z where y = 0 and t = −z where y = 1

    def _losses(self, z: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
        z *= labels
        e = np.abs(z)
        np.negative(e, out=e)
        np.exp(e, out=e)
        losses = np.log1p(e)
        losses += np.maximum(z, 0.0)
        return losses, (z, e)

    def _recalled(self, state: tuple[Array, ...], labels: Array) -> Array:
        z: Array = state[0] * labels
        return z

    def _slope(self, state: tuple[Array, ...], labels: Array) -> Array:
        t, e = state
        slope: Array = (t >= 0).astype(e.dtype)
        np.maximum(slope, e, out=slope)  # e^t / (1 + e^t), its numerator 1 or e
        slope /= 1 + e
        slope *= labels
        return slope

    def _bend(self, state: tuple[Array, ...]) -> Array:
        _, e = state
        bend: Array = 1 + e
        bend *= bend
        np.divide(e, bend, out=bend)
        return bend


class NonconvexSVM(_Linear):
    """The nonconvex support vector machine: the mean of 1 − tanh(y xᵀw), plus strength · ‖w‖².

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels −1 or 1.
    strength : float
        λ of the penalty λ‖w‖².
    """

    def __init__(self, X: Any, y: Any, strength: float = 1e-3) -> None:
        super().__init__(X, y, "l2", 2 * strength)

    def _labels(self, y: Array) -> Array:
        return _among(y, (-1, 1), "2 * y − 1 turns 0 and 1 into them").astype(self.dtype)

    def _losses(self, z: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
        z *= labels
        np.tanh(z, out=z)
        return 1 - z, (z,)

    def _slope(self, state: tuple[Array, ...], labels: Array) -> Array:
        (z,) = state
        slope: Array = z * z
        slope -= 1
        slope *= labels
        return slope

    def _bend(self, state: tuple[Array, ...]) -> Array:
        (z,) = state
        bend: Array = z * z
        bend -= 1
        bend *= z
        bend *= -2
        return bend


class Softmax(_Linear):
    """Softmax regression: mean cross entropy of the scores XWᵀ, plus a penalty on W.

    The variable is W of shape (classes, d), flattened row by row.

    Parameters
    ----------
    X : array or scipy.sparse matrix, shape (n, d)
        Features, float32 or float64.
    y : array, shape (n,)
        Labels 0 … classes − 1.
    classes : int, optional
        Number of classes; by default the largest label plus one.
    penalty : {"l2", "nonconvex", "none"}
        As in `Logistic`.
    strength : float
        Weight of the penalty.
    """

    def __init__(
        self, X: Any, y: Any, classes: int | None = None, penalty: PenaltyKind = "l2", strength: float = 1e-3
    ) -> None:
        self.classes = classes  # type: ignore[assignment]
        super().__init__(X, y, penalty, strength)
        self.dim = self.classes * self.features

    classes: int
    _separate = False
    _divides = False  # a product of matrices is no longer a matter of memory, and BLAS does best with the whole

    def _labels(self, y: Array) -> Array:
        if not np.all(np.equal(y, np.round(y))) or y.min() < 0:
            bad = y[(y != np.round(y)) | (y < 0)][0]
            raise ArgumentError(f"y holds {bad!r}: pass labels 0, 1, 2 …")
        require_integer("classes", self.classes, 2)
        if self.classes is None:
            self.classes = int(y.max()) + 1
        if self.classes < 2 or y.max() >= self.classes:
            raise ArgumentError(
                f"classes = {self.classes} does not fit labels up to {int(y.max())}: pass at least "
                f"{max(2, int(y.max()) + 1)}."
            )
        return y.astype(np.intp)

    # Scores, slopes and bends have one row for each class, so that all sums over classes are sums of long rows.

    def _scores(self, block: _Block, w: Array) -> Array:
        W = w.reshape(self.classes, self.features)
        if not isinstance(block.X, np.ndarray):
            return np.ascontiguousarray((block.X @ W.T).T)
        z: Array = W @ block.turned
        return z

    def _pull(self, block: _Block, r: Array) -> Array:
        if not isinstance(block.X, np.ndarray):
            g: Array = (block.turned @ r.T).T.reshape(-1)
        else:
            g = (r @ block.X).reshape(-1)
        return g

    def _losses(self, z: Array, labels: Array) -> tuple[Array, tuple[Array, ...]]:
        z -= z.max(axis=0)
        own = z[labels, np.arange(len(labels))]
        np.exp(z, out=z)
        total = z.sum(axis=0)
        z /= total
        return np.log(total) - own, (z,)

    def _slope(self, state: tuple[Array, ...], labels: Array) -> Array:
        slope: Array = state[0].copy()
        slope[labels, np.arange(len(labels))] -= 1
        return slope

    def _bend(self, state: tuple[Array, ...]) -> Array:
        return state[0]

    def _bent(self, bend: Array, z: Array) -> Array:
        z *= bend
        z -= bend * z.sum(axis=0)
        return z


def pool(problem: FiniteSum) -> Pool | None:
    """Return what samples can be drawn from; None for a class of its own, which may do other things with its rows."""
    known = isinstance(problem, _Linear) and type(problem) in (Logistic, NonconvexSVM, Softmax)
    return Pool(problem.X) if known else None  # type: ignore[attr-defined]


def part(problem: FiniteSum, rows: Array, drawn_from: Pool | None) -> FiniteSum:
    """Return `problem.subset(rows)`, without a check where there is a pool: for value, gradient and products alone."""
    if drawn_from is None or not isinstance(problem, _Linear):
        return problem.subset(rows)
    return problem._part(drawn_from.matrix(rows), rows)


def memory_of(problem: FiniteSum, w: Array) -> dict[str, Any] | None:
    """Return the scores at w where they were made from others, which `remind` makes known to an equal problem."""
    if not isinstance(problem, _Linear) or not problem._recalls:
        return None
    point = problem._known(w)
    if point is None or not point.derived:
        return None
    ((block,),) = problem._divided()
    return {"scores": problem._recalled(point.states[0][0], block.labels), "derived": point.derived}


def remind(problem: FiniteSum, w: Array, memory: Mapping[str, Any] | None) -> None:
    """Make known what `memory_of` returned."""
    if memory is None or not isinstance(problem, _Linear):
        return
    ((block,),) = problem._divided()
    loss, state = problem._measure(np.array(memory["scores"]), block.labels)
    problem._points = [_Point(w, loss, [[state]], memory["derived"]), *problem._points[: _POINTS - 1]]


_NOTHING: Array = np.empty(0)


def _sum(terms: Iterable[Array]) -> Array:
    """Sum the terms in their order, into the first of them."""
    total: Array | None = None
    for term in terms:
        total = term if total is None else np.add(total, term, out=total)
    return _NOTHING if total is None else total


def _matrix(X: Any) -> Any:
    if scipy.sparse.issparse(X):
        X = X.tocsr()
        entries = X.data
    else:
        X = np.asarray(X)
        entries = X
    if X.ndim != 2 or 0 in X.shape:
        raise ArgumentError(f"X has shape {X.shape}: pass a matrix with at least one row and one column.")
    if not np.issubdtype(entries.dtype, np.number) or np.iscomplexobj(entries):
        raise ArgumentTypeError(f"X holds {entries.dtype}: pass real numbers.")
    if entries.dtype not in (np.float32, np.float64):
        X = X.astype(np.float64)
        entries = X.data if scipy.sparse.issparse(X) else X
    if not np.all(np.isfinite(entries)):
        bad = int(np.count_nonzero(~np.isfinite(entries)))
        raise ArgumentError(f"X holds {bad} entries that are NaN or infinite: remove or impute them.")
    return X


def _vector(labels: Any, n: int) -> Array:
    y: Array = np.asarray(labels)
    if y.ndim != 1 or len(y) != n:
        raise ArgumentError(f"y has shape {y.shape} and X has {n} rows: pass one label for each row.")
    if not (np.issubdtype(y.dtype, np.number) or y.dtype == bool) or not np.all(np.isfinite(y)):
        raise ArgumentError(f"y holds {y.dtype} labels that are not finite numbers: encode them as numbers.")
    return y


def _among(y: Array, allowed: tuple[int, ...], remedy: str) -> Array:
    good = np.isin(y, allowed)
    if not good.all():
        raise ArgumentError(
            f"y holds {y[~good][0]!r} in row {int(np.argmin(good))}: pass labels {allowed[0]} and {allowed[1]}; "
            f"{remedy}."
        )
    return y
