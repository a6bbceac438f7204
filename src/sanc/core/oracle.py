"""What the method asks of the world: f, ∇f and Hessian products, each on its own sample, and how many it asked."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sanc.core.krylov import Columns, Lanczos
from sanc.core.record import Calls
from sanc.core.space import Space, Vector

T = TypeVar("T")


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

    def snapshot(self) -> Calls:
        """Return the component counts as they stand."""
        return Calls(self.value, self.gradient, self.product, self.paper_calls)


class Operator(ABC):
    """The Hessian at one point on one sample: one product, good for many vectors."""

    @abstractmethod
    def __call__(self, v: Vector) -> Vector:
        """Return the product with `v` as a fresh vector."""

    @abstractmethod
    def gradient(self) -> Vector:
        """Return the gradient on the Hessian's sample, as a fresh vector."""

    def error(self, v: Vector, product: Vector) -> float:
        """Estimate ‖error‖ of the `product` with `v`, beyond rounding; 0 where products are exact."""
        return 0.0

    def release(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of whatever the products needed; a later product builds it anew."""


class Oracle(ABC):
    """Answers f, g and Hv at a point, on the samples of the current iteration. It lives as long as the run.

    Attributes
    ----------
    space : Space
        The vectors that are spoken in.
    meter : Meter
        What was asked so far.
    exact : bool
        Whether all three samples are the whole objective in every iteration.
    hvp : str
        How torch makes the Hessian products; empty where it does not.
    values : bool
        Whether it knows values and products, and not gradients only.
    written : bool
        Whether its gradient is a function that a caller wrote, and may be that of another function.
    """

    space: Space
    meter: Meter
    exact: bool = False
    hvp: str = ""
    values: bool = True
    written: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Components in the gradient, Hessian and objective samples."""
        return 1, 1, 1

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors that a vector is made of, in their order."""
        return [(self.space.dim,)]

    def begin(self, iteration: int, *, products: bool = True) -> None:  # noqa: B027 - most have nothing to draw
        """Draw the samples of an iteration; `products` says whether it will ask for Hessian products."""

    def end(self, step_norm: float) -> None:  # noqa: B027 - most learn nothing from it
        """Hear how long the step was that the iteration took."""

    def numbers(self) -> dict[str, Any]:
        """Return what a resumed run needs to know beside the point and the counts."""
        return {}

    def restore(self, numbers: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to restore
        """Go on from what `numbers` returned."""

    def knows(self, x: Vector) -> tuple[bool, bool]:
        """Whether value and gradient at `x` are remembered for the next iteration."""
        return False, False

    @abstractmethod
    def value(self, x: Vector) -> float:
        """f(x) on the objective sample."""

    def trial(self, x: Vector) -> float:
        """f(x) on the gradient sample."""
        return self.value(x)

    @abstractmethod
    def gradient(self, x: Vector) -> tuple[float, Vector]:
        """f(x) and ∇f(x) on the gradient sample."""

    def gradient_error(self, x: Vector) -> float:
        """How far ∇f(x) may be off where it is made of differences, because of the rounding of values; else 0."""
        return 0.0

    def norm(self, v: Vector) -> float:
        """‖v‖ of a point that it was asked at, or a gradient that it answered; who read it along spares a wait."""
        return self.space.norm(v)

    @abstractmethod
    def hessian(self, x: Vector) -> Operator:
        """∇²f(x) on the Hessian sample."""

    def lanczos(self, operator: Operator, start: Vector, **how: Any) -> Columns:
        """Start Lanczos at `start`."""
        return Lanczos(operator, start, self.space, **how)


class Recent(Generic[T]):
    """The last few answers, found again by the very vector they belong to; what is asked for stays longest.

    The value at the current point is asked for in every iteration, so rejected trials never push it out, and a run that
    is resumed counts as one that was not interrupted. Nothing is kept alive for being remembered.
    """

    def __init__(self, size: int = 3) -> None:
        self._size = size
        self._entries: list[tuple[Callable[[], Any], T]] = []

    def __contains__(self, x: Any) -> bool:
        return any(known() is x for known, _ in self._entries)

    def answer(self, x: Any, ask: Callable[[Any], T]) -> T:
        """Return the answer at `x`, asked for where it is not known."""
        for place, (known, answer) in enumerate(self._entries):
            if known() is x:
                self._entries.append(self._entries.pop(place))
                return answer
        return self.put(x, ask(x))

    def put(self, x: Any, answer: T) -> T:
        """Remember an answer and return it."""
        self._entries = [*self._entries[1 - self._size :], (weakref.ref(x), answer)]
        return answer

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def difference_step(space: Space, x: Vector, least: float = 1.0, noise: float | None = None) -> float:
    """Length of the steps of a central difference at `x`: the cube root of the precision, at the scale of x.

    `least` is the smallest scale of x, and `noise` the relative error of what is differenced, where that is above the
    precision.
    """
    return float((noise or space.eps) ** (1 / 3) * max(least, space.norm(x) / space.dim**0.5))
