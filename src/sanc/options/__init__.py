"""The options of optimisers and minimisers by name and type, for type checkers and for completion in editors.

At run time `sanc.presets` checks options against the pieces of the method. Settings of a piece of the caller's are not
listed here: pass them to the piece itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from sanc.autograd.products import HvpMode
from sanc.core.method import Method
from sanc.core.pieces import Acceptance, Escape, Model, SigmaSettings
from sanc.minibatch.metrics.base import Metric
from sanc.minibatch.settings import Average, MetricName, Minibatch
from sanc.minibatch.step_size import StepSize

__all__ = [
    "ArgminArguments",
    "ArgminOptions",
    "CurveFitOptions",
    "LeastSquaresArguments",
    "MinimizeArguments",
    "MinimizeOptions",
    "OptimizerOptions",
    "RowSettings",
]


class OptimizerOptions(TypedDict, total=False):
    """Pieces and settings that an optimiser accepts by name, beside its own arguments."""

    # pieces
    model: Model
    acceptance: Acceptance
    escape: Escape
    sigma: SigmaSettings
    minibatch: Minibatch | None
    metric: Metric | MetricName
    step_size: StepSize
    average: Average
    # the model and the Krylov space
    krylov_dim: int | None
    krylov_stop: Literal["paper", "forcing"]
    lanczos: Literal["store", "regenerate"]
    epsilon: float
    epsilon_g: float | None
    max_resolves: int
    first_radius: float | None
    # acceptance
    eta1: float
    eta2: float
    rounding_guard: bool
    momentum: float
    # escape
    L1: float
    L2: float
    checked: bool
    # σ
    sigma0: float | None
    sigma_floor: float | None
    sigma_ceiling: float
    gamma: float
    sigma_rule: Literal["paper", "interpolate"]
    # steps on samples
    curvature: bool
    noise: float
    memory: float
    refresh: int
    largest_side: int
    scale: float
    distance: float
    warm_up: int
    slow_down: int
    horizon: int
    lower_bound: float
    averaging: float
    weighting: float


class MinimizeOptions(OptimizerOptions, total=False):
    """Pieces and settings that `minimize` and `method_for` accept by name; `lr` belongs to `GradientStep`."""

    lr: float
    epsilon_s: float
    sampling: Literal["uniform", "buffered"]
    # SciPy's names of arguments of `minimize`
    maxiter: int | None
    maxfev: int | None
    maxfun: int | None
    gtol: float | None


class _SharedArguments(MinimizeOptions, total=False):
    """Arguments of both `minimize` and `argmin`."""

    constraints: Any
    tol: float | None
    callback: Callable[..., Any] | None
    options: Mapping[str, Any] | None
    preset: str | Method
    curvature_tol: float | None
    max_iter: int | None
    max_nfev: int | None
    max_calls: float | None
    max_time: float | None
    seed: int
    hvp: HvpMode
    disp: bool
    precond: Any


class MinimizeArguments(_SharedArguments, total=False):
    """Arguments of `minimize` that are passed by name."""

    hess: Callable[..., Any] | str | None
    hessp: Callable[..., Any] | None
    bounds: Any
    batch_size: int | None
    hessian_batch_size: int | None
    objective_batch_size: int | None
    grow_samples: bool
    certify: bool
    max_products: int | None
    resume: Mapping[str, Any] | None
    process_group: Any


class ArgminOptions(_SharedArguments, total=False):
    """Arguments of `minimize` that `argmin` passes on."""

    method: str | Method | None


class ArgminArguments(ArgminOptions, total=False):
    """Arguments of `argmin` that are passed by name, without `details`."""

    bounds: Any
    loss: str
    f_scale: float
    on_singular: str
    rtol: float | None
    confidence: float
    max_products: int | None


class LeastSquaresArguments(TypedDict, total=False):
    """Arguments of `least_squares` that are passed by name."""

    loss: str | Callable[..., Any]
    f_scale: float
    tol: float | None
    max_iter: int | None
    max_nfev: int | None
    max_time: float | None
    certify: bool
    seed: int
    callback: Callable[..., Any] | None
    precond: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None


class RowSettings(TypedDict, total=False):
    """Settings that `minimize_many` accepts by name, as `minimize` does."""

    max_resolves: int
    first_radius: float | None
    eta1: float
    eta2: float
    sigma_floor: float | None
    sigma_ceiling: float
    gamma: float


class CurveFitOptions(TypedDict, total=False):
    """Arguments of `least_squares`, or of `minimize_many` for rows of data, that `curve_fit` passes on."""

    tol: float | None
    max_iter: int | None
    max_time: float | None
    callback: Callable[..., Any] | None
    seed: int
    # one fit
    loss: str | Callable[..., Any]
    f_scale: float
    max_nfev: int | None
    certify: bool
    precond: Any
    # rows of data
    chunk_size: int | str
    progress: bool
