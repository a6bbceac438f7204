"""Repeatable evaluations: every evaluation of a sample has the same random draws.

A loss with dropout is a different function in every call, unless the random state is restored before the call. Without
this module f(x) and f(x + s) would be values of two functions.

The random generators belong to the process, so only one thread at a time makes a step. Other threads may draw from them
during a step, for example to augment data. A step therefore writes to a generator only if its closures draw from it,
which it tests; see `StepRandomness`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from sanc.autograd.generators import Generator, States, global_generators

_GENERATORS_LOCK = threading.RLock()
"""Held by the thread whose step uses the global generators."""
_WATCH_FACTOR = 10.0
"""Time for which generators are watched for draws of other threads, in multiples of the time of an evaluation.

A thread that draws at the rate r is mistaken for the closure if it draws during an evaluation of time T, and not during
the time 10 T after it. The probability is (1 - exp(-rT)) exp(-10 rT), at most 0.035 for any r.
"""
_MAX_WATCH_SECONDS = 1.0
"""The longest time of watching, in seconds. A thread that draws less often is mistaken for the closure in one step; the
next step detects that the closure does not draw."""

_Result = TypeVar("_Result", bound=tuple[Any, ...])


def _has_other_threads() -> bool:
    """Return whether the process has other threads that run Python, which may draw random numbers."""
    return len(sys._current_frames()) > 1


def _states(generators: Iterable[Generator]) -> States:
    """Return the states of generators."""
    return {generator: generator.state() for generator in generators}


def _restore(states: States) -> None:
    """Restore the states of generators."""
    for generator, state in states.items():
        generator.restore(state)


def _changed_since(states: States) -> set[Generator]:
    """Return the generators that were drawn from since they had these states."""
    return {generator for generator, state in states.items() if not generator.is_same(generator.state(), state)}


def _drawn_by_others(states: States, evaluation_seconds: float) -> set[Generator]:
    """Return the generators that change while this thread waits, for a multiple of the time of an evaluation."""
    seconds = min(_WATCH_FACTOR * evaluation_seconds, _MAX_WATCH_SECONDS)
    drawn: set[Generator] = set()
    end = time.monotonic() + seconds
    while len(drawn) < len(states) and time.monotonic() < end:
        time.sleep(seconds / 10)
        drawn |= _changed_since(states)
    return drawn


@dataclass
class DrawTests:
    """The results of tests whether closures draw from one generator.

    Attributes
    ----------
    draws : bool
        Whether closures draw from it.
    tested_kinds : set of str
        The kinds of evaluations in which this was tested.
    shared : bool
        Whether another thread has drawn from it.
    evaluations_to_next : int
        Number of evaluations during which another thread may draw before the next test.
    passed : int
        Number of tests that the closures passed. The interval between tests doubles with each of them.
    """

    draws: bool = False
    tested_kinds: set[str] = field(default_factory=set)
    shared: bool = False
    evaluations_to_next: int = 0
    passed: int = 0

    def record_passed(self) -> None:
        """Record that a closure returned the same loss with other random numbers."""
        self.draws, self.shared = False, True
        self.evaluations_to_next = 2**self.passed - 1
        self.passed += 1


@dataclass(frozen=True)
class _Evaluation(Generic[_Result]):
    """An evaluation of a closure that may have to be repeated.

    Attributes
    ----------
    call : callable
        Evaluates the closure, and returns a tuple whose first entry is the loss.
    undo : callable
        Restores what the closure changed, before `call` is called again.
    seed : int
        The seed of its random draws.
    """

    call: Callable[[], _Result]
    undo: Callable[[], None]
    seed: int


class StepRandomness:
    """The global generators during a step: those that closures draw from are seeded before each evaluation.

    A generator that closures do not draw from is not written to, since its sequence may belong to other threads. If the
    process has no other threads, all generators are seeded.

    Whether a closure draws from a generator is tested at the first evaluation of each kind, and again when its state
    changed for an unknown reason. First the generator is seeded: if its state changes and no other thread draws
    afterwards, the closure draws (`_test_seeded`). If other threads draw, the closure is called twice, and draws if the
    losses differ (`_test_twice`).

    Attributes
    ----------
    seeds_all : bool
        Whether all generators are seeded before each evaluation.
    """

    def __init__(self, device: torch.device, tests: dict[str, DrawTests], *, repeats: bool) -> None:
        self._generators = global_generators(device)
        self._tests = {g: tests.setdefault(g.name, DrawTests()) for g in self._generators}
        self.seeds_all = not repeats or not _has_other_threads()
        # The generators that are seeded, with the states to restore at the end of the step.
        self._seeded = _states(g for g in self._generators if self.seeds_all or self._tests[g].draws)
        self._drawn: set[Generator] = set()

    def seed(self, seed: int) -> None:
        """Seed the generators that closures draw from."""
        for generator in self._seeded:
            generator.seed(seed)

    def end(self) -> None:
        """Restore the generators that the step has seeded."""
        _restore(self._seeded)
        if not self.seeds_all:
            for generator in self._seeded.keys() - self._drawn:
                self._tests[generator].draws = False  # no evaluation of this step drew from it

    def call(self, function: Callable[[], _Result], undo: Callable[[], None], seed: int, kind: str) -> _Result:
        """Return the result of a function, a tuple whose first entry is a loss; call it again if it draws unseeded.

        `undo` is called before it is called again. `kind` names what the function evaluates: draws are tested once for
        each kind.
        """
        evaluation = _Evaluation(function, undo, seed)
        not_seeded = [g for g in self._generators if g not in self._seeded]
        new_generators = {g for g in not_seeded if kind not in self._tests[g].tested_kinds}
        for g in self._generators:
            self._tests[g].tested_kinds.add(kind)
        # Another thread would draw the same numbers again from a generator that is seeded with this seed twice.
        seedable = [g for g in not_seeded if g in new_generators and not self._tests[g].shared]
        if seedable:
            return self._test_seeded(evaluation, seedable, {})
        before = _states(self._generators)
        result = _call_undrawn_on_error(function, {g: before[g] for g in not_seeded})
        changed = _changed_since(before)
        self._drawn |= changed & self._seeded.keys()
        unexplained = [g for g in not_seeded if g in changed and (g in new_generators or self._is_due(g))]
        self._count_disturbed(changed.difference(self._seeded))
        if not unexplained:
            return result
        undo()
        _restore({g: before[g] for g in self._seeded})
        if all(self._tests[g].shared for g in unexplained):
            return self._test_twice(evaluation, unexplained, result, before)
        return self._test_seeded(evaluation, unexplained, before)

    def _is_due(self, generator: Generator) -> bool:
        """Return whether the next draw from a generator is tested."""
        return self._tests[generator].evaluations_to_next == 0

    def _count_disturbed(self, generators: Iterable[Generator]) -> None:
        """Count an evaluation during which these generators were drawn from."""
        for g in generators:
            self._tests[g].evaluations_to_next = max(0, self._tests[g].evaluations_to_next - 1)

    def _test_seeded(self, evaluation: _Evaluation[_Result], tested: list[Generator], earlier: States) -> _Result:
        """Return the result with these generators seeded, and test whether the function draws from them.

        `earlier` are the states to restore at the end of the step.
        """
        states_of_seeded = _states(self._seeded)
        unseeded, seeded, after = {}, {}, {}
        started = time.monotonic()
        for g in tested:  # one after the other: another thread that draws in between would draw the same number again
            unseeded[g] = g.state()
            g.seed(evaluation.seed)
            seeded[g] = g.state()
        try:
            result = evaluation.call()
        finally:
            for g in tested:
                after[g] = g.state()
                g.restore(unseeded[g])
        drawn = [g for g in tested if not g.is_same(after[g], seeded[g])]
        self._drawn |= _changed_since(states_of_seeded)
        for g in tested:
            self._tests[g].draws = g in drawn
        watched = {g: unseeded[g] for g in drawn}
        others = _drawn_by_others(watched, time.monotonic() - started) if drawn else set()
        by_function = [g for g in drawn if g not in others]  # only the function can have changed these
        for g in by_function:
            self._seed_from_now_on(g, earlier.get(g, unseeded[g]))
            g.restore(after[g])
        if not others:
            return result
        evaluation.undo()
        _restore(states_of_seeded | {g: seeded[g] for g in by_function})
        return self._test_twice(evaluation, [g for g in drawn if g in others], result, earlier)

    def _test_twice(
        self, evaluation: _Evaluation[_Result], tested: list[Generator], first: _Result, earlier: States
    ) -> _Result:
        """Call the function once more while other threads draw from these generators, and compare the losses.

        If they are equal in every bit, the function does not draw from them, or its draws do not matter. Otherwise
        these generators are seeded.
        """
        states_of_seeded, before = _states(self._seeded), _states(tested)
        result = evaluation.call()
        if torch.equal(first[0].detach().nan_to_num(), result[0].detach().nan_to_num()):
            for g in tested:
                self._tests[g].record_passed()
            return result
        evaluation.undo()
        _restore(states_of_seeded)
        for g in tested:
            self._tests[g].draws = True
            self._seed_from_now_on(g, earlier.get(g, before[g]))
            g.seed(evaluation.seed)
        return evaluation.call()

    def _seed_from_now_on(self, generator: Generator, state: Any) -> None:
        """Seed this generator from now on, and restore the state at the end of the step."""
        self._seeded[generator] = state
        self._drawn.add(generator)


def _call_undrawn_on_error(function: Callable[[], _Result], states: States) -> _Result:
    """Return the result of a function; if it raises, undo its draws from the generators that had these states."""
    started = time.monotonic()
    try:
        return function()
    except BaseException:
        _undo_draws(states, time.monotonic() - started)
        raise


def _undo_draws(before: States, evaluation_seconds: float) -> bool:
    """Restore the generators that this thread has changed since `before`, and return whether there are any.

    Those that other threads draw from are not restored.
    """
    now = _states(_changed_since(before))
    others = _drawn_by_others(now, evaluation_seconds) if now and _has_other_threads() else set()
    _restore({g: before[g] for g in now if g not in others})
    return len(now) > len(others)


class _StepStack(threading.local):
    """The steps that this thread makes, innermost last."""

    def __init__(self) -> None:
        self.steps: list[StepRandomness] = []


_STACK = _StepStack()


def current_step() -> StepRandomness | None:
    """Return the randomness of the step that this thread makes; None if it makes none."""
    return _STACK.steps[-1] if _STACK.steps else None


@contextmanager
def repeatable_draws(device: torch.device, tests: dict[str, DrawTests], *, repeats: bool) -> Iterator[None]:
    """Seed the generators that closures draw from before each evaluation, and restore them at the end of the block.

    Other threads wait for its end before they enter such a block. `tests` are the results of earlier steps by name of
    the generator. `repeats` is whether a closure may be called again to test whether it draws; if not, all generators
    are seeded.
    """
    with _GENERATORS_LOCK:
        step = StepRandomness(device, tests, repeats=repeats)
        _STACK.steps.append(step)
        try:
            yield
        finally:
            _STACK.steps.pop()
            step.end()


class UndoneDraws:
    """Context that restores the global generators if its block draws.

    Attributes
    ----------
    draws : bool
        Whether the block drew.
    """

    draws = False

    def __init__(self, device: torch.device) -> None:
        self._generators = global_generators(device)

    def __enter__(self) -> UndoneDraws:
        _GENERATORS_LOCK.acquire()
        self._before = _states(self._generators)
        self._started = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.draws = _undo_draws(self._before, time.monotonic() - self._started)
        finally:
            _GENERATORS_LOCK.release()
