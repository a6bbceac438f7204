"""Losses of a margin: each is a value, a slope and a bend as functions of z and the label, and knows its labels.

z holds one margin a row, or for softmax one column a class; so do slopes.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sanc.errors import ArgumentError, nearest, require_integer

Array: TypeAlias = npt.NDArray[Any]
PenaltyKind = Literal["nonconvex", "l2", "none"]


class Loss(Protocol):
    """What a linear model needs to know of its loss."""

    columns: int

    def labels(self, y: Array, dtype: np.dtype[Any]) -> Array: ...
    def value(self, z: Array, y: Array) -> Array: ...
    def slope(self, z: Array, y: Array) -> Array: ...
    def bend(self, z: Array, y: Array) -> Array: ...
    def bent(self, bend: Array, change: Array) -> Array: ...


class _OneMargin:
    columns = 1

    def bent(self, bend: Array, change: Array) -> Array:
        """Second derivative times a change of the margins."""
        product: Array = bend * change
        return product


class LogisticLoss(_OneMargin):
    """log(1 + e^z) − y z (D6), for labels 0 and 1."""

    def labels(self, y: Array, dtype: np.dtype[Any]) -> Array:
        """Return the labels."""
        return _among(y, (0, 1), "(y + 1) / 2 turns −1 and 1 into them").astype(dtype)

    def value(self, z: Array, y: Array) -> Array:
        """Losses: log(1 + e^(t z)) with t = 1 − 2y."""
        t = (1 - 2 * y) * z
        losses: Array = np.log1p(np.exp(-np.abs(t))) + np.maximum(t, 0.0)
        return losses

    def slope(self, z: Array, y: Array) -> Array:
        """First derivatives: t / (1 + e^(−t z))."""
        t = 1 - 2 * y
        slope: Array = t * _sigmoid(t * z)
        return slope

    def bend(self, z: Array, y: Array) -> Array:
        """Second derivatives: e^−|z| / (1 + e^−|z|)²."""
        e = np.exp(-np.abs(z))
        bend: Array = e / ((1 + e) * (1 + e))
        return bend


class TanhLoss(_OneMargin):
    """1 − tanh(y z), for labels −1 and 1."""

    def labels(self, y: Array, dtype: np.dtype[Any]) -> Array:
        """Return the labels."""
        return _among(y, (-1, 1), "2 * y − 1 turns 0 and 1 into them").astype(dtype)

    def value(self, z: Array, y: Array) -> Array:
        """Losses."""
        losses: Array = 1 - np.tanh(y * z)
        return losses

    def slope(self, z: Array, y: Array) -> Array:
        """First derivatives: −y (1 − tanh²)."""
        t = np.tanh(z)
        slope: Array = y * (t * t - 1)
        return slope

    def bend(self, z: Array, y: Array) -> Array:
        """Second derivatives: 2 tanh(y z) (1 − tanh²)."""
        t = np.tanh(y * z)
        bend: Array = 2 * t * (1 - t * t)
        return bend


class SoftmaxLoss:
    """−log softmax(z)_y, for labels 0 … classes − 1."""

    def __init__(self, classes: int | None) -> None:
        require_integer("classes", classes, 2)
        self._asked = classes
        self.columns = 2 if classes is None else classes

    def labels(self, y: Array, dtype: np.dtype[Any]) -> Array:
        """Return the labels as integers."""
        if not np.all(np.equal(y, np.round(y))) or y.min() < 0:
            bad = y[(y != np.round(y)) | (y < 0)][0]
            raise ArgumentError(f"y holds {bad!r}: pass labels 0, 1, 2 …")
        self.columns = int(y.max()) + 1 if self._asked is None else self._asked
        if self.columns < 2 or y.max() >= self.columns:
            raise ArgumentError(
                f"classes = {self.columns} does not fit labels up to {int(y.max())}: pass at least "
                f"{max(2, int(y.max()) + 1)}."
            )
        return y.astype(np.intp)

    def value(self, z: Array, y: Array) -> Array:
        """Losses."""
        z = z - z.max(axis=1, keepdims=True)
        losses: Array = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]
        return losses

    def slope(self, z: Array, y: Array) -> Array:
        """First derivatives: softmax(z) − e_y."""
        slope = self.bend(z, y)
        slope[np.arange(len(y)), y] -= 1
        return slope

    def bend(self, z: Array, y: Array) -> Array:
        """softmax(z), from which `bent` makes the second derivatives."""
        p: Array = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def bent(self, bend: Array, change: Array) -> Array:
        """(diag(p) − p pᵀ) times a change of the margins."""
        product: Array = bend * change
        product -= bend * product.sum(axis=1, keepdims=True)
        return product


class Penalty:
    """λ Σ w²/(1+w²) or (λ/2)‖w‖²: value, gradient, and the diagonal of the Hessian."""

    def __init__(self, kind: PenaltyKind, strength: float) -> None:
        kinds = ("nonconvex", "l2", "none")
        if kind not in kinds:
            raise ArgumentError(f"penalty = {kind!r} is not known: {nearest(str(kind), kinds)}.")
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < np.inf:
            raise ArgumentError(f"strength = {strength!r} cannot be used: pass a finite number ≥ 0.")
        self.kind = kind if strength > 0 else "none"
        self.strength = float(strength)

    def value(self, w: Array) -> float:
        """λ Σ w²/(1+w²) or (λ/2)‖w‖²."""
        if self.kind == "nonconvex":
            square = w * w
            return self.strength * float((square / (1 + square)).sum())
        return 0.5 * self.strength * float(w.dot(w)) if self.kind == "l2" else 0.0

    def gradient(self, w: Array) -> Array | float:
        """Its gradient."""
        if self.kind == "nonconvex":
            slope: Array = (2 * self.strength) * w / (1 + w * w) ** 2
            return slope
        return self.strength * w if self.kind == "l2" else 0.0

    def curvature(self, w: Array) -> Array | float:
        """Diagonal of its Hessian."""
        if self.kind == "nonconvex":
            square = w * w
            bend: Array = (2 * self.strength) * (1 - 3 * square) / (1 + square) ** 3
            return bend
        return self.strength if self.kind == "l2" else 0.0


def _sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))
    sigmoid: Array = np.where(z >= 0, np.ones_like(e), e) / (1 + e)
    return sigmoid


def _among(y: Array, allowed: tuple[int, ...], remedy: str) -> Array:
    good = np.isin(y, allowed)
    if not good.all():
        raise ArgumentError(
            f"y holds {y[~good][0]!r} in row {int(np.argmin(good))}: pass labels {allowed[0]} and {allowed[1]}; "
            f"{remedy}."
        )
    return y
