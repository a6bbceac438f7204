"""One look at a batch: its gradient beside what the mini-batch iteration remembers, read by the host at once.

On a GPU each number that the host reads stops it until the device has caught up, so everything that a step needs to
know of a batch is computed first and read together. The same lines run eagerly and inside a recorded graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sanc.vectors import Floats, Space, Vector


@dataclass(frozen=True, slots=True)
class Memory:
    """What a batch is compared with.

    Attributes
    ----------
    averaging, metric_averaging : float or None
        Memory of the mean gradient and of its mean square; None where there is none.
    project : bool
        Whether the mean gradient is wanted in the metric and in the basis, which then are the ones given.
    momentum, square, scale, path : vector or None
        Mean gradient and mean square so far (without the correction of their bias), M^(−1/2), and the last steps.
    basis : block of rows or None
        The Krylov space.
    """

    averaging: float | None
    metric_averaging: float | None
    project: bool
    momentum: Vector | None
    square: Vector | None
    scale: Vector | None
    path: Vector | None
    basis: Any


@dataclass(frozen=True, slots=True)
class Look:
    """The vectors of a look: the means with this batch in them, and the mean in the coordinates of the metric."""

    gradient: Vector
    momentum: Vector | None
    square: Vector | None
    mean: Vector | None


@dataclass(frozen=True, slots=True)
class Survey:
    """A look and its numbers.

    Attributes
    ----------
    look : Look
        The vectors.
    value, grad_norm : float
        Loss of the batch and norm of its gradient.
    slope, path_square : float
        gᵀp and pᵀp of the path p; 0 where there is none.
    mean_square : float
        Squared length of the mean in the metric.
    inside : ndarray
        The mean in the basis.
    """

    look: Look
    value: float
    grad_norm: float
    slope: float
    path_square: float
    mean_square: float
    inside: Floats


def look_at(space: Space, value: Any, g: Vector, memory: Memory) -> tuple[Look, Any]:
    """Compare a batch with the memory; return the vectors, and the numbers not yet read."""
    momentum = square = mean = None
    unread = [value, space.length(g)]
    if memory.path is not None:
        unread += [space.inner(g, memory.path), space.inner(memory.path, memory.path)]
    if memory.averaging is not None:
        momentum = space.blend(memory.momentum, g, memory.averaging)
    if memory.metric_averaging is not None:
        square = space.blend(memory.square, g * g, memory.metric_averaging)
    if memory.project:
        mean = g if momentum is None else momentum
        if memory.scale is not None:
            mean = mean * memory.scale
        unread.append(space.inner(mean, mean))
        if memory.basis is not None:
            unread.append(space.products(memory.basis, mean))
    return Look(g, momentum, square, mean), space.gather(unread)


def read(space: Space, look: Look, unread: Any, memory: Memory) -> Survey:
    """Wait for the numbers of a look."""
    return survey_of(look, space.read(unread), memory)


def survey_of(look: Look, read_numbers: Sequence[float], memory: Memory) -> Survey:
    """Put the numbers of a look where they belong."""
    numbers = iter(read_numbers)
    value, grad_norm = next(numbers), next(numbers)
    slope, path_square = (next(numbers), next(numbers)) if memory.path is not None else (0.0, 0.0)
    mean_square = next(numbers) if memory.project else 0.0
    return Survey(look, value, grad_norm, slope, path_square, mean_square, np.array(list(numbers), np.float64))


@dataclass(frozen=True, slots=True)
class Move:
    """A step in terms of what is on the device: scale · (along · mean + Σ within_i basis_i).

    Attributes
    ----------
    look : Look
        The look that led to it.
    mean : Vector
        The mean gradient in the metric.
    along : float
        Its weight.
    basis, within : block of rows and ndarray
        The Krylov space and the weights of its vectors.
    scale : vector or None
        M^(−1/2).
    path : vector or None
        The steps before this one …
    memory : float
        … and how much of them is kept.
    """

    look: Look
    mean: Vector
    along: float
    basis: Any
    within: Floats
    scale: Vector | None
    path: Vector | None
    memory: float


@dataclass(frozen=True, slots=True)
class Moved:
    """What a step led to: the point, the path with the step in it, and its length, not read yet.

    The means that led to it are kept as they are, or in memory of their own.
    """

    point: Vector
    path: Vector
    length: Any
    momentum: Vector | None = None
    square: Vector | None = None


def vector_of(space: Space, move: Move) -> Vector:
    """Return the step itself."""
    return space.step(move.mean, move.along, move.basis, move.within, move.scale)


def make(space: Space, x: Vector, move: Move) -> Moved:
    """Take a step."""
    s = vector_of(space, move)
    path = s if move.path is None else space.extended(move.path, move.memory, s)
    return Moved(x + s, path, space.length(s))
