"""Log the steps of an optimiser to TensorBoard, to Weights & Biases, to a line in the terminal, or to any function.

A target is a function of the numbers of a step and of its iteration::

    log = StepLog(opt, to_tensorboard(SummaryWriter()), ProgressLine(total=1000), every=10)
    for x, y in batches:
        opt.step(lambda: loss(model(x), y))
        log.update()

In a loop without closures the optimiser does not know the loss: pass it, as ``log.update(loss)``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from sanc import ArgumentError, Branch, Record
from sanc.errors import ArgumentTypeError, call_mismatch, is_number, require_integer, shown

if TYPE_CHECKING:  # at run time only `ProgressLine` imports rich, so that other targets do not need the extra
    from rich.console import Console

__all__ = ["ProgressLine", "StepLog", "to_tensorboard", "to_wandb"]

Numbers: TypeAlias = Mapping[str, float]
Target: TypeAlias = Callable[[Numbers, int], None]

_NOISE_WINDOW = 50
"""Number of losses from which the batch noise is estimated: its relative error is then about 1/√(2·50) = 10 %."""
_BRANCHES = {branch: float(number) for number, branch in enumerate(Branch)}
"""Numbers of the branches, for loggers that accept only numbers."""


class HasRecord(Protocol):
    """An optimiser of this package, or a framework's wrapper that passes `record` on."""

    @property
    def record(self) -> Record | None:
        """Record of the last step."""


class StepLog:
    """Passes the numbers of each step to targets.

    The numbers are ``loss``, ``grad_norm``, ``sigma``, ``step_norm``, ``seconds``, ``calls`` (component evaluations),
    ``branch`` (0: very successful, … in the order of `sanc.Branch`), ``curvature`` (1 for a step that used curvature,
    0 for an averaged one) and ``batch_noise``. The last one is the standard deviation of the differences of
    consecutive losses over √2, an estimate of the noise between batches. Numbers that a step did not compute are NaN.

    Parameters
    ----------
    opt : Optimizer
        The optimiser whose record is read.
    *targets : callable
        Called as ``target(numbers, iteration)``.
    every : int
        Number of steps between two calls.
    """

    def __init__(self, opt: HasRecord, *targets: Target, every: int = 1) -> None:
        if not hasattr(opt, "record"):
            raise ArgumentError(f"opt = {type(opt).__name__} has no record: pass an optimiser of sanc.")
        require_integer("every", every, 1)
        for target in targets:
            reason = call_mismatch(target, 2) if callable(target) else "it is no function"
            if reason:
                raise ArgumentTypeError(
                    f"target = {shown(target)} cannot be called as target(numbers, iteration) ({reason}): pass a "
                    "function of both, such as to_tensorboard(writer)."
                )
        self.opt, self.targets, self.every = opt, targets, every
        self._losses: deque[float] = deque(maxlen=_NOISE_WINDOW)

    def update(self, loss: float | Tensor | None = None) -> dict[str, float]:
        """Read the record of the last step, pass its numbers on, and return them.

        Parameters
        ----------
        loss : float or Tensor, optional
            The loss of the step, for loops without closures; by default the loss in the record.
        """
        record = self.opt.record
        if record is None:
            raise ArgumentError("opt has made no step: call update() after step().")
        if not (loss is None or is_number(loss) or (isinstance(loss, Tensor) and loss.numel() == 1)):
            raise ArgumentTypeError(f"loss = {shown(loss)} is no number: pass the loss of the step, or leave it out.")
        value = record.value if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        if math.isfinite(value):
            self._losses.append(value)
        numbers = {
            "loss": value,
            "grad_norm": record.grad_norm,
            "sigma": record.sigma,
            "step_norm": record.step_norm,
            "seconds": record.seconds,
            "calls": float(record.calls.total),
            "branch": _BRANCHES[record.branch],
            "curvature": float(record.branch is not Branch.AVERAGED),
            "batch_noise": self._batch_noise(),
        }
        if record.iteration % self.every == 0:
            for target in self.targets:
                target(numbers, record.iteration)
        return numbers

    def _batch_noise(self) -> float:
        """Return the standard deviation of the loss over batches; NaN of fewer than three losses."""
        changes = np.diff(self._losses)
        return float(np.std(changes) / math.sqrt(2.0)) if len(changes) > 1 else math.nan


def to_tensorboard(writer: Any, prefix: str = "sanc") -> Target:
    """Return a target that writes to TensorBoard.

    Parameters
    ----------
    writer : SummaryWriter
        A ``torch.utils.tensorboard.SummaryWriter``.
    prefix : str
        The names are ``prefix/loss``, ``prefix/sigma`` and so on.
    """
    if not hasattr(writer, "add_scalar"):
        raise ArgumentTypeError(f"writer = {shown(writer)} has no add_scalar: pass SummaryWriter(folder).")

    def write(numbers: Numbers, iteration: int) -> None:
        for name, value in numbers.items():
            if math.isfinite(value):
                writer.add_scalar(f"{prefix}/{name}", value, iteration)

    return write


def to_wandb(run: Any, prefix: str = "sanc") -> Target:
    """Return a target that logs to a run of Weights & Biases.

    Parameters
    ----------
    run : Run
        What ``wandb.init()`` returned, also with ``mode="offline"``.
    prefix : str
        The names are ``prefix/loss``, ``prefix/sigma`` and so on, with ``prefix/iteration``.
    """
    if not hasattr(run, "log"):
        raise ArgumentTypeError(f"run = {shown(run)} has no log: pass what wandb.init() returned.")

    def write(numbers: Numbers, iteration: int) -> None:
        entries = {f"{prefix}/{name}": value for name, value in numbers.items() if math.isfinite(value)}
        run.log(entries | {f"{prefix}/iteration": iteration})

    return write


class ProgressLine:
    """A target that keeps one line in the terminal: progress, loss, batch noise, branch, σ and step norm.

    Use it as a context manager, so that the line is left in order if training raises an error. Numbers that are not
    known are shown as "-". It needs rich, which the extra `lab` installs.

    Parameters
    ----------
    total : int, optional
        Number of steps of the run.
    console : rich.console.Console, optional
        Where the line is printed.
    """

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        require_integer("total", total, 1, optional=True)
        try:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError as missing:
            raise ImportError("ProgressLine needs rich: install the extra, pip install 'sanc[lab]'.") from missing
        columns = (BarColumn(bar_width=20), TextColumn("{task.completed}"), TextColumn("{task.description}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, numbers: Numbers, iteration: int) -> None:
        """Show the numbers of a step."""
        branch = list(Branch)[int(numbers["branch"])]
        formats = {"loss": ".4g", "batch_noise": ".1g", "sigma": ".2g", "step_norm": ".2g"}
        loss, noise, sigma, norm = (
            "-" if math.isnan(numbers[name]) else format(numbers[name], digits) for name, digits in formats.items()
        )
        text = f"loss {loss} ± {noise}  {branch}  σ {sigma}  ‖s‖ {norm}"
        self._progress.update(self._task, completed=iteration + 1, description=text)
