"""The interface to the objective: f, ∇f and Hessian products, each on its own sample, with counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sanc.core.meter import Meter
from sanc.core.space import Floats, Space, Vector
from sanc.core.spectrum.krylov import ColumnSource, Lanczos


class Operator(ABC):
    """The Hessian at one point on one sample, as a product with vectors."""

    @abstractmethod
    def __call__(self, v: Vector) -> Vector:
        """Return the product with `v` as a new vector."""

    @abstractmethod
    def gradient(self) -> Vector:
        """Return the gradient on the Hessian's sample, as a new vector."""

    def matrix(self) -> Floats | None:
        """Return the Hessian as a matrix of float64 if it costs less than the products of an iteration; else None."""
        return None

    def error(self, v: Vector, product: Vector) -> float:
        """Estimate the error norm of the `product` with `v` beyond roundoff; 0 if products are exact."""
        return 0.0

    def release(self) -> None:  # noqa: B027 - most hold no memory
        """Free the memory that products use; a later product allocates it again."""


class Eigenbasis(NamedTuple):
    """The eigenpairs of the Hessian of a model, and the gradient in their basis, in float64 on the host.

    Attributes
    ----------
    values : ndarray
        The eigenvalues, ascending.
    rows : ndarray
        The eigenvectors, as rows.
    projections : ndarray
        The gradient in this basis.
    """

    values: Floats
    rows: Floats
    projections: Floats


class Embedding:
    """How vectors of this oracle map to vectors of the whole objective. The default is the identity.

    The oracle of a face has the free variables alone, and that of a scaled objective evaluates 2^exponent · f. Runs
    convert points and steps with these members; the pieces of a method need none of them.

    Attributes
    ----------
    free_indices : Tensor or None
        Indices of its variables among all variables, if it has only the free variables of a face; None: all.
    exponent : int
        It evaluates 2^exponent · f.
    """

    free_indices: Any = None
    exponent: int = 0

    @property
    def full_oracle(self) -> Oracle:
        """The oracle of all variables; another one if this has only the free variables of a face."""
        return self  # type: ignore[return-value]

    @property
    def unscaled_oracle(self) -> Oracle:
        """The oracle of f itself; another one if this evaluates 2^exponent · f."""
        return self  # type: ignore[return-value]

    def full_point(self, x: Vector) -> Vector:
        """Return the point with all variables, the same object for the same x."""
        return x

    def full_vector(self, v: Vector) -> Vector:
        """Return a vector of the state with all variables; those held have the values of the point."""
        return v

    def full_step(self, s: Vector) -> Vector:
        """Return a step with all variables; those held do not change."""
        return s

    def compress(self, full: Vector) -> Vector:
        """Return the entries of the free variables of a vector with all variables."""
        return full


class Oracle(Embedding, ABC):
    """Evaluates f, g and Hv at a point, on the samples of the current iteration. One oracle serves a whole run.

    Attributes
    ----------
    space : Space
        The vector space of x.
    meter : Meter
        Evaluations so far.
    exact : bool
        Whether all three samples are the whole objective in every iteration.
    hvp : str
        How torch computes the Hessian products; empty for other oracles.
    has_values : bool
        Whether it evaluates values and products, and not gradients only.
    parameters : vector or None
        Without values: the parameters as the caller left them, at the point of the gradient.
    has_user_gradient : bool
        Whether its gradient is a function of the caller, which may be inconsistent with f.
    differenced_gradient : bool
        Whether its gradient is a difference of values, with a truncation error.
    convex : bool
        Whether f is known to be convex.
    has_matrix : bool
        Whether its Hessian is a matrix in every iteration.
    box : Box or None
        Bounds (`sanc.core.bounded.bounds`) that no evaluation may leave, not even for a finite difference; None: no
        bounds.
    """

    space: Space
    meter: Meter
    exact: bool = False
    hvp: str = ""
    has_values: bool = True
    parameters: Any = None
    has_user_gradient: bool = False
    differenced_gradient: bool = False
    convex: bool = False
    has_matrix: bool = False
    box: Any = None

    # What a subclass defines, beside `space` and `meter`.

    @abstractmethod
    def value(self, x: Vector) -> float:
        """Return f(x) on the objective sample."""

    @abstractmethod
    def gradient(self, x: Vector) -> tuple[float, Vector]:
        """Return f(x) and ∇f(x) on the gradient sample."""

    @abstractmethod
    def hessian(self, x: Vector) -> Operator:
        """Return ∇²f(x) on the Hessian sample."""

    # What it may define: the samples of an iteration, and what is known beyond products.

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of components in the gradient, Hessian and objective samples."""
        return 1, 1, 1

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the tensors that a vector is made of, in their order."""
        return [(self.space.dim,)]

    @property
    def differenced_products(self) -> bool:
        """Whether its Hessian products are differences of gradients."""
        return False

    def begin(self, iteration: int, *, products: bool = True) -> None:
        """Draw the samples of an iteration; `products` is whether the iteration computes Hessian products."""

    def end(self, step_norm: float) -> None:
        """End an iteration, given the norm of its step."""

    def gradient_sample_value(self, x: Vector) -> float:
        """Return f(x) on the gradient sample."""
        return self.value(x)

    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        """Return whether value and gradient at `x` are cached for the next iteration."""
        return False, False

    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        """Return the eigenpairs of `hessian` at x; None if only products are known.

        `free_indices` is an array of indices: rows and columns of other variables are left out.
        """
        return None

    def lanczos(self, operator: Operator, start: Vector, **options: Any) -> ColumnSource:
        """Return the columns of a Lanczos process that starts at `start`."""
        return Lanczos(operator, start, self.space, **options)

    def norm(self, v: Vector) -> float:
        """Return ‖v‖ of a point or gradient of this oracle, cached if it was transferred to the host before."""
        return self.space.norm(v)

    def gradient_error(self, x: Vector) -> float:
        """Return the error of a differenced ∇f(x) due to roundoff in f; 0 for other gradients."""
        return 0.0

    def truncation_error(self, x: Vector) -> Vector | None:
        """Return the error of each entry of a differenced ∇f(x) due to the size of the difference; None for others."""
        return None

    def adapt_differences(self, value_error: float) -> bool:
        """Choose the steps of differenced gradients for this relative error of f; return whether there are any."""
        return False

    def numbers(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to the point and the counters."""
        return {}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Restore the state that `numbers` returned."""

    # The counters.

    def count_paper_calls(self, gradients: int, products: int) -> None:
        """Count the components of gradients and products as the paper's figures do, once for each iteration (D4)."""
        gradient_size, hessian_size, _ = self.sizes
        self.meter.paper_calls += gradients * gradient_size + products * hessian_size

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Evaluate without counting: restore the counters at the end of the block."""
        meter = self.meter
        counts = meter.counts()
        try:
            yield
        finally:
            meter.restore(counts)

    # With bounds.

    def is_inside(self, x: Vector) -> bool:
        """Return whether x is within the bounds."""
        return True

    def move(self, x: Vector, d: Vector) -> Vector:
        """Return x + d; with bounds, its projection on them."""
        return x + d


class WrappedOracle(Oracle):
    """An oracle that evaluates another one, `inner`, which counts the evaluations and draws the samples.

    A subclass defines everything that depends on the point, on the variables or on the factor of f: a default would
    silently replace the answer of `inner`. `lanczos` and `norm` have defaults, which use the wrapped operator and the
    space.

    Attributes
    ----------
    inner : Oracle
        The oracle that is evaluated.
    space : Space
        The space of the points of this oracle.
    exact, hvp, has_values, has_user_gradient, differenced_gradient, convex
        Those of `inner`.
    """

    def __init__(self, inner: Oracle, space: Space) -> None:
        self.inner, self.space = inner, space
        self.exact, self.hvp, self.has_values = inner.exact, inner.hvp, inner.has_values
        self.has_user_gradient, self.differenced_gradient = inner.has_user_gradient, inner.differenced_gradient
        self.convex = inner.convex

    @property
    def meter(self) -> Meter:
        """The counters of `inner`."""
        return self.inner.meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        self.inner.meter = meter

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.inner.sizes

    @property
    def differenced_products(self) -> bool:
        return self.inner.differenced_products

    def begin(self, iteration: int, *, products: bool = True) -> None:
        self.inner.begin(iteration, products=products)

    def end(self, step_norm: float) -> None:
        self.inner.end(step_norm)
        self.hvp = self.inner.hvp

    def numbers(self) -> dict[str, Any]:
        return self.inner.numbers()

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.inner.restore(numbers)

    @abstractmethod
    def gradient_sample_value(self, x: Vector) -> float:
        """Return f(x) on the gradient sample."""

    @abstractmethod
    def is_cached(self, x: Vector) -> tuple[bool, bool]:
        """Return whether value and gradient at `x` are cached for the next iteration."""

    @abstractmethod
    def eigenbasis(self, x: Vector, free_indices: Any = None) -> Eigenbasis | None:
        """Return the eigenpairs of `hessian` at x; None if only products are known."""

    @abstractmethod
    def gradient_error(self, x: Vector) -> float:
        """Return the error of a differenced ∇f(x) due to roundoff in f; 0 for other gradients."""

    @abstractmethod
    def truncation_error(self, x: Vector) -> Vector | None:
        """Return the error of each entry of a differenced ∇f(x) due to the size of the difference; None for others."""
