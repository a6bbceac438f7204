"""Oracles that average over the ranks: each evaluates its own batch, and all hear the same answer.

An answer is the mean over the rows of all ranks: weighted by the rows of a `sanc.Batch`, which are counted, and evenly
where closures are plain functions. A rank whose evaluation raises says so in the place of its answer, and all end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.core.oracle import Operator
from sanc.errors import ArgumentError, RanksError
from sanc.ranks.group import Ranks, fingerprint

Answer = tuple[list[float], Tensor | None]
"""Numbers, and a vector where one was asked for."""

Reduced = Literal["no", "perhaps", "yes"]


def average(
    ranks: Ranks,
    ask: Callable[[], Answer],
    what: str,
    *,
    like: Tensor | None = None,
    terms: float | None = None,
    rows: int = 1,
    reduced: Reduced = "no",
) -> tuple[Answer, int]:
    """Return the mean of everybody's answer, and the rows of all together.

    Parameters
    ----------
    ask : callable
        Returns this rank's answer: two numbers at most and, where there is a `like`, a vector like that.
    terms : float, optional
        Terms that this rank's answer is the mean of; None: not counted, and all weigh the same.
    rows : int
        Rows of this rank's batch.
    reduced : {"no", "perhaps", "yes"}
        Whether somebody else has averaged the vectors already: DistributedDataParallel perhaps, in the backward pass,
        which is looked for (where vectors agree in every bit they are not sent again); fully_shard has.
    """
    problem: Exception | None = None
    weight = -1.0 if terms is None else terms
    numbers: list[float] = []
    own = like
    try:
        numbers, own = ask()
    except Exception as raised:
        if ranks.wrapped:
            raise  # the others wait elsewhere, in an exchange of the wrapper's
        problem = raised
    marks = [0.0, 0.0]
    if reduced == "perhaps" and own is not None:
        marks = [float(mark & 0xFFFFFFFF) for mark in fingerprint(own).tolist()]
    say = [float(problem is not None), weight, float(rows), *marks, *numbers, *[0.0] * (2 - len(numbers))]
    sent = own if reduced == "no" else None
    told, total = ranks.exchange(say, what, sent if sent is None or abs(weight) == 1.0 else sent * abs(weight))
    if problem is not None:
        raise problem
    for rank, row in enumerate(told):
        if row[0]:
            raise RanksError(
                f"rank {rank} failed where {what} is computed, and its own error says why; rank {ranks.rank} and the "
                "others have left their parameters as they were."
            )
    weights = [row[1] for row in told]
    if min(weights) < 0.0 < max(weights):
        raise ArgumentError("closure is a sanc.Batch on some ranks and a plain function on others: pass one kind.")
    weights = [abs(w) for w in weights]
    whole = sum(weights)
    if reduced == "yes" or (reduced == "perhaps" and own is not None and all(row[3:5] == marks for row in told)):
        if len(set(weights)) > 1:
            raise ArgumentError(
                f"the batches have {', '.join(f'{w:g}' for w in weights)} rows on the ranks, and the wrapper of the "
                "model averages their gradients as if these were equal: pass batches of one size; or, with "
                "DistributedDataParallel, let the closure use the module that it wraps."
            )
        total = own
        ranks.wrapped = ranks.wrapped or any(row[5:] != told[0][5:] for row in told)  # other losses, the same gradient
    elif own is not None:
        total = (ranks.sum(own * abs(weight), what) if total is None else total).div_(whole)
    means = [sum(w * row[place] for w, row in zip(weights, told, strict=True)) / whole for place in (5, 6)]
    return (means, total), 1 if terms is None else int(sum(row[2] for row in told))


class AveragingOracle(AutogradOracle):
    """f, g and Hv of closures over leaf tensors that are the same on all ranks; each has a batch of its own."""

    reduced: Reduced | None = None  # where that does not depend on how closures are
    tries = 1  # all ranks call their closures equally often

    def __init__(self, ranks: Ranks, leaves: Leaves, **how: Any) -> None:
        self.ranks = ranks
        self._totals: dict[Sample, int] = {}
        super().__init__(leaves, **how)

    def unbind(self) -> None:
        super().unbind()
        self._totals = {}

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = (self._totals.get(sample, sample.size) for sample in self.samples)
        return g, h, f

    def mean(self, sample: Sample, what: str, ask: Callable[[], Answer], *, vector: bool = True) -> Answer:
        """Return the mean of everybody's answer on a sample."""
        reduced = self.reduced or ("no" if self.style == "loss" else "perhaps")
        like = self.leaves.tensors[0].detach().new_zeros(self.leaves.dim) if vector else None
        how: dict[str, Any] = {"terms": sample.terms, "rows": sample.size, "reduced": reduced}
        answer, self._totals[sample] = average(self.ranks, ask, what, like=like, **how)
        return answer

    def _others(self, sample: Sample) -> int:
        """Return the rows of the other ranks."""
        return self._totals[sample] - sample.size

    def evaluate(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        def ask() -> Answer:
            return [self.evaluate_here(x, sample, graph=graph)], None

        (value, _), _ = self.mean(sample, "a value", ask, vector=False)
        self.meter.value += self._others(sample)
        return value

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        first, sample = self.raw_loss is None, self.samples[0]

        def ask() -> Answer:
            value, g = super(AveragingOracle, self).unread_gradient(x)
            assert self.raw_loss is not None
            return [float(value), float(self.raw_loss)], g

        (value, loss), g = self.mean(sample, "a gradient", ask)
        if first:
            assert self.raw_loss is not None
            self.raw_loss = torch.full_like(self.raw_loss, loss)
        self.meter.gradient += self._others(sample)
        assert g is not None
        return g.new_tensor(value, dtype=torch.float64), g

    def sample_gradient(self, x: Any, sample: Sample) -> Tensor:
        if sample is self.samples[0]:
            return super().sample_gradient(x, sample)  # a copy of the mean
        _, g = self.mean(sample, "a gradient", lambda: ([], super(AveragingOracle, self).sample_gradient(x, sample)))
        self.meter.gradient += self._others(sample)
        assert g is not None
        return g

    def check(self, closure: Callable[[], None]) -> None:
        def ask() -> Answer:
            closure()
            return [], None

        self.mean(self.samples[0], "a check", ask, vector=False)

    def hessian(self, x: Any) -> Operator:
        return _AveragedHessian(self, super().hessian(x), self.samples[1])


class _AveragedHessian(Operator):
    """The mean of the Hessians of all ranks."""

    def __init__(self, oracle: AveragingOracle, own: Operator, sample: Sample) -> None:
        self._oracle, self._own, self._sample = oracle, own, sample

    def __call__(self, v: Any) -> Any:
        def ask() -> Answer:
            return [], cast(Tensor, self._own(v))

        _, product = self._oracle.mean(self._sample, "a Hessian product", ask)
        self._oracle.meter.product += self._oracle._others(self._sample)
        return product

    def gradient(self) -> Any:
        return self._own.gradient()

    def error(self, v: Any, product: Any) -> float:
        def ask() -> Answer:
            differenced = self._oracle.hvp == "finite-difference"
            return [self._own.error(v, self._own(v)) if differenced else 0.0], None  # of this rank's own product

        (error, _), _ = self._oracle.mean(self._sample, "a Hessian product", ask, vector=False)
        return error

    def release(self) -> None:
        self._own.release()
