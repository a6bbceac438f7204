"""`diagnose`: the loss, its gradient, its noise and its curvature on given batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sanc.autograd.generators import derive_seed
from sanc.autograd.guards import autocast_of, runs_uncompiled
from sanc.autograd.leaves import Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.precision import full_precision
from sanc.autograd.products import HVP_MODES, FiniteDifference, HvpMode
from sanc.autograd.randomness import UndoneDraws
from sanc.core.space import Floats
from sanc.core.spectrum.curvature import Extremes, find_extremes
from sanc.core.spectrum.krylov import NonFiniteProductError
from sanc.diagnosis.dimension import converged_pairs, measure_dimension
from sanc.diagnosis.report import Report
from sanc.errors import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    SecondDerivativeError,
    is_number,
    one_of,
    require,
    require_bool,
    require_integer,
    require_number,
    shown,
    warn,
)
from sanc.optim.first_step import SAME_LOSS
from sanc.ranks.find import find_mode

_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 10.0
"""First and longest step along negative curvature, relative to ‖x‖ or to the step at which the quadratic model lowers
the loss to zero, whichever is shorter and longer. The step is doubled as long as the loss decreases."""
_VISIBLE_DECREASE = 10.0
"""Relative decrease of the loss by the quadratic model, in units of eps, below which a step cannot be rejected."""
_ROUGH_EPS = 2.0**-8
"""Machine precision of bfloat16, for losses under autocast or on a GPU."""
_PROFILE_POINTS = 11
"""Points of each loss profile."""
_LARGEST_KEPT = 2**25
"""Most parameters with which "auto" keeps all Lanczos vectors: 25 vectors in float32 are 3.4 GB."""
_HELD_OUT_DIVISOR = 4
"""Without held-out batches of the caller, the last quarter of the batches is held out, and at least one."""


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
    starts: int = 5,
    max_products: int | None = None,
    max_time: float | None = None,
    seed: int = 0,
    hvp: HvpMode = "auto",
    lanczos: Literal["auto", "store", "regenerate"] = "auto",
    process_group: Any = "default",
    progress: bool = False,
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
    starts : int
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
        initialised with; None: this process alone.
    progress : bool
        Print the number of products to the standard error stream.

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
    require(
        is_number(confidence) and 0 < confidence < 1, "confidence", confidence, "pass a probability between 0 and 1"
    )
    require(
        is_number(relative_error) and 0 < relative_error < 1, "relative_error", relative_error, "pass a share below 1"
    )
    for name, value in (("batches", batches), ("max_products", max_products), ("microbatch", microbatch)):
        require_integer(name, value, 1)
    require_integer("starts", starts, 1, none=False)
    require_integer("seed", seed, 0, none=False)
    require_bool("progress", progress)
    require_number("max_time", max_time)
    one_of("hvp", hvp, HVP_MODES)
    one_of("lanczos", lanczos, ("auto", "store", "regenerate"))
    named = _parameters(model)
    parameters = [p for _, p in named]
    if not callable(loss):
        raise ArgumentTypeError(f"loss = {shown(loss)} cannot be called: pass a criterion or a function of the model.")
    if getattr(loss, "reduction", "mean") == "sum":
        raise ArgumentError(
            f'loss = {shown(loss)} returns a sum: pass one with reduction="mean", as rows weight batches.'
        )
    mode = find_mode(process_group, 0, parameters)
    leaves = mode.leaves(parameters, [0.0] * len(parameters))
    oracle = mode.oracle(leaves, hvp=hvp, exact=True)
    inner, seed_here = _unwrapped(model), derive_seed(seed, *mode.rank_key) if mode.is_distributed else seed
    rows: dict[str, list[int]] = {}
    samples: dict[str, Sample] = {}

    def prepare() -> None:
        for name, part in _split(data, held_out, batches, microbatch).items():
            rows[name] = [_rows(batch) for batch in part]
            if part:
                samples[name] = _sample(inner, loss, part, seed_here)

    mode.together(prepare, "the batches")
    compared: dict[str, Any] = {"relative_error": relative_error, "confidence": confidence, "starts": starts}
    compared |= {"seed": seed, "hvp": hvp, "lanczos": lanczos, "max_products": max_products, "max_time": max_time}
    mode.compare_model(named, compared, rows)
    sample, held_out_sample = samples["data"], samples.get("held_out")
    deadline = None if max_time is None else mode.clock() + max_time
    oracle.bind(sample, sample, sample)
    x = oracle.start()
    autocast = autocast_of(leaves.device) is not None
    with full_precision(leaves.device), torch.enable_grad(), UndoneDraws(leaves.device), _grads_kept(parameters):
        try:
            measured = _Measurement(oracle, x, sample, held_out_sample)
            measured.keeps_basis = oracle.space.dim <= _LARGEST_KEPT if lanczos == "auto" else lanczos == "store"
            measured.measure_gradients()
            measured.measure_curvature(
                relative_error=relative_error,
                confidence=confidence,
                max_products=max_products,
                seed=seed,
                starts=starts,
                rough=leaves.dtype == torch.float32 and (autocast or leaves.device.type == "cuda"),
                time_is_up=lambda: deadline is not None and mode.clock() >= deadline,
                progress=progress and not any(mode.rank_key),
            )
            return measured.report(relative_error)
        finally:
            oracle.load(x)
            oracle.undo_training()
            oracle.unbind()


_CONTRADICTING_ERRORS = 10.0
"""Differences of gradients contradict a product if they differ from it by more than this many times their error."""
_ASYMMETRIC = (
    "Hessian products are not symmetric: an operator in the loss has wrong second derivatives. Pass "
    'hvp="finite-difference", which needs first derivatives only.'
)


class _Measurement:
    """Measurements at the parameters x of a network.

    Attributes
    ----------
    keeps_basis : bool
        Whether Lanczos keeps its vectors. Otherwise the gradient is kept on the host, too.
    """

    keeps_basis = True

    def __init__(self, oracle: AutogradOracle, x: Tensor, sample: Sample, held_out: Sample | None) -> None:
        self.oracle, self.x, self.sample, self.held_out = oracle, x, sample, held_out
        self.products = 0

    def measure_gradients(self) -> None:
        """Compute the loss, the gradient, and how gradients of batches differ.

        A batch of n_i rows has a gradient g_i with the variance S/n_i if S is that of a row. With weights w_i = n_i/N
        of k batches, N Σ w_i ‖g_i − ḡ‖² / (k − 1) estimates S without bias, and S/N is the variance of the mean ḡ.
        """
        moments = self.oracle.part_moments(self.x, self.sample)
        self.value, self.grad_norm = moments.value, self.oracle.space.norm(moments.gradient)
        self._gradient = moments.gradient if self.keeps_basis else moments.gradient.cpu()
        self.batches, self.rows = moments.count, self.oracle.sizes[0]
        if not (math.isfinite(self.value) and math.isfinite(self.grad_norm)):
            raise NonFiniteError(
                f"the loss is {self.value:g} and its gradient norm {self.grad_norm:g} on data: pass batches and "
                "parameters with a finite loss."
            )
        again = self._loss(self.x, self.sample)
        if not abs(again - self.value) <= SAME_LOSS * max(abs(again), abs(self.value)):
            raise ArgumentError(
                f"loss is {self.value!r} and then {again!r} at the same parameters: draw random numbers from the "
                "generators of torch, NumPy or random alone, and pass batches that do not change."
            )
        self.held_out_value = math.nan if self.held_out is None else self._loss(self.x, self.held_out)
        if self.held_out is not None and not math.isfinite(self.held_out_value):
            raise NonFiniteError(f"the loss is {self.held_out_value:g} on held_out: pass batches with a finite loss.")
        self.noise_share = self.noise_scale = math.nan
        if moments.count > 1:
            noise = max(moments.mean_square - self.grad_norm**2, 0.0) / (moments.count - 1)
            signal = self.grad_norm**2 - noise
            self.noise_share = min(1.0, noise / self.grad_norm**2) if self.grad_norm > 0.0 else float(noise > 0.0)
            self.noise_scale = self.rows * noise / signal if signal > 0.0 else math.inf

    @property
    def gradient(self) -> Tensor:
        """The gradient, on the device."""
        return self._gradient.to(self.x.device)

    def measure_curvature(
        self,
        *,
        relative_error: float,
        confidence: float,
        max_products: int | None,
        seed: int,
        starts: int,
        rough: bool,
        time_is_up: Callable[[], bool],
        progress: bool,
    ) -> None:
        """Bound the extreme eigenvalues, estimate the spectral density, and follow the extreme eigenvectors."""
        self._time_is_up, self._is_rough = time_is_up, rough

        def show(products: int) -> None:
            if progress:
                print(f"\r{products} Hessian products", end="", file=sys.stderr, flush=True)

        find = partial(
            find_extremes,
            self.oracle,
            self.x,
            relative_error=relative_error,
            confidence=confidence,
            max_products=max_products,
            seed=seed,
            store=self.keeps_basis,
            rough=rough,
            time_is_up=time_is_up,
            report=show,
        )
        try:
            self.extremes: Extremes = find()
            wasted = 0
            if self.extremes.ritz_error == math.inf and self._differences_contradict(seed):
                self.oracle.fall_back(SecondDerivativeError(_ASYMMETRIC))
                self.extremes.operator.release()
                wasted, self.extremes = self.extremes.products, find()
            known = converged_pairs(self.extremes, self.oracle.space.dim, keeps_basis=self.keeps_basis)
            others = [k for k in known if 0 < k < len(self.extremes.values) - 1]
            self.leftmost, self.rightmost, *vectors = self.extremes.vectors(others)
            by_index = {0: self.leftmost, len(self.extremes.values) - 1: self.rightmost}
            by_index |= dict(zip(others, vectors, strict=True))
            self.dimension = measure_dimension(
                self.oracle,
                self.x,
                self.extremes,
                {k: by_index[k] for k in known},
                range(seed + 1, seed + starts),
                count=starts - 1,
                store=self.keeps_basis,
                time_is_up=time_is_up,
            )
        except NonFiniteProductError as problem:
            raise NonFiniteError(f"{problem}: check the data and the parameters for extreme values.") from problem
        finally:
            if progress:
                print(file=sys.stderr)
        self.products = wasted + self.extremes.products + self.dimension.products
        if not self.keeps_basis:
            self.products += self.extremes.krylov.dim - 1  # of the second pass

    def _differences_contradict(self, seed: int) -> bool:
        """Whether a product differs from a difference of gradients by more than the error of that difference.

        Otherwise the asymmetry is roundoff, as where a network fits all rows and its Hessian is almost zero.
        """
        if self.oracle.hvp == "finite-difference":
            return False
        space, differences = self.oracle.space, FiniteDifference(self.oracle, self.x, self.sample)
        v = space.normal(np.random.default_rng(seed))
        v = v / space.norm(v)
        product, difference = 1.0 * self.extremes.operator(v), differences(v)
        return space.norm(product - difference) > _CONTRADICTING_ERRORS * differences.error(v, difference)

    def _loss(self, x: Any, sample: Sample) -> float:
        return self.oracle.evaluate(x, sample)

    def _decrease(self, step: Any) -> float:
        """Return the decrease of the held-out loss by a step; NaN without held-out batches."""
        if self.held_out is None:
            return math.nan
        return self.held_out_value - self._loss(self.x + step, self.held_out)

    def _escape(self) -> tuple[float, float]:
        """Return the held-out decrease and the norm of the best step along negative curvature."""
        extremes, space = self.extremes, self.oracle.space
        if not extremes.lambda_min + extremes.ritz_error < 0.0 or self._time_is_up():
            return math.nan, math.nan
        direction: Any = self.leftmost
        if space.dot(self.gradient, direction) > 0.0:
            direction = direction * -1.0
        natural = self._natural_step(extremes.lambda_min) or 1.0
        x_norm = space.norm(self.x) or natural
        visible = natural * math.sqrt(_VISIBLE_DECREASE * (_ROUGH_EPS if self._is_rough else space.eps))
        norm, best, best_norm = _SHORTEST_STEP * min(x_norm, natural), self.value, 0.0
        while norm <= _LONGEST_STEP * max(x_norm, natural) and not self._time_is_up():
            value = self._loss(self.x + direction * norm, self.sample)
            if value < best:
                best, best_norm = value, norm
            elif norm >= visible:
                break
            norm *= 2.0
        return self._decrease(direction * best_norm), best_norm

    def _natural_step(self, eigenvalue: float) -> float:
        """Return the step along an eigenvector at which its curvature changes the loss by the loss itself."""
        return math.sqrt(2.0 * abs(self.value) / abs(eigenvalue))

    def _profile(self, vector: Any, eigenvalue: float) -> tuple[Floats, Floats]:
        """Return distances and losses along an eigenvector, as far as the quadratic model doubles the loss.

        Points for which there is no time are left out.
        """
        scale = self.oracle.space.norm(self.x) or 1.0
        radius = scale if eigenvalue == 0.0 else min(scale, self._natural_step(eigenvalue))
        distances, losses = np.linspace(-radius, radius, _PROFILE_POINTS), list[float]()
        for distance in distances:
            if self._time_is_up():
                break
            losses.append(self._loss(self.x + vector * float(distance), self.sample))
        return distances[: len(losses)], np.array(losses)

    def report(self, relative_error: float) -> Report:
        """Evaluate the steps and return the report."""
        extremes, dimension = self.extremes, self.dimension
        curvature_decrease, curvature_step_norm = self._escape()
        norm = max(abs(extremes.lambda_min), abs(extremes.lambda_max))
        errors = (extremes.lambda_min - extremes.lower_bound, extremes.upper_bound - extremes.lambda_max)
        limit = ""
        if max(errors) > relative_error * norm:
            limit = "roundoff" if extremes.limited_by_roundoff else "products or time"
        if limit == "products or time":  # the Ritz values may be far inside
            norm = max(abs(extremes.lower_bound), abs(extremes.upper_bound))
        has_step = 0.0 < norm < math.inf and not self._time_is_up()
        return Report(
            parameters=self.oracle.space.dim,
            rows=self.rows,
            batches=self.batches,
            value=self.value,
            held_out_value=self.held_out_value,
            grad_norm=self.grad_norm,
            noise_share=self.noise_share,
            noise_scale=self.noise_scale,
            lambda_min=extremes.lambda_min,
            lambda_max=extremes.lambda_max,
            lambda_min_bound=extremes.lower_bound,
            lambda_max_bound=extremes.upper_bound,
            ritz_error=extremes.ritz_error,
            confidence=extremes.confidence,
            effective_dimension=dimension.value,
            effective_dimension_error=dimension.error,
            gradient_decrease=self._decrease(self.gradient * (-1.0 / norm)) if has_step else math.nan,
            curvature_decrease=curvature_decrease,
            curvature_step_norm=curvature_step_norm,
            products=self.products,
            hvp=self.oracle.hvp,
            limit=limit,
            dimension_limit="roundoff" if dimension.limited_by_roundoff else "",
            density=(dimension.values, dimension.weights),
            profiles={
                "lambda_min": self._profile(self.leftmost, extremes.lambda_min),
                "lambda_max": self._profile(self.rightmost, extremes.lambda_max),
            },
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, whose reducer and copies of buffers are not needed."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Return names and parameters that require a gradient; raise an error if they cannot be used."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.modules.loss._Loss):
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


def _split(data: Any, held_out: Any, batches: int | None, microbatch: int | None) -> dict[str, list[Any]]:
    """Return the batches that define the loss, "data", and those that are held out, "held_out", in parts."""
    used, kept = _chosen(data, held_out, batches)
    return {
        name: [piece for batch in part for piece in _pieces(batch, microbatch)]
        for name, part in (("data", used), ("held_out", kept))
    }


def _pieces(batch: Any, microbatch: int | None) -> list[Any]:
    """Return a batch in parts of at most so many rows."""
    rows = _rows(batch)
    if microbatch is None or rows <= microbatch:
        return [batch]
    return [_slice(batch, slice(begin, begin + microbatch), rows) for begin in range(0, rows, microbatch)]


def _slice(part: Any, rows: slice, count: int) -> Any:
    """Return some rows of a batch, or of one of its parts; parts without `count` rows raise an error."""
    if isinstance(part, Tensor) and part.ndim and len(part) == count:
        return part[rows]
    if isinstance(part, Mapping):
        return {name: _slice(entry, rows, count) for name, entry in part.items()}
    if isinstance(part, list | tuple):
        entries = [_slice(entry, rows, count) for entry in part]
        return entries if isinstance(part, list) else tuple(entries)
    raise ArgumentTypeError(
        f"data has a batch of {count} rows with {shown(part)}, which cannot be split: leave microbatch out, or pass "
        "batches of tensors with as many rows."
    )


def _chosen(data: Any, held_out: Any, batches: int | None) -> tuple[list[Any], list[Any]]:
    """Return the batches that define the loss and those that are held out."""
    for name, given in (("data", data), ("held_out", held_out)):
        if given is None and name == "held_out":
            continue
        if isinstance(given, Tensor | str | Mapping) or not isinstance(given, Iterable):
            raise ArgumentTypeError(f"{name} = {shown(given)} is no iterable of batches: pass a list or a DataLoader.")
    used = _taken("data", data, batches)
    if not used:
        raise ArgumentError("data has no batch: pass at least one; an iterator that was used before is empty.")
    if batches is not None and len(used) < batches:
        warn(f"batches = {batches}, and data has only {len(used)}: all of them are used.", RuntimeWarning)
    if held_out is not None:
        kept = _taken("held_out", held_out, batches)
        if not kept:
            raise ArgumentError("held_out has no batch: pass at least one, or leave it out.")
        return used, kept
    if len(used) == 1:
        return used, []
    count = max(1, len(used) // _HELD_OUT_DIVISOR)
    return used[:-count], used[-count:]


def _taken(name: str, given: Iterable[Any], count: int | None) -> list[Any]:
    """Return the first batches; raise an error if one has no row."""
    taken = list(islice(given, count))
    for index, batch in enumerate(taken):
        if _rows(batch) == 0:
            raise ArgumentError(f"{name} has no row in batch {index}: leave this batch out.")
    return taken


def _sample(model: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Any], seed: int) -> Sample:
    """Return the mean loss of batches, weighted by their rows."""
    rows = [_rows(batch) for batch in batches]
    parts = [(count / sum(rows), _closure(model, loss, batch)) for count, batch in zip(rows, batches, strict=True)]
    return Sample("loss", parts, sum(rows), seed, terms=float(sum(rows)))


def _closure(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Callable[[], Tensor]:
    """Return the loss of one batch as a function without arguments."""
    if not _is_criterion(loss):

        def evaluate() -> Tensor:
            try:
                return loss(model, batch)
            except (TypeError, AttributeError) as problem:
                raise ArgumentTypeError(
                    f"loss = {shown(loss)} is called as loss(model, batch), which failed ({problem}): if it is a "
                    "function of outputs and targets, pass lambda model, batch: loss(model(batch[0]), batch[1])."
                ) from problem

        return evaluate
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise ArgumentTypeError(
            f"data has a batch of {type(batch).__name__}, and loss is a criterion of outputs and targets: pass batches "
            "(inputs, targets), or loss as a function of (model, batch)."
        )
    inputs, targets = batch
    if isinstance(targets, np.ndarray):
        raise ArgumentTypeError(
            f"data has a batch of arrays, with targets {shown(targets)}: pass tensors, such as torch.as_tensor(array)."
        )
    return lambda: loss(model(inputs), targets)


def _is_criterion(loss: Any) -> bool:
    """Whether a loss is a function of outputs and targets: a module, or a function of `torch.nn.functional`."""
    function = loss.func if isinstance(loss, partial) else loss
    return isinstance(function, nn.Module) or getattr(function, "__module__", "") == nn.functional.__name__


def _rows(batch: Any) -> int:
    """Return the number of rows of the first tensor of a batch that has rows."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), 1)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        yield from _tensors(part)


@contextmanager
def _grads_kept(parameters: Sequence[Tensor]) -> Any:
    """Put the gradients of the parameters aside inside the block."""
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
