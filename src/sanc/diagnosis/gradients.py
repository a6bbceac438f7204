"""The loss of a network at its parameters, its gradient, and how gradients of batches differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sanc.autograd.closures import LOSS_TOLERANCE
from sanc.autograd.leaves import PartMoments, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.errors import ArgumentError, NonFiniteError


@dataclass(frozen=True)
class NetworkLoss:
    """The losses of a network around its parameters, and how they may be measured.

    Attributes
    ----------
    oracle : AutogradOracle
        Evaluates samples and Hessian products.
    x : Tensor
        The parameters at which the network is measured.
    data, held_out : Sample
        The loss that is differentiated, and that on which steps are evaluated.
    keeps_basis : bool
        Whether Lanczos keeps its vectors. Otherwise the gradient is kept on the host, too.
    is_rough : bool
        Whether losses may have the precision of bfloat16, under autocast or on a GPU.
    time_is_up : callable
        Returns whether the time limit has passed.
    """

    oracle: AutogradOracle
    x: Tensor
    data: Sample
    held_out: Sample | None
    keeps_basis: bool
    is_rough: bool
    time_is_up: Callable[[], bool]

    def value(self, x: Any) -> float:
        """Return the loss on the data."""
        return self.oracle.evaluate(x, self.data)

    def held_out_value(self, x: Any) -> float:
        """Return the loss on the held-out batches; NaN without them."""
        return math.nan if self.held_out is None else self.oracle.evaluate(x, self.held_out)


@dataclass(frozen=True)
class GradientMeasurement:
    """Loss and gradient at the parameters, with the noise of batches.

    Attributes
    ----------
    value, held_out_value : float
        Losses on the data and on the held-out batches; the latter is NaN without such batches.
    gradient : Tensor
        The gradient, on the host if Lanczos does not keep its vectors.
    grad_norm : float
        Its norm.
    batches, rows : int
        Numbers of batches and rows of the data.
    noise_share, noise_scale : float
        As in `Report`.
    """

    value: float
    held_out_value: float
    gradient: Tensor
    grad_norm: float
    batches: int
    rows: int
    noise_share: float
    noise_scale: float


def measure_gradient(network: NetworkLoss) -> GradientMeasurement:
    """Return the loss, the gradient, and how gradients of batches differ."""
    oracle, x = network.oracle, network.x
    moments = oracle.part_moments(x, network.data)
    grad_norm, rows = oracle.space.norm(moments.gradient), oracle.sizes[0]
    _require_finite(moments.value, grad_norm)
    _require_repeatable(moments.value, network.value(x))
    held_out_value = network.held_out_value(x)
    if network.held_out is not None and not math.isfinite(held_out_value):
        raise NonFiniteError(f"the loss is {held_out_value:g} on held_out: pass batches with a finite loss.")
    noise_share, noise_scale = _batch_noise(moments, grad_norm, rows)
    return GradientMeasurement(
        value=moments.value,
        held_out_value=held_out_value,
        gradient=moments.gradient if network.keeps_basis else moments.gradient.cpu(),
        grad_norm=grad_norm,
        batches=moments.count,
        rows=rows,
        noise_share=noise_share,
        noise_scale=noise_scale,
    )


def _require_finite(value: float, grad_norm: float) -> None:
    """Raise an error unless loss and gradient norm are finite."""
    if not (math.isfinite(value) and math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"the loss is {value:g} and its gradient norm {grad_norm:g} on data: pass batches and parameters with a "
            "finite loss."
        )


def _require_repeatable(value: float, again: float) -> None:
    """Raise an error if two evaluations at the same parameters differ."""
    if not abs(again - value) <= LOSS_TOLERANCE * max(abs(again), abs(value)):
        raise ArgumentError(
            f"loss is {value!r} and then {again!r} at the same parameters: draw random numbers from the generators of "
            "torch, NumPy or random alone, and pass batches that do not change."
        )


def _batch_noise(moments: PartMoments, grad_norm: float, rows: int) -> tuple[float, float]:
    """Return the fraction of ‖g‖² that is batch noise, and the noise scale in rows; NaN for one batch.

    A batch of n_i rows has a gradient g_i with the variance S/n_i if S is the variance of a row. With weights w_i =
    n_i/N of k batches, N Σ w_i ‖g_i − ḡ‖² / (k − 1) estimates S without bias, and S/N is the variance of the mean ḡ.
    """
    if moments.count == 1:
        return math.nan, math.nan
    noise = max(moments.mean_square - grad_norm**2, 0.0) / (moments.count - 1)
    signal = grad_norm**2 - noise
    noise_fraction = min(1.0, noise / grad_norm**2) if grad_norm > 0.0 else float(noise > 0.0)
    return noise_fraction, rows * noise / signal if signal > 0.0 else math.inf
