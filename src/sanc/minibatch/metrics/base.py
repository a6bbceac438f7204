"""The protocol of metrics: settings that create a preconditioner, which learns M from gradients and applies M⁻¹.

A new metric is one file: a frozen dataclass with `memory`, `refresh`, `couples` and `create`, and a `Preconditioner`. A
user passes it as ``SANC(params, metric=MyMetric())``; saving, resuming, recording and sharding over ranks follow from
the protocol. M has a block for each parameter: it may couple the entries of one parameter, but not those of different
ones, because ranks divide the parameters among them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from sanc.core.saved import require_mapping, require_vector
from sanc.errors import ArgumentError, ArgumentTypeError, shown

Shape = tuple[int, ...]
Shapes = Sequence[Shape]

_REFRESHES_TO_DOUBLE = 50
"""The interval between refreshes of the metric is doubled after twice as many of them. In a long run the eigenbases
change more slowly, and refreshes should not cost a constant fraction of the time."""
_RELATIVE_EPSILON = 1e-6
"""ε, relative to the root of a block's largest second moment: Adam's 1e-8 for gradients of size 1e-2."""
_MIN_STACKED_SIDE = 32
"""A tensor of three dimensions is a stack of matrices if its last two sides have at least this length; otherwise it is
the kernel of a convolution."""


@dataclass(frozen=True, slots=True)
class RankReduction:
    """Sums and maxima over all ranks, of which each holds a part of the entries.

    Attributes
    ----------
    total, largest : callable
        Reduce a tensor over the ranks: its sum, or its largest entries.
    entries : int
        Number of entries on all ranks.
    """

    total: Callable[[Tensor], Tensor]
    largest: Callable[[Tensor], Tensor]
    entries: int


class Preconditioner(ABC):
    """M with its state, for gradients that lie one after another in a flat vector.

    Attributes
    ----------
    like_parameter : tuple of str
        Names of the saved tensors that have an entry for each entry of the parameter.
    always_finite : bool
        Whether M⁻¹g is finite for every finite g. If not, each step waits for the device and tests it.
    """

    like_parameter: tuple[str, ...] = ()
    always_finite: bool = False

    @property
    def parts(self) -> int:
        """Number of parts that are refreshed at different steps, so that no step takes much longer than others."""
        return 1

    def part_of(self, index: int) -> int:
        """Return the part that contains the state of a parameter."""
        return 0

    @abstractmethod
    def update(self, g: Tensor, weight: Tensor | float) -> Tensor:
        """Update M with a gradient, which has this weight in the running means, and return M⁻¹g."""

    def apply(self, g: Tensor) -> Tensor:
        """Return M⁻¹g without an update of M.

        No step calls it, so that a metric need not have it: our metrics use it in `update`, and tests compare it with
        closed forms.
        """
        raise ArgumentTypeError(f"{type(self).__name__} has no apply(): return M⁻¹g without an update of M.")

    def refresh(self, part: int = 0) -> None:  # noqa: B027 - not every metric has something to refresh
        """Update quantities of one part that are too expensive for every step, such as eigenbases."""

    def state(self) -> list[dict[str, Tensor]]:
        """Return for every parameter the tensors that `update` and `refresh` change in place, by name.

        They have at least one dimension. `tensors`, `save` and `restore` use it. A preconditioner whose saved tensors
        have another layout overrides these three instead.
        """
        raise ArgumentTypeError(
            f"{type(self).__name__} has no state(), so that it cannot be saved: return one dict of tensors for each "
            "parameter."
        )

    def tensors(self) -> list[Tensor]:
        """Return every tensor that `update` and `refresh` change in place, so that a recording can restore them."""
        return [tensor for entry in self.state() for tensor in entry.values()]

    def save(self) -> list[dict[str, Tensor]]:
        """Return for every parameter the tensors of its state, by name, as copies with at least one dimension."""
        return [{name: tensor.clone() for name, tensor in entry.items()} for entry in self.state()]

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore the tensors that `save` returned."""
        for current, entry in zip(self.state(), saved, strict=True):
            for name, tensor in current.items():
                tensor.copy_(entry[name])


class Metric(Protocol):
    """The settings of a metric.

    Attributes
    ----------
    memory : float
        Decay of the running means: a gradient has the weight 1 − `memory`, and more at first.
    refresh : int
        Steps between two calls of `Preconditioner.refresh`; fewer at first.
    """

    @property
    def memory(self) -> float: ...
    @property
    def refresh(self) -> int: ...
    def couples(self, shape: Shape) -> bool:
        """Return whether M couples the entries of a parameter of this shape, so that one rank must hold all of them."""
        ...

    def create(self, shapes: Sequence[Shape], like: Tensor, reduce: RankReduction | None = None) -> Preconditioner:
        """Return a preconditioner for parameters of these shapes, on the device and of the type of `like`.

        The device may be "meta", on which tensors have shapes and no values: saved states are checked by such a
        preconditioner.
        """
        ...


def check_preconditioner(metric: Metric, preconditioner: object, count: int) -> None:
    """Raise an error if a metric created no preconditioner whose state can be saved for so many parameters."""
    if not isinstance(preconditioner, Preconditioner):
        raise ArgumentTypeError(
            f"metric = {shown(metric)} cannot be used: its create() returned {shown(preconditioner)}. Return an object "
            "of a subclass of sanc.Preconditioner."
        )
    if type(preconditioner).save is not Preconditioner.save:  # it has its own layout
        return
    saved = preconditioner.state()
    if len(saved) != count:
        raise ArgumentTypeError(
            f"metric = {shown(metric)} cannot be saved: its preconditioner returned the state of {len(saved)} "
            f"parameter{'s' * (len(saved) != 1)}, and the model has {count}. Return one dict of tensors for each."
        )


def check_direction(metric: Metric, direction: object, g: Tensor) -> None:
    """Raise an error if a preconditioner of the caller returned something else than a vector like the gradient."""
    if not isinstance(direction, Tensor) or direction.shape != g.shape:
        returned = tuple(direction.shape) if isinstance(direction, Tensor) else shown(direction)
        raise ArgumentTypeError(
            f"metric = {shown(metric)} cannot be used: update() of its preconditioner returned {returned} for a "
            f"gradient of shape {tuple(g.shape)}. Return M⁻¹g, a vector of that shape."
        )


def require_finite_direction(metric: Metric, dual_norm_square: float) -> None:
    """Raise an error if M⁻¹g was not finite although the gradient was, given gᵀM⁻¹g."""
    if not math.isfinite(dual_norm_square):
        raise ArgumentError(
            f"metric = {shown(metric)} cannot be used: update() of its preconditioner returned a direction that is not "
            "finite for a finite gradient. Add a positive number such as ε to its divisors."
        )


def check_saved(where: str, metric: Metric, shapes: Sequence[Shape], saved: Sequence[Any]) -> None:
    """Raise an error for tensors that a preconditioner for these shapes cannot have saved."""
    examples = create_on_meta(metric, shapes).save() if saved else []
    no_tensors: dict[str, Tensor] = {}
    for index, (example, entry) in enumerate(zip_longest(examples, saved, fillvalue=no_tensors)):
        label = f"{where} of parameter {index}"
        if set(require_mapping(label, entry)) != set(example):
            raise ArgumentError(
                f"{label} has the tensors {sorted(map(str, entry))}, and {shown(metric)} has {sorted(example)}: the "
                "state is of another metric. Construct the optimiser with the metric of the saved run."
            )
        for name, tensor in example.items():
            require_vector(f"{label}[{name!r}]", entry[name], tuple(tensor.shape))


def create_on_meta(metric: Metric, shapes: Sequence[Shape]) -> Preconditioner:
    """Return a preconditioner on the device "meta", whose tensors have shapes and no memory."""
    try:
        return metric.create(shapes, torch.empty(0, device="meta"))
    except Exception as error:
        raise ArgumentError(
            f'metric = {shown(metric)} cannot be used: its create() failed on the device "meta", where only shapes are '
            f"computed ({error}). Create tensors from `like`, as like.new_zeros(…), and do not read their values."
        ) from error


def epsilon_for(largest: Tensor) -> Tensor:
    """Return ε for blocks with these largest second moments; it limits M⁻¹ along directions with small gradients."""
    return _RELATIVE_EPSILON * largest.sqrt() + math.sqrt(torch.finfo(largest.dtype).tiny)


def sizes_of(shapes: Sequence[Shape]) -> list[int]:
    """Return the number of entries of each shape."""
    return [math.prod(shape) for shape in shapes]


def matrix_sides(shape: Shape) -> tuple[int, int] | None:
    """Return rows and columns of a parameter as a matrix, or as a stack of matrices; None if it is a vector.

    A tensor of three dimensions with long sides (`_MIN_STACKED_SIDE`) is a stack, such as the weights of experts.
    """
    if len(shape) == 3 and min(shape[1:]) >= _MIN_STACKED_SIDE:
        return shape[1], shape[2]
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(rows, 1)
    return (rows, columns) if min(rows, columns) > 1 else None


def due_parts(steps: int, interval: int, parts: int) -> list[int]:
    """Return the parts of the metric that are refreshed after so many steps since parameters last joined.

    All parts are refreshed after 1, 2, 4, … steps at first; later each once in `interval` steps, evenly distributed. In
    a long run the interval is doubled whenever it is below 1 % of the steps.
    """
    if steps < interval:
        return list(range(parts)) if steps & (steps - 1) == 0 else []
    interval <<= max(0, (steps // (_REFRESHES_TO_DOUBLE * interval)).bit_length() - 1)
    return [part for part in range(parts) if steps % interval == part * interval // parts]


def refresh_parts(preconditioner: Preconditioner, parts: Iterable[int]) -> None:
    """Refresh these parts."""
    for part in parts:
        preconditioner.refresh(part)
