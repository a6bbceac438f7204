"""Which exact Hessian product is the fastest here: measured once for a loss, on the model and the batch themselves."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sanc.oracles.base import Meter
from sanc.oracles.factors import nodes
from sanc.oracles.products import OPERATORS, HvpMode
from sanc.oracles.replay import HostDrawsError, own_randomness, still_buffers
from sanc.vectors import Vector

if TYPE_CHECKING:
    from sanc.oracles.autograd import AutogradOracle
    from sanc.oracles.layout import Sample

REFERENCE: HvpMode = "double-backward"
CANDIDATES: tuple[HvpMode, ...] = ("linearised", "forward-over-reverse")
"""What the reference is compared with."""

SMALL = 2**20
"""On a CPU a loss that saves fewer numbers than this for its gradient is not measured: to load torch's forward mode
alone takes a second or two, which products of milliseconds never bring back."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative difference from the reference above which a product is taken for wrong. Two right ones differ by the
rounding of sums of many terms, 1e-13 and 1e-5 in deep networks; a missing term of a derivative is worth per cents."""
_FEW, _LIGHT = 4, 3.0
"""The measurement holds ten vectors, more than a step of fewer products than this does: then only a loss is measured
whose activations, with its parameters, are more than so many vectors."""
_ROUNDING = 10.0  # times what the reference itself is off: TF32 and autocast round more than the type says
_LOOSEST = 0.05
_MARGIN = 0.98  # the reference stays where nothing is faster by more, so that near-ties fall the same way every time
_HOPELESS = 1.5  # times the fastest later product in the first turn
_SECONDS, _LEAST, _ROUNDS = 3.0, 5, 15  # turns until the time is up and they agree, but so many at least and at most

_chosen: dict[tuple[Any, ...], HvpMode] = {}
_clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the first product of an operator, which builds what the others share, and of a later one."""

    first: float
    later: float

    def of(self, products: int) -> float:
        return self.first + (products - 1) * self.later


def fastest(oracle: AutogradOracle, x: Vector, sample: Sample, *, shared: bool) -> HvpMode | None:
    """Choose how products of a sample's loss are made.

    Parameters
    ----------
    oracle : AutogradOracle
        Evaluates the loss; its meter, the buffers and the random states are left as they were.
    x : vector
        Where to measure.
    sample : Sample
        The Hessian's sample.
    shared : bool
        Whether the graph that the reference differentiates comes with the gradient, and costs nothing beside it.

    Returns
    -------
    str or None
        The mode; None where products are not finite, so that nothing can be compared.
    """
    with _unnoticed(oracle):
        described, numbers = _describe(oracle, x, sample)
        if oracle.device.type == "cpu" and numbers < SMALL:
            return REFERENCE
        if oracle.expected < _FEW and numbers < _LIGHT * oracle.layout.dim:
            return REFERENCE
        where = (str(oracle.device), x.dtype, torch.get_num_threads())
        key = (where, described, len(sample.parts), shared, oracle.expected)
        if key not in _chosen:
            mode = _measured(oracle, x, sample, shared)
            if mode is None:
                return None
            _chosen[key] = mode
        return _chosen[key]


@contextmanager
def _unnoticed(oracle: AutogradOracle) -> Iterator[None]:
    """Leave no trace of what is evaluated inside the block."""
    meter, oracle.meter = oracle.meter, Meter()
    try:
        with own_randomness(oracle.device), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        oracle.meter = meter
        oracle.stop_looking()


def _describe(oracle: AutogradOracle, x: Vector, sample: Sample) -> tuple[tuple[Any, ...], int]:
    """Return what tells a loss from others, its operators and the shapes they work on, and how much it saves."""
    shapes: list[tuple[Any, ...]] = []
    numbers = 0

    held: list[Tensor] = []  # let go of at the end: an operation that saves its own result holds itself by it

    def note(tensor: Tensor) -> int:
        nonlocal numbers
        numbers += tensor.numel()
        shapes.append((tuple(tensor.shape), tensor.dtype))
        held.append(tensor)
        return len(held) - 1

    oracle.load(x)
    oracle.rewind(sample)
    with still_buffers(), torch.autograd.graph.saved_tensors_hooks(note, held.__getitem__):
        loss = oracle.call(sample.parts[0][1], sample)
    leaves = tuple(tuple(leaf.shape) for leaf in oracle.layout.leaves)
    described = (leaves, tuple(shapes), _operators(loss))
    held.clear()
    return described, numbers * len(sample.parts)


def _operators(loss: Tensor) -> tuple[Any, ...]:
    """Name the nodes of a graph in a fixed order; a function of the caller's own stands for itself."""
    return tuple(getattr(node, "_forward_cls", None) or node.name() for node in nodes(loss.grad_fn))


def _measured(oracle: AutogradOracle, x: Vector, sample: Sample, shared: bool) -> HvpMode | None:
    """Time the candidates that are right, in turns, and name the fastest."""
    end = _clock() + _SECONDS
    stand = _Stand(oracle, x, sample)
    right = stand.products(REFERENCE, 3)
    if not all(oracle.space.finite(product) for product in right):
        return None
    off = stand.difference(right.pop(), right[0] + right[1])
    tolerance = min(max(TOLERANCE[x.dtype], _ROUNDING * off), _LOOSEST)
    for mode in CANDIDATES:
        try:
            agrees = stand.worst(stand.products(mode), right) <= tolerance
        except HostDrawsError:
            raise
        except Exception:  # whatever else it is, this one cannot be used
            agrees = False
        if not agrees:
            stand.times.pop(mode, None)
    limit = _HOPELESS * min(known.later for known in stand.times.values())
    hopeful = [mode for mode, known in stand.times.items() if mode == REFERENCE or known.later <= limit]
    shares: dict[HvpMode, list[float]] = {mode: [] for mode in hopeful}
    for turn in range(_ROUNDS if len(hopeful) > 1 else 0):
        if turn >= _LEAST and _clock() > end and all(map(_settled, shares.values())):
            break
        gradient = stand.gradient() if shared else 0.0
        for mode in hopeful:
            stand.products(mode)
        costs = {mode: stand.times[mode].of(oracle.expected) for mode in hopeful}
        costs[REFERENCE] = max(costs[REFERENCE] - gradient, 0.0)
        for mode, cost in costs.items():  # within a turn, so that a machine that slows down slows all of them
            shares[mode].append(cost / costs[REFERENCE] if costs[REFERENCE] > 0.0 else math.inf)
    best = min(hopeful, key=lambda mode: statistics.median(shares[mode] or [1.0]))
    return best if shares[best] and statistics.median(shares[best]) < _MARGIN else REFERENCE


def _settled(shares: list[float]) -> bool:
    """Whether nearly all turns say the same of a mode."""
    faster = sum(share < _MARGIN for share in shares)
    return not len(shares) < 5 * faster < 4 * len(shares)


class _Stand:
    """Makes products by any mode, always the same ones, and keeps the last times."""

    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        self._oracle, self._x, self._sample = oracle, x, sample
        rng = np.random.default_rng(0)
        u, v = oracle.space.normal(rng), oracle.space.normal(rng)
        self._directions = (u, v)
        self.times: dict[HvpMode, _Times] = {}

    def products(self, mode: HvpMode, count: int = 2) -> list[Vector]:
        """Make the first of the products with a new operator: so many, or one where the first is like the others."""
        operator = OPERATORS[mode](self._oracle, self._x, self._sample)
        u, v = self._directions
        directions: list[Callable[[], Vector]] = [lambda: u, lambda: v, lambda: u + v]  # the last while it is needed
        try:
            timed = [self._timed(operator, w()) for w in directions[: count if operator.builds else 1]]
        finally:
            operator.release()
        self.times[mode] = _Times(timed[0][1], min(seconds for _, seconds in timed[-count + 1 :]))
        return [product for product, _ in timed]

    def gradient(self) -> float:
        """Seconds of a gradient."""
        operator = OPERATORS[REFERENCE](self._oracle, self._x, self._sample)
        with still_buffers():
            return self._timed(operator.first_order)[1]

    def worst(self, products: list[Vector], right: list[Vector]) -> float:
        """Return the largest difference of products from the right ones; there may be fewer of them."""
        differences = [self.difference(a, b) for a, b in zip(products, right, strict=False)]
        return max(differences, key=lambda off: math.inf if math.isnan(off) else off)

    def difference(self, product: Vector, right: Vector) -> float:
        """‖product − right‖ / ‖right‖; 0 where both vanish."""
        space = self._oracle.space
        off, norm = space.norm(product - right), space.norm(right)
        return 0.0 if off == 0.0 else off / norm if norm > 0.0 else math.inf

    def _timed(self, call: Callable[..., Vector], *given: Vector) -> tuple[Vector, float]:
        self._wait()
        start = _clock()
        answer = call(*given)
        self._wait()
        return answer, _clock() - start

    def _wait(self) -> None:
        if self._oracle.device.type == "cuda":
            torch.cuda.synchronize(self._oracle.device)
