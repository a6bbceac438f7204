"""Modes: how an optimiser distributes its work, over one process or over the ranks of a group.

A mode constructs the components of the optimiser's driver: leaves, oracle and preconditioner. The driver itself does
not depend on the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sanc.autograd.gradient_only import GradientOnlyOracle
from sanc.autograd.leaves import Leaves
from sanc.autograd.oracle import AutogradOracle
from sanc.core.meter import Meter
from sanc.minibatch.metrics.base import Metric, Preconditioner
from sanc.ranks.compare import (
    ParameterDigests,
    RankFailedError,
    claim_step,
    compare_between_steps,
    compare_model,
    compare_start,
)
from sanc.ranks.group import DEFAULT, Ranks, find_ranks
from sanc.ranks.oracle import AveragingOracle, average

T = TypeVar("T")


class Mode:
    """How an optimiser distributes its work. The members of this base class do all of it in this process.

    Attributes
    ----------
    rank_key : tuple of int
        Integers that are combined with the seed, so that closures of different ranks draw different numbers.
    """

    rank_key: tuple[int, ...] = ()

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in every step."""
        return bool(self.rank_key)

    def seed(self, seed: int | None) -> int:
        """Return the given seed, or draw one from torch's generator."""
        return int(torch.randint(2**62, (), dtype=torch.int64)) if seed is None else seed

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        """Return the flat layout of parameters, with their weight decays and learning rates."""
        return Leaves(tensors, decays, rates)

    def oracle(self, leaves: Leaves, **options: Any) -> AutogradOracle:
        """Return the oracle that evaluates closures."""
        return AutogradOracle(leaves, **options)

    def gradient_oracle(self, leaves: Leaves, point: Tensor, meter: Meter) -> GradientOnlyOracle:
        """Return the oracle of a step without a closure: the gradients in ``.grad`` of the leaves."""
        return GradientOnlyOracle(leaves, point, meter)

    def preconditioner(self, metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
        """Return a preconditioner for parameters of these shapes."""
        return metric.create(shapes, like)

    def clock(self) -> float:
        """Return the time in seconds, which is equal on all ranks."""
        return time.perf_counter()

    def together(self, prepare: Callable[[], T], label: str) -> T:
        """Call a function and return its value. If it raises on one rank, the others raise an error with `label`."""
        return prepare()

    def compare_model(
        self, named: Sequence[tuple[str, Tensor]], arguments: dict[str, Any], rows: Mapping[str, Sequence[int]]
    ) -> None:
        """Raise `RanksError` if the ranks measure different models; `rows` has those of each batch, by description."""

    def begin(self, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any]) -> None:
        """Prepare for an optimiser that is constructed with these groups and settings."""

    def after_loading(self) -> None:
        """Prepare for the first step after a state was loaded."""

    @contextmanager
    def step(self, groups: Sequence[Mapping[str, Any]], iteration: Any, with_closure: bool) -> Iterator[None]:
        """Compare the ranks before a step, which is made inside this context."""
        yield

    def finish_step(self, groups: Sequence[Mapping[str, Any]], iteration: Any) -> None:
        """Finish a step."""

    def before_saving(self, groups: Sequence[Mapping[str, Any]], iteration: Any, *, at_average: bool) -> None:
        """Prepare for `state_dict`; `at_average`: `eval` was called last, not `train`."""

    def compare(self, groups: Sequence[Mapping[str, Any]], iteration: Any, *, at_average: bool = False) -> None:
        """Raise `RanksError` if parameters, options or decisions differ between the ranks, which all call this.

        `at_average` (`eval` was called last, not `train`) is compared, too.
        """


class OneProcess(Mode):
    """Do all work in this process."""


class DataParallel(Mode):
    """Average over the ranks, which hold the same parameters and evaluate different batches.

    Every step compares digests of parameters, options and decisions. Every `every` steps all parameters are compared.
    0: only the set of trainable parameters is, on which the sizes of exchanges depend.

    Attributes
    ----------
    ranks : Ranks
        The ranks of the process group.
    rank_key : tuple of int
        The rank of this process: closures of different ranks draw different numbers.
    whole : bool
        Whether every rank holds the whole parameters.
    """

    whole = True

    def __init__(self, ranks: Ranks, every: int) -> None:
        self.ranks, self._every = ranks, every
        self.rank_key = (ranks.rank,)
        self._digests = ParameterDigests()
        self._due = True  # whether the next step is compared even if `every` does not divide its number

    def __reduce__(self) -> Any:
        return rejoin, (self._every,)  # a process group cannot be pickled

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def seed(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        local = torch.tensor([super().seed(None)], device=self.ranks.device)
        return int(self.ranks.all_gather(local, "a seed")[0])  # of rank 0

    def oracle(self, leaves: Leaves, **options: Any) -> AutogradOracle:
        return AveragingOracle(self.ranks, leaves, **options)

    def gradient_oracle(self, leaves: Leaves, point: Tensor, meter: Meter) -> GradientOnlyOracle:
        oracle = GradientOnlyOracle(leaves, point, meter)
        local = oracle.g
        averaged = average(
            self.ranks, lambda: ([], local), "a gradient", like=local, reduced="maybe", style=lambda: "gradients"
        )
        self.ranks.wrapped = self.ranks.wrapped or averaged.wrapper_seen
        assert averaged.vector is not None
        oracle.g = averaged.vector
        return oracle

    def clock(self) -> float:
        return self.ranks.clock()

    def together(self, prepare: Callable[[], T], label: str) -> T:
        results: list[T] = []

        def local() -> tuple[list[float], None]:
            results.append(prepare())
            return [], None

        average(self.ranks, local, label)
        return results[0]

    def compare_model(
        self, named: Sequence[tuple[str, Tensor]], arguments: dict[str, Any], rows: Mapping[str, Sequence[int]]
    ) -> None:
        batches: dict[str, Any] = {f"the number of batches in {name}": len(counts) for name, counts in rows.items()}
        if not self.whole:  # the wrapper of the model averages batch by batch, with equal weights
            batches |= {f"the number of rows of a batch in {name}": tuple(counts) for name, counts in rows.items()}
        compare_model(self.ranks, named, arguments, batches, self.whole)

    def begin(self, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any]) -> None:
        compare_start(self.ranks, groups, settings | {"compare_every": self._every}, self.whole)

    def after_loading(self) -> None:
        self._due = True

    @contextmanager
    def step(self, groups: Sequence[Mapping[str, Any]], iteration: Any, with_closure: bool) -> Iterator[None]:
        complete = self._every > 0
        claim_step(self.ranks, self._digests, groups, iteration, self.whole, complete=complete, due=self._due)
        if self._digests.changed or (with_closure and (self.ranks.wrapped or not self.whole)):
            self.ranks.agree()  # before vectors are reset, and before collectives of the model in the closure
        try:
            yield
        except Exception as error:
            try:
                self.ranks.fail()
            except RankFailedError:
                raise error from None  # the other ranks raise `RankFailedError`
            raise

    def finish_step(self, groups: Sequence[Mapping[str, Any]], iteration: Any) -> None:
        if self._due or (self._every and iteration.state.iteration % self._every == 0):
            self._due = False
            self.compare(groups, iteration)

    def before_saving(self, groups: Sequence[Mapping[str, Any]], iteration: Any, *, at_average: bool) -> None:
        if not self.whole:  # otherwise a single rank may save the state
            self.compare(groups, iteration, at_average=at_average)

    def compare(self, groups: Sequence[Mapping[str, Any]], iteration: Any, *, at_average: bool = False) -> None:
        if self._every:
            compare_between_steps(self.ranks, groups, iteration, self.whole, at_average=at_average)


def rejoin(every: int) -> Mode:
    """Return the mode for the default group of this process, after an optimiser was unpickled."""
    ranks = find_ranks(DEFAULT)
    return OneProcess() if ranks is None else DataParallel(ranks, every)
