"""Oracles that average over the ranks: each rank evaluates its batch, and all ranks get the same mean.

The mean is over the rows of all ranks. Each `sanc.Batch` is weighted by its number of terms; plain functions have equal
weights. A rank whose evaluation raises an exception sends that fact in place of its numbers, and the step ends on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from sanc.autograd.leaves import Leaves, PartMoments, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.core.oracle import Operator
from sanc.errors import ArgumentError, RanksError
from sanc.ranks.group import Ranks, fingerprint

Evaluation = tuple[list[float], Tensor | None]
"""Numbers, at most `_MAX_NUMBERS` of them, and a vector, or None if none is needed."""

_MAX_NUMBERS = 2
"""The most numbers of an evaluation: a gradient comes with the loss, with and without weight decay."""

Reduced = Literal["no", "maybe", "yes"]

_STYLES = ("", "loss", "backward", "gradients")
"""The styles of a step, as ranks send them."""


class Averaged(NamedTuple):
    """The mean of the evaluations of all ranks.

    Attributes
    ----------
    numbers : list of float
        The means of the numbers.
    vector : Tensor or None
        The mean of the vectors, if they were evaluated.
    rows : int
        The rows of all ranks together.
    wrapper_seen : bool
        Whether the exchange shows that a wrapper of the model has averaged the vectors.
    """

    numbers: list[float]
    vector: Tensor | None
    rows: int
    wrapper_seen: bool


def average(
    ranks: Ranks,
    evaluate: Callable[[], Evaluation],
    label: str,
    *,
    like: Tensor | None = None,
    terms: float | None = None,
    rows: int = 1,
    reduced: Reduced = "no",
    style: Callable[[], str] = lambda: "",
) -> Averaged:
    """Return the mean of the evaluations of all ranks.

    Parameters
    ----------
    ranks : Ranks
        The ranks that evaluate together; the caller keeps `wrapper_seen` in `ranks.wrapped`.
    evaluate : callable
        Returns the evaluation of this rank: at most two numbers and, if `like` is given, a vector of its shape.
    label : str
        What is evaluated, for error messages.
    like : Tensor, optional
        A vector like the one evaluated, which is exchanged if the evaluation fails; None: only numbers are evaluated.
    terms : float, optional
        Number of terms that this rank's evaluation is the mean of. None: all ranks have equal weights.
    rows : int
        Rows of this rank's batch.
    reduced : {"no", "maybe", "yes"}
        Whether a wrapper of the model has averaged the vectors in the backward pass. "yes": fully_shard has. "maybe":
        DistributedDataParallel may have; vectors that agree in every bit were averaged, and are not sent again.
    style : callable
        Returns the style of the step after the evaluation, one of `_STYLES`. Later exchanges depend on it.
    """
    numbers, local, error = _evaluate_here(ranks, evaluate, like)
    hashes = [0.0, 0.0]
    if reduced == "maybe" and local is not None:
        hashes = [float(part & 0xFFFFFFFF) for part in fingerprint(local).tolist()]  # exact in float64
    ours = _Message(error is not None, -1.0 if terms is None else terms, rows, hashes, style(), numbers)
    weight = abs(ours.weight)
    vector = local if reduced == "no" else None
    weighted = vector if vector is None or weight == 1.0 else vector * weight
    try:
        received, total = ranks.exchange(ours.encode(), label, weighted)
    except RanksError as difference:
        if error is None:
            raise
        raise difference from error  # the difference may be the reason of the error
    if error is not None:
        raise error
    messages = [_Message.decode(row) for row in received]
    _check_messages(messages, ranks.rank, label)
    weights = [abs(message.weight) for message in messages]
    weight_sum = sum(weights)
    same = reduced == "maybe" and local is not None and all(message.hashes == hashes for message in messages)
    is_reduced = reduced == "yes" or same
    # Equal gradients of different losses show a wrapper; batches may be equal on all ranks without one.
    wrapper_seen = is_reduced and any(message.numbers != messages[0].numbers for message in messages)
    if is_reduced:
        _require_equal_weights(weights)
        total = local
    elif local is not None:
        total = (ranks.sum(local * weight, label) if total is None else total).div_(weight_sum)
    weighted_messages = list(zip(weights, messages, strict=True))
    means = [sum(w * message.numbers[k] for w, message in weighted_messages) / weight_sum for k in range(_MAX_NUMBERS)]
    all_rows = 1 if terms is None else sum(message.rows for message in messages)
    return Averaged(means, total, all_rows, wrapper_seen)


@dataclass(frozen=True)
class _Message:
    """The numbers that ranks exchange with an evaluation.

    Attributes
    ----------
    failed : bool
        Whether the evaluation raised an exception.
    weight : float
        The weight of the rank's evaluation; −1 for a plain function, whose terms are not counted.
    rows : int
        Rows of the rank's batch.
    hashes : list of float
        Two hashes of the vector; 0 if they are not needed.
    style : str
        The style of the step, one of `_STYLES`.
    numbers : list of float
        The numbers of the evaluation.
    """

    failed: bool
    weight: float
    rows: int
    hashes: list[float]
    style: str
    numbers: list[float]

    def encode(self) -> list[float]:
        """Return the message as floats, as many for every evaluation."""
        header = [float(self.failed), self.weight, float(self.rows), *self.hashes, float(_STYLES.index(self.style))]
        return [*header, *self.numbers, *[0.0] * (_MAX_NUMBERS - len(self.numbers))]

    @classmethod
    def decode(cls, row: list[float]) -> _Message:
        """Return the message that `encode` returned as floats."""
        failed, weight, rows, first_hash, second_hash, style, *numbers = row
        return cls(bool(failed), weight, int(rows), [first_hash, second_hash], _STYLES[int(style)], numbers)


def _evaluate_here(
    ranks: Ranks, evaluate: Callable[[], Evaluation], like: Tensor | None
) -> tuple[list[float], Tensor | None, Exception | None]:
    """Return the evaluation of this rank, and None; or no numbers, `like` and the exception that was raised."""
    try:
        numbers, vector = evaluate()
    except Exception as error:
        if ranks.wrapped:
            raise  # the other ranks wait in a collective of the wrapper
        return [], like, error
    return numbers, vector, None


def _check_messages(messages: Sequence[_Message], own_rank: int, label: str) -> None:
    """Raise an error if an evaluation failed, or if styles or kinds of closures differ between the ranks."""
    for rank, message in enumerate(messages):
        if message.failed:
            raise RanksError(
                f"rank {rank} failed to compute {label}: read its error. Rank {own_rank} and the other ranks have "
                "left their parameters unchanged."
            )
    styles = [message.style for message in messages]
    if len(set(styles)) > 1:
        described = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(styles))
        raise ArgumentError(
            f"the steps have different styles ({described}): on all ranks pass closures that return the loss, or "
            "closures that call backward(), or none."
        )
    weights = [message.weight for message in messages]
    if min(weights) < 0.0 < max(weights):
        raise ArgumentError(
            "closure is a sanc.Batch on some ranks and a plain function on others: pass the same kind on all ranks."
        )


def _require_equal_weights(weights: Sequence[float]) -> None:
    """Raise an error if batches that a wrapper of the model has averaged have different sizes."""
    if len(set(weights)) > 1:
        raise ArgumentError(
            f"the batches have {', '.join(f'{w:g}' for w in weights)} rows on the ranks, and the wrapper of the "
            "model averages their gradients with equal weights: pass batches of one size. With "
            "DistributedDataParallel you can also use the wrapped module in the closure."
        )


class AveragingOracle(AutogradOracle):
    """f, g and Hv of closures over leaf tensors that are the same on all ranks, which evaluate different batches.

    Attributes
    ----------
    ranks : Ranks
        The ranks that evaluate together.
    reduced : {"no", "maybe", "yes"} or None
        See `average`; None: it depends on whether closures call ``backward()``.
    """

    reduced: Reduced | None = None
    max_overflow_calls = 1  # all ranks call their closures equally often

    def __init__(self, ranks: Ranks, leaves: Leaves, **options: Any) -> None:
        self.ranks = ranks
        self._totals: dict[Sample, int] = {}
        super().__init__(leaves, **options)

    def unbind(self) -> None:
        super().unbind()
        self._totals = {}

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = (self._totals.get(sample, sample.size) for sample in self.samples)
        return g, h, f

    def mean(
        self, sample: Sample, label: str, evaluate: Callable[[], Evaluation], *, vector: bool = True
    ) -> Evaluation:
        """Return the mean over the ranks of the evaluations of a sample, and keep what their exchange shows."""
        reduced = self.reduced or ("no" if self.style == "loss" else "maybe")
        like = self.leaves.tensors[0].detach().new_zeros(self.leaves.dim, dtype=self.leaves.dtype) if vector else None
        options: dict[str, Any] = {"terms": sample.terms, "rows": sample.size, "reduced": reduced}
        options["style"] = lambda: self.style
        averaged = average(self.ranks, evaluate, label, like=like, **options)
        self._totals[sample] = averaged.rows
        self.ranks.wrapped = self.ranks.wrapped or averaged.wrapper_seen
        return averaged.numbers, averaged.vector

    def rows_elsewhere(self, sample: Sample) -> int:
        """Return the number of rows on the other ranks."""
        return self._totals[sample] - sample.size

    def evaluate(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        def local() -> Evaluation:
            return [self.evaluate_locally(x, sample, graph=graph)], None

        (value, _), _ = self.mean(sample, "a value", local, vector=False)
        self.meter.value += self.rows_elsewhere(sample)
        return value

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        first, sample = self.raw_loss is None, self.samples[0]

        def local() -> Evaluation:
            value, g = super(AveragingOracle, self).unread_gradient(x)
            assert self.raw_loss is not None
            return [float(value), float(self.raw_loss)], g

        (value, loss), g = self.mean(sample, "a gradient", local)
        if first:
            assert self.raw_loss is not None
            self.raw_loss = torch.full_like(self.raw_loss, loss)
        self.meter.gradient += self.rows_elsewhere(sample)
        assert g is not None
        return g.new_tensor(value, dtype=torch.float64), g

    def sample_gradient(self, x: Any, sample: Sample) -> Tensor:
        if sample is self.samples[0]:
            return super().sample_gradient(x, sample)  # a copy of the mean
        _, g = self.mean(sample, "a gradient", lambda: ([], super(AveragingOracle, self).sample_gradient(x, sample)))
        self.meter.gradient += self.rows_elsewhere(sample)
        assert g is not None
        return g

    def part_moments(self, x: Any, sample: Sample) -> PartMoments:
        """Return the moments of the parts of all ranks.

        If a wrapper of the model averages gradients, the parts of one position on all ranks together are one part.
        """
        if self.reduced is None and not self.style:
            self.evaluate(x, sample, graph=True)  # sets the style, on which exchanges depend
        local_moments: list[PartMoments] = []

        def local() -> Evaluation:
            local_moments.append(super(AveragingOracle, self).part_moments(x, sample))
            return [local_moments[0].value, local_moments[0].mean_square], local_moments[0].gradient

        (value, mean_square), g = self.mean(sample, "a gradient", local)
        self.meter.gradient += self.rows_elsewhere(sample)
        assert g is not None
        count = local_moments[0].count
        if self.reduced is None and not (self.style == "backward" and self.ranks.wrapped):
            received, _ = self.ranks.exchange([float(count)], "a gradient")
            count = int(sum(counts[0] for counts in received))
        return PartMoments(value, g, mean_square, count)

    def check(self, closure: Callable[[], None]) -> None:
        def local() -> Evaluation:
            closure()
            return [], None

        self.mean(self.samples[0], "the check of the closure", local, vector=False)

    def hessian(self, x: Any) -> Operator:
        return _AveragedHessian(self, super().hessian(x), self.samples[1])


class _AveragedHessian(Operator):
    """The mean of the Hessians of all ranks."""

    def __init__(self, oracle: AveragingOracle, local: Operator, sample: Sample) -> None:
        self._oracle, self._local, self._sample = oracle, local, sample

    def __call__(self, v: Any) -> Any:
        def local() -> Evaluation:
            return [], cast(Tensor, self._local(v))

        _, product = self._oracle.mean(self._sample, "a Hessian product", local)
        self._oracle.meter.product += self._oracle.rows_elsewhere(self._sample)
        return product

    def gradient(self) -> Any:
        return self._local.gradient()

    def error(self, v: Any, product: Any) -> float:
        def local() -> Evaluation:
            is_differenced = self._oracle.differenced_products
            return [self._local.error(v, self._local(v)) if is_differenced else 0.0], None

        (error, _), _ = self._oracle.mean(self._sample, "a Hessian product", local, vector=False)
        return error

    def release(self) -> None:
        self._local.release()
