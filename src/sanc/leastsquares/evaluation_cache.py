"""Residuals as a function of the variables of a run, evaluated once at each of the last few points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from sanc.core.caching import MAX_CACHED_POINTS, RecentCache
from sanc.core.oracle import Eigenbasis
from sanc.core.space import Floats
from sanc.leastsquares.decompositions import WholeHessian
from sanc.leastsquares.evaluation import ResidualEvaluation
from sanc.leastsquares.losses import Loss
from sanc.leastsquares.matrices import JacobianMatrix
from sanc.leastsquares.residuals import Residuals
from sanc.leastsquares.variables import Variables

T = TypeVar("T")


class LastResult(Generic[T]):
    """The result of the last computation, which is returned again for the same arguments."""

    def __init__(self) -> None:
        self._arguments: tuple[Any, ...] | None = None
        self._result: T

    def get(self, arguments: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return the result for these arguments, computed unless it is the last one."""
        if self._arguments != arguments:
            self._result = compute()
            self._arguments = arguments
        return self._result


class EvaluationCache:
    """Evaluates residuals and Jacobians once at each of the last few points z.

    Equal points have one evaluation, also in different vectors and in the caches of other variables (`in_variables`).
    The same vector is found by its identity, which takes less time.

    Attributes
    ----------
    residuals : Residuals
        The functions of the caller.
    loss : Loss
        φ and C.
    variables : Variables
        z.
    model : LastResult
        The last eigenbasis of the model, with its offset.
    whole_hessian : LastResult
        The last whole Hessian, as a matrix.
    second_order : LastResult
        The last product v ↦ Σ w_i ∇²r_i v of automatic differentiation, in the variables of the caller.
    """

    def __init__(self, residuals: Residuals, loss: Loss, variables: Variables) -> None:
        self.residuals, self.loss, self.variables = residuals, loss, variables
        self.model: LastResult[tuple[Eigenbasis, float]] = LastResult()
        self.whole_hessian: LastResult[WholeHessian] = LastResult()
        self.second_order: LastResult[Callable[[Floats], Floats]] = LastResult()
        self._by_content: dict[bytes, ResidualEvaluation] = {}
        self._by_vector: RecentCache[ResidualEvaluation] = RecentCache(MAX_CACHED_POINTS)
        self._last_lookup: tuple[Any, Any] = None, None  # the last point of a call, and its evaluation

    def in_variables(self, variables: Variables) -> EvaluationCache:
        """Return a cache for points in other variables, with the evaluations of this one."""
        other = EvaluationCache(self.residuals, self.loss, variables)
        other._by_content, other.second_order = self._by_content, self.second_order
        return other

    def __contains__(self, z: Any) -> bool:
        return z is self._last_lookup[0] or z in self._by_vector

    def evaluation(self, z: Any) -> ResidualEvaluation:
        """Return the residuals at a point."""
        if self._last_lookup[0] is not z:
            self._last_lookup = z, self._by_vector.get(z, self._evaluate_once)
        evaluation: ResidualEvaluation = self._last_lookup[1]
        return evaluation

    def _evaluate_once(self, z: Any) -> ResidualEvaluation:
        """Return the evaluation at an equal point, or a new one."""
        x = self.variables.original(z)
        key = x.tobytes()
        evaluation = self._by_content.pop(key, None) or self._evaluate(x)
        self._by_content[key] = evaluation
        while len(self._by_content) > MAX_CACHED_POINTS:
            del self._by_content[next(iter(self._by_content))]
        return evaluation

    def _evaluate(self, x: Floats) -> ResidualEvaluation:
        """Evaluate the residuals and their loss."""
        r = self.residuals(x)
        return ResidualEvaluation(x, r, self.loss(r))

    def with_jacobian(self, z: Any) -> ResidualEvaluation:
        """Return the residuals and the Jacobian at a point."""
        evaluation = self.evaluation(z)
        if evaluation.jacobian is None:
            for other in self._by_content.values():
                if isinstance(other.jacobian, JacobianMatrix):  # a large one; its gradient stays cached
                    other.jacobian = None
            evaluation.jacobian = self.residuals.jacobian(evaluation.x, evaluation.r)
        return evaluation
