"""The metric of an averaged phase: its preconditioner, the tensors of a saved one, and the steps that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sanc.core.oracle import Oracle
from sanc.minibatch.averaging import AveragedStep, VectorWorkOracle
from sanc.minibatch.metrics.base import (
    Metric,
    Preconditioner,
    Shapes,
    check_preconditioner,
    due_parts,
    refresh_parts,
)

CreatePreconditioner = Callable[[Metric, Shapes, Tensor], Preconditioner]
"""Creates a preconditioner from a metric, the shapes of the parameters and a vector of their type and device."""


def create_on_one_process(metric: Metric, shapes: Shapes, like: Tensor) -> Preconditioner:
    """Return a preconditioner whose tensors are all on this process."""
    return metric.create(shapes, like)


class RunningMetric:
    """The preconditioner that all gradients of an averaged phase update.

    Parameters
    ----------
    settings : Metric
        The metric.
    create : callable
        Creates its preconditioner.

    Attributes
    ----------
    preconditioner : Preconditioner or None
        None before the first averaged step, and after a restart or `restore` until the next one.
    saved : sequence of mapping
        The tensors of the preconditioner of a resumed run, by parameter, until the next averaged step.
    """

    def __init__(self, settings: Metric, create: CreatePreconditioner) -> None:
        self._settings, self._create = settings, create
        self.preconditioner: Preconditioner | None = None
        self.saved: Sequence[Mapping[str, Tensor]] = ()
        self._steps: dict[bool, AveragedStep] = {}  # by whether the caller projects x

    def create(self, shapes: Shapes, like: Tensor) -> Preconditioner:
        """Return a new preconditioner, which is used from `begin` on."""
        preconditioner = self._create(self._settings, shapes, like)
        check_preconditioner(self._settings, preconditioner, len(shapes))
        return preconditioner

    def restore_earlier(self, preconditioner: Preconditioner, new: Sequence[bool]) -> None:
        """Restore the saved tensors of the parameters that are not `new`."""
        tensors = zip(preconditioner.save(), self.saved, new, strict=True)
        preconditioner.restore([initial if is_new else saved for initial, saved, is_new in tensors])

    def begin(self, preconditioner: Preconditioner) -> None:
        """Use a preconditioner from now on."""
        self.preconditioner, self.saved, self._steps = preconditioner, (), {}

    def step(self, oracle: Oracle, averaging: float, *, is_projected: bool) -> AveragedStep:
        """Return the vector work of a step, the same object for the same `is_projected`."""
        if is_projected not in self._steps:
            assert self.preconditioner is not None
            self._steps[is_projected] = AveragedStep(
                self.preconditioner,
                averaging,
                oracle.space.sum_over_ranks,
                has_values=oracle.has_values,
                shapes=oracle.shapes,
            )
        return self._steps[is_projected]

    def refresh(self, steps: int, oracle: Oracle) -> None:
        """Refresh the parts that are due after so many steps since parameters last joined."""
        assert self.preconditioner is not None
        parts = due_parts(steps, self._settings.refresh, self.preconditioner.parts)
        refresh = oracle.vector_work.refresh if parts and isinstance(oracle, VectorWorkOracle) else refresh_parts
        refresh(self.preconditioner, parts)

    # What is saved, and other parameters.

    def tensors(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the tensors to save, by parameter; none before the first averaged step."""
        return self.saved if self.preconditioner is None else self.preconditioner.save()

    def restore(self, tensors: Sequence[Mapping[str, Tensor]] = ()) -> None:
        """Continue from saved tensors; without any, the next gradient initialises the metric."""
        self.preconditioner, self.saved = None, tensors if any(tensors) else ()

    def rearrange(
        self,
        saved: Sequence[Mapping[str, Tensor]],
        earlier_indices: Sequence[int | None],
        shapes: Shapes,
        like: Tensor,
    ) -> None:
        """Continue with other parameters from the `saved` tensors of the earlier ones.

        `earlier_indices` has the earlier index of each parameter; None: it was not there, and has initial tensors.
        """
        if saved and None in earlier_indices:
            initial = self._create(self._settings, shapes, like).save()
            pairs = zip(earlier_indices, initial, strict=True)
            saved = [new if index is None else saved[index] for index, new in pairs]
        elif saved:
            saved = [saved[index] for index in earlier_indices if index is not None]
        self.preconditioner, self.saved, self._steps = None, saved, {}

    def snapshot(self) -> Any:
        """Return what a step may change; the values in the tensors are not part of it."""
        return self.preconditioner, self.saved, self._steps

    def roll_back(self, snapshot: Any) -> None:
        """Restore a snapshot."""
        self.preconditioner, self.saved, self._steps = snapshot
