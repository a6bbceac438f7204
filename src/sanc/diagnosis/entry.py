"""`diagnose`: the loss, its gradient, its noise and its curvature on given batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sanc.autograd.generators import derive_seed
from sanc.autograd.guards import autocast_of, runs_uncompiled
from sanc.autograd.leaves import Leaves
from sanc.autograd.precision import full_precision
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.autograd.randomness import UndoneDraws
from sanc.core.spectrum.extremes import Extremes
from sanc.diagnosis.curvature import CurvatureMeasurement, CurvatureSettings, measure_curvature
from sanc.diagnosis.gradients import GradientMeasurement, NetworkLoss, measure_gradient
from sanc.diagnosis.report import Report
from sanc.diagnosis.samples import check_loss, read_samples
from sanc.diagnosis.steps import StepMeasurement, measure_steps
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    one_of,
    require_bool,
    require_integer,
    require_positive,
    shown,
)
from sanc.ranks.find import find_mode

_MAX_STORED_PARAMETERS = 2**25
"""Most parameters with which "auto" keeps all Lanczos vectors: 25 vectors in float32 are 3.4 GB."""


@runs_uncompiled
def diagnose(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: Iterable[Any],
    *,
    held_out: Iterable[Any] | None = None,
    batches: int | None = None,
    microbatch: int | None = None,
    relative_error: float = 0.02,
    confidence: float = 0.95,
    start_vectors: int = 5,
    max_products: int | None = None,
    max_time: float | None = None,
    seed: int = 0,
    hvp: HvpMode = "auto",
    lanczos: Literal["auto", "store", "regenerate"] = "auto",
    process_group: Any = "default",
    progress: bool = False,
    starts: int | None = None,
) -> Report:
    """Measure whether a network is trained, stuck, or at a saddle.

    Parameters
    ----------
    model : nn.Module
        The network, as a function of its parameters that require a gradient. Nothing of it is changed. It may be
        wrapped by DistributedDataParallel or `fully_shard`.
    loss : callable
        A module such as ``nn.CrossEntropyLoss()``, or a function of ``torch.nn.functional``, called as
        ``loss(model(inputs), targets)`` for batches of inputs and targets; or a function of the caller's, called as
        ``loss(model, batch)``. It returns the mean loss of the batch.
    data : iterable
        Batches, for instance a DataLoader. All of them together define the loss that is differentiated.
    held_out : iterable, optional
        Held-out batches, on which steps are evaluated. By default the last quarter of `data`, and at least one of its
        batches, if it has two or more.
    batches : int, optional
        Use only this many batches of `data` and of `held_out`.
    microbatch : int, optional
        Split batches into parts of at most this many rows, evaluated one after the other. Batches are then tensors, or
        tuples, lists or dictionaries of tensors.
    relative_error : float
        Accuracy of λ_min and λ_max relative to the spectral norm of the Hessian.
    confidence : float
        Probability with which the bounds of both eigenvalues hold, over the random start vector.
    start_vectors : int
        Random start vectors of the effective dimension and the spectral density.
    max_products, max_time : number, optional
        Limits on the Hessian products of the bounds, and on seconds.
    seed : int
        Seed of the start vectors and of random numbers in the network, such as dropout masks.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How Hessian products are computed, as in `minimize`. "auto" uses differences of gradients, with a warning, if an
        operator has no second derivatives, and if products are not symmetric because one has wrong ones.
    lanczos : {"auto", "store", "regenerate"}
        "store" keeps all Lanczos vectors. "regenerate" keeps three and computes almost all products twice. "auto" keeps
        them up to 33 million parameters.
    process_group : ProcessGroup, "default" or None
        The ranks that measure together, each with batches of its own. By default the group that torch.distributed was
        initialised with; None: only this process.
    progress : bool
        Print the number of products to the standard error stream.
    starts : int, optional
        Former name of `start_vectors`.

    Returns
    -------
    Report
        Prints as a page of text; ``as_dict()`` has the numbers, and ``plot()`` draws the spectrum.

    Notes
    -----
    Every batch, or every part of `microbatch` rows, is evaluated on its own: one graph is in memory at a time. Dropout
    draws the same masks in every evaluation, and the buffers of BatchNorm stay as they are. The mode of the module,
    training or evaluation, is the caller's. With several ranks all of them call `diagnose`, and get the same report on
    the rows of all ranks.

    Examples
    --------
    >>> import torch, sanc
    >>> model = torch.nn.Linear(3, 1)
    >>> data = [(torch.randn(20, 3), torch.randn(20, 1)) for _ in range(4)]
    >>> report = sanc.diagnose(model, torch.nn.MSELoss(), data)
    >>> report.saddle, report.parameters
    (False, 4)
    """
    start_vectors = start_vectors if starts is None else starts
    settings = CurvatureSettings(relative_error, confidence, max_products, seed, start_vectors)
    require_integer("batches", batches, 1, optional=True)
    require_integer("microbatch", microbatch, 1, optional=True)
    require_bool("progress", progress)
    require_positive("max_time", max_time, optional=True)
    one_of("hvp", hvp, HVP_MODES)
    one_of("lanczos", lanczos, ("auto", "store", "regenerate"))
    named = _trainable_parameters(model)
    parameters = [p for _, p in named]
    check_loss(loss)
    mode = find_mode(process_group, 0, parameters)
    leaves = mode.leaves(parameters, [0.0] * len(parameters))
    oracle = mode.oracle(leaves, hvp=hvp, exact=True)
    inner, seed_here = _unwrapped(model), derive_seed(seed, *mode.rank_key) if mode.is_distributed else seed
    samples = mode.together(
        lambda: read_samples(inner, loss, data, held_out, batches=batches, microbatch=microbatch, seed=seed_here),
        "the batches",
    )
    compared = asdict(settings) | {"hvp": hvp, "lanczos": lanczos, "max_time": max_time}
    mode.compare_model(named, compared, samples.rows)
    deadline = math.inf if max_time is None else mode.clock() + max_time
    oracle.bind(samples.data, samples.data, samples.data)
    network = NetworkLoss(
        oracle,
        oracle.read_point(),
        samples.data,
        samples.held_out,
        keeps_basis=oracle.space.dim <= _MAX_STORED_PARAMETERS if lanczos == "auto" else lanczos == "store",
        is_rough=_may_be_rough(leaves),
        time_is_up=lambda: max_time is not None and mode.clock() >= deadline,
    )
    with full_precision(leaves.device), torch.enable_grad(), UndoneDraws(leaves.device), _without_grads(parameters):
        try:
            return _measure(network, settings, progress and not any(mode.rank_key))
        finally:
            oracle.load(network.x)
            oracle.undo_training()
            oracle.unbind()


def _measure(network: NetworkLoss, settings: CurvatureSettings, progress: bool) -> Report:
    """Measure gradient, curvature and steps, and return the report."""
    gradient = measure_gradient(network)
    with _printed_products(progress) as show:
        curvature = measure_curvature(network, settings, show)
    limit = _limit(curvature.extremes, settings.relative_error)
    steps = measure_steps(network, gradient, curvature, _spectral_norm(curvature.extremes, limit))
    return _report(network, gradient, curvature, steps, limit)


@contextmanager
def _printed_products(progress: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that prints the number of products to the standard error stream if asked to."""

    def show(products: int) -> None:
        if progress:
            print(f"\r{products} Hessian products", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if progress:
            print(file=sys.stderr)


def _limit(extremes: Extremes, relative_error: float) -> str:
    """Return what keeps the bounds from the accuracy asked for, as in `Report`."""
    errors = (extremes.lambda_min - extremes.lower_bound, extremes.upper_bound - extremes.lambda_max)
    if not max(errors) > relative_error * max(abs(extremes.lambda_min), abs(extremes.lambda_max)):
        return ""
    return "roundoff" if extremes.limited_by_roundoff else "products or time"


def _spectral_norm(extremes: Extremes, limit: str) -> float:
    """Return the spectral norm by the Ritz values, or its bound if products or time were too few for these."""
    if limit == "products or time":
        return max(abs(extremes.lower_bound), abs(extremes.upper_bound))
    return max(abs(extremes.lambda_min), abs(extremes.lambda_max))


def _report(
    network: NetworkLoss,
    gradient: GradientMeasurement,
    curvature: CurvatureMeasurement,
    steps: StepMeasurement,
    limit: str,
) -> Report:
    """Return the measurements as a report."""
    extremes, dimension = curvature.extremes, curvature.dimension
    return Report(
        parameters=network.oracle.space.dim,
        rows=gradient.rows,
        batches=gradient.batches,
        value=gradient.value,
        held_out_value=gradient.held_out_value,
        grad_norm=gradient.grad_norm,
        noise_share=gradient.noise_share,
        noise_scale=gradient.noise_scale,
        lambda_min=extremes.lambda_min,
        lambda_max=extremes.lambda_max,
        lambda_min_bound=extremes.lower_bound,
        lambda_max_bound=extremes.upper_bound,
        ritz_error=extremes.ritz_error,
        confidence=extremes.confidence,
        effective_dimension=dimension.value,
        effective_dimension_error=dimension.error,
        gradient_decrease=steps.gradient_decrease,
        curvature_decrease=steps.curvature_decrease,
        curvature_step_norm=steps.curvature_step_norm,
        products=curvature.products,
        hvp=network.oracle.hvp,
        limit=limit,
        dimension_limit="roundoff" if dimension.limited_by_product_error else "",
        density=(dimension.values, dimension.weights),
        profiles=steps.profiles,
    )


def _may_be_rough(leaves: Leaves) -> bool:
    """Return whether losses of float32 parameters may be computed in a lower precision."""
    return leaves.dtype == torch.float32 and (autocast_of(leaves.device) is not None or leaves.device.type == "cuda")


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, whose reducer and copies of buffers are not needed."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _trainable_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Return names and parameters that require a gradient; raise an error if they cannot be used."""
    is_loss = any(kind.__module__ == nn.modules.loss.__name__ for kind in type(model).__mro__)
    if not isinstance(model, nn.Module) or is_loss:
        raise ArgumentTypeError(
            f"model = {shown(model)} is no nn.Module: pass the network, then the loss and the data."
        )
    if dist.is_available() and dist.is_initialized():
        from sanc.ranks.sharded import reshard

        reshard(model)
    named: list[tuple[str, Tensor]] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    if not parameters:
        raise ArgumentError("model has no parameter that requires a gradient: call requires_grad_() on some.")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ArgumentTypeError(f"model has parameters of {listed}: pass a model of one type on one device.")
    if parameters[0].dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"model has parameters of {parameters[0].dtype}: pass float32 or float64, with torch.autocast for speed."
        )
    return named


@contextmanager
def _without_grads(parameters: Sequence[Tensor]) -> Any:
    """Remove the gradients of the parameters inside the block, and restore them after it."""
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
