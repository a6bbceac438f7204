"""Lanczos: everything that costs Hessian products happens here.

Started at a vector, the process builds an orthonormal Q with Qᵀ B Q = T tridiagonal, one product an iteration. The
basis is stored, or thrown away and generated again in a second pass when a combination of its vectors is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sanc.vectors import Floats, Space, Vector


class NonFiniteProductError(ArithmeticError):
    """A Hessian product held something that is not finite."""


class Tridiagonal:
    """T as Lanczos finds it, one column after another: what every Krylov space knows of itself.

    Attributes
    ----------
    start_norm : float
        Length of the vector it was started at.
    dim : int
        Lanczos iterations made, j.
    residual : float
        β_j: the part of B q_j that left the space. 0 when the space is invariant.
    invariant : bool
        Whether the process broke down: B maps the space into itself and nothing can be added.
    linear : ndarray
        Qᵀ·start.
    """

    def __init__(self, start_norm: float, space: Space) -> None:
        self.start_norm = start_norm
        self._space = space
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self._scale = 0.0

    @property
    def dim(self) -> int:
        return len(self._alpha)

    @property
    def residual(self) -> float:
        return self._beta[-1] if self._beta else math.nan

    @property
    def invariant(self) -> bool:
        return self.residual == 0.0

    @property
    def linear(self) -> Floats:
        c = np.zeros(self.dim)
        c[0] = self.start_norm
        return c

    def tridiagonal(self) -> tuple[Floats, Floats]:
        """Diagonal and off-diagonal of T."""
        return np.array(self._alpha, np.float64), np.array(self._beta[: self.dim - 1], np.float64)

    def slope(self, shift: float) -> float:
        """β_j |u_j| for (T + shift·I) u = −start e₁, from the pivots alone; NaN where they are not all positive.

        That is ‖∇m‖ where `shift` is the μ of the cubic model's minimiser.
        """
        result, pivot, last = self.start_norm, 1.0, 0.0
        for alpha, beta in zip(self._alpha, self._beta, strict=True):
            pivot = alpha + shift - last * (last / pivot)
            if not pivot > 0.0:
                return math.nan
            result *= beta / pivot
            last = beta
        return result

    def _append(self, alpha: float, beta: float) -> float:
        """Add a column; return β_j, 0 where it is rounding or nothing can follow."""
        j = len(self._alpha)
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise NonFiniteProductError(f"the Hessian product of Lanczos iteration {j + 1} is not finite")
        self._scale = max(self._scale, abs(alpha) + beta + (self._beta[-1] if j else 0.0))
        if beta <= 10.0 * self._space.eps * self._scale or j + 1 == self._space.dim:
            beta = 0.0
        self._alpha.append(alpha)
        self._beta.append(beta)
        return beta


_SHORT, _LONG = 2.0**-3, 1.0
"""Lengths between which a vector of Q that lies in its place already is left as it is, which saves a pass over it.

In half precision, in which products may be made, a longer one could overflow and a shorter one would lose digits."""


class Krylov(Tridiagonal):
    """A growing Krylov space of a symmetric operator.

    Parameters
    ----------
    product : callable
        ``v -> B v``; the vector it returns is taken over and changed in place.
    start : vector
        First direction, not zero.
    space : Space
        The vectors' arithmetic.
    store : bool
        Keep Q. Otherwise `combine` runs the recurrence again, which costs its products once more, and nothing can be
        added to the space afterwards.
    reorthogonalise : bool
        Orthogonalise every new vector against all earlier ones, twice.
    linear : vector, optional
        A vector g whose projections Qᵀg are wanted; by default g is `start` and they are ‖g‖ e₁.
    limit : int, optional
        Most Lanczos iterations. It lets Q be allocated to measure.
    add : callable, optional
        ``(v, into)`` adds B v to `into`; used where Q is not kept. By default the vector of `product` is added.
    write : callable, optional
        ``(v, out)`` returns B v as `product` does, and may do so in `out`; used where Q is kept, to save copies.
    prepare : callable, optional
        Does what all products share; called before a second pass takes memory for its vectors.
    start_norm : float, optional
        ‖start‖, where it is known.
    """

    def __init__(
        self,
        product: Callable[[Vector], Vector],
        start: Vector,
        space: Space,
        *,
        store: bool = True,
        reorthogonalise: bool = False,
        linear: Vector | None = None,
        limit: int | None = None,
        add: Callable[[Vector, Vector], None] | None = None,
        write: Callable[[Vector, Vector], Vector] | None = None,
        prepare: Callable[[], None] | None = None,
        start_norm: float | None = None,
    ) -> None:
        super().__init__(space.norm(start) if start_norm is None else start_norm, space)
        self._product = product
        self._add = add
        self._write = write
        self._prepare = prepare
        self._start = start
        self._store = store
        self._reorthogonalise = reorthogonalise and store
        self._linear = linear
        self._asked = limit
        self._limit = min(limit or space.dim, space.dim)
        if not (self.start_norm > 0.0 and math.isfinite(self.start_norm)):
            raise ValueError(f"a Krylov space needs a start of positive finite length, not {self.start_norm}")
        self._projections: list[float] = []
        self._blocks: list[Any] = []  # the rows of Q; a full block is never copied into a larger one
        self._rows: list[Vector] = []  # the same, one by one
        self._lengths: list[float] = []  # of the rows; 1 but for those that were left as they came
        self._uneven = False  # whether there are such
        self._current: Vector | None = None  # q_j, as long as its row
        self._next: Vector | None = None  # β_j q_{j+1}, as often as q_j is long
        self._open: tuple[Any, ...] | None = None  # what the last β is made from

    @property
    def residual(self) -> float:
        if self._open is not None:
            self._close(self._open)
        return self._beta[-1] if self._beta else math.nan

    def _close(self, unfinished: tuple[Any, ...]) -> None:
        """Compute the last β: a full space can do without it, so it waits until somebody asks."""
        _, beta = self._space.part(*unfinished)
        self._open = None
        self._beta.pop()
        self._append(self._alpha.pop(), beta)

    @property
    def linear(self) -> Floats:
        """Qᵀg: the linear term of the cubic model in this basis."""
        return super().linear if self._linear is None else np.array(self._projections, np.float64)

    @property
    def from_gradient(self) -> bool:
        """Whether the space was started at g itself, so that Qᵀg = ‖g‖ e₁."""
        return self._linear is None

    def least_last(self, sigma: float) -> float:
        """Bound |u_j| of the cubic model's minimiser from below as `cubic.first_doubt` does, which see."""
        reach, bound = self._scale, self.start_norm
        shift = reach + 0.5 * (reach + math.sqrt(reach * reach + 4.0 * sigma * bound))
        if not 0.0 < shift < math.inf:
            return 0.0
        bound /= shift
        for beta in self._beta[:-1]:
            bound *= beta / shift
        return bound

    def extend(self) -> bool:
        """Make one Lanczos iteration; False where the space is invariant, full, or of the dimension asked for."""
        space, j = self._space, len(self._alpha)
        last = self._beta[-1] if j else math.nan
        if last == 0.0 or j >= self._limit:
            return False
        previous, q = self._current, self._advance()
        length = self._lengths[-1]
        pull = last * length / self._lengths[-2] if j else 0.0
        if self._reorthogonalise:
            r = self._product(q)
            alpha = self._orthogonalise(r)
            beta = space.norm(r) if math.isfinite(alpha) else alpha
        elif self._store and j + 1 == self._limit < space.dim:
            r = self._product(q)
            # The vector before, which would be taken out of r first, is orthogonal to q.
            alpha = beta = space.dot(q, r) / length**2
            if math.isfinite(alpha):
                self._alpha.append(alpha)
                self._beta.append(math.nan)
                self._open = (r, q, previous, pull, length)
        elif self._store:
            if self._write is not None and j + 1 < len(self._rows):
                r = self._write(q, self._rows[j + 1])  # the row of what it becomes
            else:
                r = self._product(q)
            alpha, beta = space.part(r, q, previous, pull, length, self._last_two() if space.long else None)
        else:
            r = self._image(q, previous, last)
            alpha, beta = space.part(r, q, None, 0.0)
        if self._open is None:
            beta = self._append(alpha, beta)
        if self._linear is not None:
            self._projections.append(space.dot(q, self._linear) / length)
        if beta > 0.0 and j + 1 < self._limit:
            self._current, self._next = q, r
        else:
            self._current = self._next = None
        return True

    def _advance(self) -> Vector:
        """Return q_{j+1}: a row of Q, or where Q is not kept a vector of its own; its length is noted."""
        v, length = self._start, self.start_norm
        if self._next is not None:
            v, length = self._next, self._beta[-1] * self._lengths[-1]
        row = self._row() if self._store else v
        if self._store and row is v and _SHORT < length < _LONG:
            self._uneven = True
        else:
            if self._store or self._next is not None:
                self._space.divide(v, length, out=row)
            else:
                row = v / length
            length = 1.0
        self._lengths[len(self._alpha) :] = [length]
        if self._store:
            self._start = None  # only a second pass begins there again
        self._next = None
        return row

    def _row(self) -> Vector:
        j, room = len(self._alpha), len(self._rows)
        if j == room:
            rows = max(6, room) if self._asked is None else 64
            self._blocks.append(self._space.rows(min(rows, self._limit - room)))
            self._rows.extend(self._space.each(self._blocks[-1]))
        return self._rows[j]

    def _last_two(self) -> Any:
        """Return q and the vector before it as rows of one block, where they are."""
        block = self._blocks[-1]
        place = len(self._alpha) - (len(self._rows) - len(block))
        return block[place - 1 : place + 1] if place > 0 else None

    def _image(self, q: Vector, previous: Vector | None, beta: float) -> Vector:
        """B q − β·previous where Q is not kept, in the memory of `previous` if products can be added."""
        if self._add is None:
            r = self._product(q)
            if previous is not None:
                self._space.subtract(r, beta, previous)
            return r
        if previous is None:
            previous = self._space.zeros()
        else:
            previous *= -beta
        self._add(q, previous)
        return previous

    def _orthogonalise(self, r: Vector) -> float:
        """Take all of Q out of B q, and once more what rounding left of it; return α."""
        blocks = self._kept(self.dim + 1)
        parts = [self._space.orthogonalise(r, block) for block in blocks]
        for block in blocks:
            self._space.orthogonalise(r, block)
        return float(parts[-1][-1])

    def _kept(self, count: int) -> list[Any]:
        """Return the first rows of Q, block by block."""
        if len(self._rows) == count:
            return self._blocks
        blocks = []
        for block in self._blocks:
            blocks.append(block[:count])
            count -= len(block)
        return blocks

    def basis(self) -> Any:
        """Return Q as one block of rows, which nothing changes any more; only where it is stored."""
        self._make_unit()
        if len(self._blocks) == 1 and len(self._rows) == self.dim:
            return self._blocks[0]
        rows, begin = self._space.rows(self.dim), 0
        for block in self._kept(self.dim):
            rows[begin : begin + len(block)] = block
            begin += len(block)
        return rows

    def _make_unit(self) -> None:
        """Make all rows as long as 1, and what goes on from them fit."""
        if not self._uneven:
            return
        if self._open is not None:
            self._close(self._open)  # while the rows are what it remembers
        vectors = list(zip(self._rows, self._lengths, strict=False))
        if self._next is not None:
            vectors.append((self._next, self._lengths[-1]))
        for vector, length in vectors:
            if length != 1.0:
                self._space.divide(vector, length, out=vector)
        self._lengths, self._uneven = [1.0] * len(self._lengths), False

    def combine(self, *coefficients: Floats) -> Sequence[Vector]:
        """Q u for each coefficient vector u, as fresh vectors; a second pass serves all of them at once."""
        if not self._store:
            return self._second_pass(coefficients)
        return [self._sum(c, None) for c in coefficients]

    def added(self, x: Vector, coefficients: Floats) -> Vector:
        """Return x + Q u as a fresh vector; β_j can then not be asked for any more, if it was not."""
        self._open = None
        if self._store:
            return self._sum(coefficients, x)
        (point,) = self._second_pass([coefficients])
        point += x
        return point

    def _sum(self, coefficients: Floats, total: Vector | None) -> Vector:
        if self._uneven:
            coefficients = coefficients / np.array(self._lengths[: self.dim])
        begin = 0
        for block in self._kept(self.dim):
            end = begin + block.shape[0]
            total = self._space.combine(block, coefficients[begin:end], total)
            begin = end
        return total

    def _second_pass(self, coefficients: Sequence[Floats]) -> Sequence[Vector]:
        self._limit = self.dim
        self._current = self._next = None  # their memory is needed now
        if self._prepare is not None and self.dim > 1:
            self._prepare()
        q: Vector = self._start / self.start_norm
        previous: Vector | None = None
        sums = [q * float(c[0]) for c in coefficients]
        for j in range(self.dim - 1):
            r = self._image(q, previous, self._beta[j - 1])
            self._space.subtract(r, self._alpha[j], q)
            if not self._space.finite(r):
                raise NonFiniteProductError(
                    f"the Hessian product of Lanczos iteration {j + 1}, repeated, is not finite"
                )
            self._space.divide(r, self._beta[j], out=r)
            previous, q = q, r
            for total, c in zip(sums, coefficients, strict=True):
                self._space.subtract(total, -float(c[j + 1]), q)
        return sums
