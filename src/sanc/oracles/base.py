"""What the engine asks of the world: f, ∇f and Hessian products, each on its own sample, and how many it asked."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sanc.lanczos import Recorded
from sanc.record import Calls
from sanc.survey import Memory, Move, Moved, Survey, look_at, make, read
from sanc.vectors import Floats, Space, Vector


@dataclass(slots=True)
class Meter:
    """Counts component evaluations and, beside them, plain calls."""

    value: int = 0
    gradient: int = 0
    product: int = 0
    paper_calls: int = 0
    nfev: int = 0
    njev: int = 0
    nhev: int = 0

    def count_value(self, size: int) -> None:
        """One function value over `size` components."""
        self.value += size
        self.nfev += 1

    def count_gradient(self, size: int) -> None:
        """One gradient over `size` components."""
        self.gradient += size
        self.njev += 1

    def count_product(self, size: int) -> None:
        """One Hessian product over `size` components."""
        self.product += size
        self.nhev += 1

    def copy(self) -> Meter:
        """Return another one that stands where this one does."""
        return Meter(self.value, self.gradient, self.product, self.paper_calls, self.nfev, self.njev, self.nhev)

    def snapshot(self) -> Calls:
        """Return the component counts as they stand."""
        return Calls(self.value, self.gradient, self.product, self.paper_calls)


class Recent:
    """The last few values, found again by the very objects they belong to; what is asked for stays longest.

    The value at the current point is asked for in every iteration, so rejected trials never push it out, and a run that
    is resumed counts as one that was not interrupted. Nothing is kept alive for being remembered.
    """

    def __init__(self, size: int = 3) -> None:
        self._size = size
        self._entries: list[tuple[tuple[Callable[[], Any], ...], float]] = []

    def _place(self, key: tuple[Any, ...]) -> int | None:
        for place, (known, _) in enumerate(self._entries):
            for a, b in zip(known, key, strict=True):
                if a() is not b:
                    break
            else:
                return place
        return None

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return self._place(key) is not None

    def get(self, *key: Any) -> float | None:
        """Return the value of these objects, if it is known."""
        place = self._place(key)
        if place is None:
            return None
        self._entries.append(self._entries.pop(place))
        return self._entries[-1][1]

    def put(self, value: float, *key: Any) -> float:
        """Remember a value and return it."""
        self._entries = [*self._entries[1 - self._size :], (tuple(map(_reference, key)), value)]
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _reference(thing: Any) -> Callable[[], Any]:
    """Refer to something without holding it, if its type allows that."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


class Operator(ABC):
    """The Hessian at one point on one sample, good for many products."""

    @abstractmethod
    def __call__(self, v: Vector, out: Vector | None = None) -> Vector:
        """Return the product with `v`: in `out` where one is given and that saves a copy, else as a fresh vector."""

    def add(self, v: Vector, into: Vector) -> None:
        """Add the product with `v` to another vector, in place; where memory is short that saves a vector."""
        into += self(v)

    @abstractmethod
    def gradient(self) -> Vector:
        """Return the gradient on the Hessian's sample."""

    def error(self, v: Vector) -> float:
        """Estimate ‖error‖ of the product with `v`, beyond rounding; 0 where products are exact."""
        return 0.0

    def moved(self, to: Vector, u: Floats) -> None:  # noqa: B027 - most learn nothing from it
        """Hear that ``to`` = x + Σ uᵢvᵢ for all the vectors vᵢ it was multiplied by, before f is asked for there."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what all products share before the first of them."""

    def release(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of whatever the products needed; a later product builds it anew."""


class Tally:
    """What an iteration is charged to.

    Attributes
    ----------
    space : Space
        The vectors that are spoken in.
    meter : Meter
        What was asked so far.
    hvp : str
        How torch makes the Hessian products; empty where it does not.
    """

    space: Space
    meter: Meter
    hvp: str = ""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Components in the gradient, Hessian and objective samples."""
        return 1, 1, 1


class Oracle(Tally, ABC):
    """Answers f, g and Hv at a point, on the samples of the current iteration.

    Attributes
    ----------
    exact : bool
        Whether all three samples are the whole objective in every iteration.
    lends : bool
        Whether vectors may go while a product is made, and come back; not where somebody knows them by their address.
    """

    exact: bool = False
    lends: bool = False

    def begin(self, iteration: int, *, products: bool = True) -> None:
        """Draw the samples of an iteration; `products` says whether it will ask for Hessian products."""

    def dismiss(self, role: str) -> None:
        """Let go of the "gradient" or "hessian" sample, for which this iteration is not expected to ask again."""

    def knows(self, x: Vector) -> tuple[bool, bool]:
        """Whether value and gradient at `x` are remembered for the next iteration."""
        return False, False

    def remembered(self, x: Vector) -> Any:
        """Return what is known at `x` and would come out differently, by rounding, if it were computed from x alone."""
        return None

    def remind(self, x: Vector, memory: Any) -> None:
        """Hear what `remembered` returned in the run that was interrupted at `x`."""

    @abstractmethod
    def value(self, x: Vector) -> float:
        """f(x) on the objective sample."""

    @abstractmethod
    def gradient(self, x: Vector) -> tuple[float, Vector]:
        """f(x) and ∇f(x) on the gradient sample."""

    def survey(self, x: Vector, memory: Memory) -> Survey:
        """Look at the gradient sample at `x` with all the numbers that the mini-batch iteration asks for."""
        value, g = self.gradient(x)
        return read(self.space, *look_at(self.space, value, g, memory), memory)

    def advance(self, x: Vector, move: Move) -> Moved:
        """Take a step that is not judged."""
        return make(self.space, x, move)

    def keep(self, x: Vector) -> Vector:
        """Return a vector as something that stays as it is in later iterations."""
        return x

    def lanczos(self, x: Vector, start: Vector, scale: Vector | None, limit: int) -> Recorded | None:
        """Build a Krylov space of M^(−1/2) ∇²f(x) M^(−1/2) at once, where that is faster than one product at a time."""
        return None

    def trial(self, x: Vector) -> float:
        """f(x) on the gradient sample."""
        return self.value(x)

    @abstractmethod
    def hessian(self, x: Vector) -> Operator:
        """∇²f(x) on the Hessian sample."""


def difference_step(space: Space, x: Vector) -> float:
    """Length of the steps of a central difference at `x`: the cube root of the precision, at the scale of x."""
    return float(space.eps ** (1 / 3) * max(1.0, space.norm(x) / space.dim**0.5))
