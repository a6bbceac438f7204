"""Bounds of a set onto which the caller projects x, and steps along them.

A step that the caller undoes need not be one of descent: with the direction M⁻¹g of a metric, the projected steps may
have a fixed point that is no minimum on the set. So the directions that lead out of the set are removed from the
gradient and from the step, P M⁻¹P g (two-metric projection, Bertsekas 1982). What the caller does shows two kinds of
bounds: those of an entry, as of `clamp_`, and those of the norm of a row, a column or a parameter, as of `renorm`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sanc.core.space import ROUNDING_ERRORS
from sanc.minibatch.metrics.base import Shapes

_AXES = (0, 1, None)
"""The slices of which norms may be bounded: rows, columns, and parameters as a whole."""


class Normals(NamedTuple):
    """The outward normals of the bounds at which x is: zero elsewhere.

    Attributes
    ----------
    entries : Tensor
        ±1 at an entry that is at a bound.
    slices : Tensor
        A row for each of `_AXES`, with a unit vector in each slice of which the norm is at a bound.
    """

    entries: Tensor
    slices: Tensor


class Tangent(NamedTuple):
    """The projection P on the vectors that do not lead out of the set, at some of its bounds.

    Attributes
    ----------
    blocked : Tensor
        Whether each entry is at a bound.
    normals : Tensor
        Those of slices.
    shapes : sequence of tuple of int
        Shapes of the parameters.
    """

    blocked: Tensor
    normals: Tensor
    shapes: Shapes

    def __call__(self, v: Tensor) -> Tensor:
        """Return Pv."""
        v = torch.where(self.blocked, 0.0, v)
        for axis, normals in zip(_AXES, self.normals, strict=True):
            v = v - normals * _slice_sums(normals * v, self.shapes, axis)
        return v


def tangent_for(normals: Normals, step: Tensor, shapes: Shapes) -> Tangent:
    """Return the projection at the bounds that the step would cross; `shapes` are those of the parameters."""
    crossed = [
        torch.where(_slice_sums(normal * step, shapes, axis) > 0.0, normal, 0.0)
        for axis, normal in zip(_AXES, normals.slices, strict=True)
    ]
    return Tangent(normals.entries * step > 0.0, torch.stack(crossed), shapes)


def find_normals(last_x: Tensor, written_x: Tensor, x: Tensor, shapes: Shapes) -> Normals:
    """Return the normals, from x before the last step and after it, and from what the caller has made of the latter.

    An entry is at a bound if the caller put it back to its value before the step, or changed only its sign, as |x|
    does.
    """
    is_at_bound = (x == last_x) | (x == -written_x)
    entries = torch.where(is_at_bound, (written_x - x).sign(), 0.0)
    return Normals(entries, torch.stack([_slice_normals(last_x, written_x, x, shapes, axis) for axis in _AXES]))


def _slice_normals(last_x: Tensor, written_x: Tensor, x: Tensor, shapes: Shapes, axis: int | None) -> Tensor:
    """Return the normals of slices that the caller has scaled, so that their norms are those before the step."""
    error = ROUNDING_ERRORS * torch.finfo(x.dtype).eps
    norm, last_norm, written_norm = (_slice_sums(v.square(), shapes, axis).sqrt() for v in (x, last_x, written_x))
    is_same_norm = (norm - last_norm).abs() <= error * last_norm
    is_changed = (written_norm - last_norm).abs() > 2.0 * error * last_norm
    is_scaled = _slice_sums(x * written_x, shapes, axis) >= (1.0 - error) * norm * written_norm
    normal = x / norm.clamp(min=torch.finfo(x.dtype).tiny) * (written_norm - norm).sign()
    return torch.where(is_same_norm & is_changed & is_scaled, normal, 0.0)


def _slice_sums(v: Tensor, shapes: Shapes, axis: int | None) -> Tensor:
    """Return for each entry the sum over its slice; a vector, and without an axis every parameter, is one slice."""
    sums = []
    for part, shape in zip(torch.split(v, [math.prod(shape) for shape in shapes]), shapes, strict=True):
        kept_axis = axis if len(shape) > 1 else None
        others = [k for k in range(len(shape)) if k != kept_axis]
        total = part.reshape(shape).sum(others, keepdim=True) if others else part
        sums.append(total.expand(shape).reshape(-1))
    return torch.cat(sums)
