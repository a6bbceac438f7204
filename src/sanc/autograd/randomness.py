"""Repeatable evaluations: the same random draws, and module buffers that keep their values.

A loss with dropout is a different function in every call, unless the random state is restored before the call. A
BatchNorm layer in training mode updates its running averages in every forward pass. Without this module f(x) and
f(x + s) would be values of two functions, and trial evaluations would count as training.

The random generators belong to the process, so only one thread at a time makes a step. Other threads may draw from them
during a step, for example to augment data. A step therefore writes to a generator only if its closures draw from it,
which it tests; see `StepRandomness`.

All oracles share one hook before the forward pass of modules; it notifies the `Buffers` of the thread that runs the
module.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sanc.autograd.guards import before_forward, is_traced


def derive(seed: int, *path: int) -> int:
    """Return a 63-bit seed that is a fixed function of `seed` and `path`."""
    text = ",".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


_STEP_GENERATOR = np.random.MT19937(0)
"""NumPy's global generator while closures draw from it; it is seeded before each evaluation."""
_GENERATORS_LOCK = threading.RLock()
"""Held by the thread whose step uses the global generators."""
_WATCH_FACTOR = 10.0
"""Time for which generators are watched for draws of other threads, in multiples of the time of an evaluation.

A thread that draws at the rate r is taken for the closure if it draws during an evaluation of time T, and not during
the time 10 T after it. The probability is (1 - exp(-rT)) exp(-10 rT), at most 0.035 for any r.
"""
_MAX_WATCH_SECONDS = 1.0
"""The longest time of watching, in seconds. A thread that draws less often is mistaken for the closure in one step; the
next step detects that the closure does not draw."""


class _Torch:
    """A generator of torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self.name = generator, f"torch {generator.device}"

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def state(self) -> Tensor:
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state)

    @staticmethod
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b)


class _NumPy:
    """NumPy's global generator: the object and its state."""

    name = "numpy"

    def seed(self, seed: int) -> None:
        np.random.set_bit_generator(_STEP_GENERATOR)  # type: ignore[attr-defined]  # np.random.seed needs MT19937
        np.random.seed(seed % 2**32)  # noqa: NPY002

    def state(self) -> Any:
        return np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]  # noqa: NPY002

    def restore(self, state: Any) -> None:
        np.random.set_bit_generator(state[0])  # type: ignore[attr-defined]
        np.random.set_state(state[1])  # noqa: NPY002

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a[0] is b[0] and _equal(a[1], b[1])


class _Python:
    """The generator of Python's `random`."""

    name = "python"

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return bool(a == b)


_Global = _Torch | _NumPy | _Python
States = dict[_Global, Any]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states of NumPy are equal: nested dicts of numbers and arrays."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def _generators(device: torch.device) -> list[_Global]:
    """Return the global generators that a closure on this device may draw from."""
    torchs = [torch.default_generator]
    if device.type == "cuda":
        torchs.append(torch.cuda.default_generators[device.index])
    return [*map(_Torch, torchs), _Python(), _NumPy()]


def _others_run() -> bool:
    """Return whether the process has other threads that run Python, which may draw random numbers."""
    return len(sys._current_frames()) > 1


def _drawn_by_others(states: States, seconds: float) -> set[_Global]:
    """Return the generators that change while this thread waits, for a multiple of the seconds of an evaluation."""
    seconds = min(_WATCH_FACTOR * seconds, _MAX_WATCH_SECONDS)
    drawn: set[_Global] = set()
    end = time.monotonic() + seconds
    while len(drawn) < len(states) and time.monotonic() < end:
        time.sleep(seconds / 10)
        drawn |= {generator for generator, state in states.items() if not generator.same(generator.state(), state)}
    return drawn


@dataclass
class Belief:
    """Whether closures draw from one generator, as far as earlier evaluations showed it.

    Attributes
    ----------
    draws : bool
        Whether closures draw from it.
    tried : set of str
        The kinds of evaluations in which this was tested.
    shared : bool
        Whether another thread has drawn from it.
    trusted, tests : int
        Number of evaluations during which another thread may draw before the next test, and number of tests that the
        closures passed. The first number doubles with each test.
    """

    draws: bool = False
    tried: set[str] = field(default_factory=set)
    shared: bool = False
    trusted: int = 0
    tests: int = 0

    def record_passed_test(self) -> None:
        """Record that a closure returned the same loss with other random numbers."""
        self.draws, self.shared = False, True
        self.trusted = 2**self.tests - 1
        self.tests += 1


class StepRandomness:
    """The global generators during a step: those that closures draw from are seeded before each evaluation.

    A generator that closures do not draw from is not written to, since its sequence may belong to other threads. If the
    process has no other threads, all generators are seeded.
    """

    def __init__(self, device: torch.device, beliefs: dict[str, Belief], *, repeats: bool) -> None:
        self._generators = _generators(device)
        self._beliefs = {g: beliefs.setdefault(g.name, Belief()) for g in self._generators}
        self._all = not repeats or not _others_run()
        self._saved: States = {g: g.state() for g in self._generators if self._all or self._beliefs[g].draws}
        self._drawn: set[_Global] = set()

    @property
    def seeds_all(self) -> bool:
        """Whether all generators are seeded before each evaluation."""
        return self._all

    def seed(self, seed: int) -> None:
        """Seed the generators that closures draw from."""
        for generator in self._saved:
            generator.seed(seed)

    def end(self) -> None:
        """Restore the generators that the step has seeded."""
        for generator, state in self._saved.items():
            generator.restore(state)
            if not self._all and generator not in self._drawn:
                self._beliefs[generator].draws = False  # no evaluation of this step drew from it

    def call(self, unit: Callable[[], _Result], undo: Callable[[], None], seed: int, kind: str) -> _Result:
        """Return the result of a function, a tuple whose first entry is a loss; call it again if it draws unseeded.

        `undo` is called before it is called again. `kind` names what the function evaluates: draws are tested once for
        each kind.
        """
        not_seeded = [g for g in self._generators if g not in self._saved]
        untested = {g for g in not_seeded if kind not in self._beliefs[g].tried}
        for g in self._generators:
            self._beliefs[g].tried.add(kind)
        # Another thread would draw the same numbers again from a generator that is seeded with this seed twice.
        seedable = [g for g in not_seeded if g in untested and not self._beliefs[g].shared]
        if seedable:
            return self._test_draws(unit, undo, seed, seedable, {})
        before = {g: g.state() for g in self._generators}
        started = time.monotonic()
        try:
            result = unit()
        except BaseException:
            restore_own({g: before[g] for g in not_seeded}, time.monotonic() - started)
            raise
        changed = [g for g in self._generators if not g.same(g.state(), before[g])]
        self._drawn.update(g for g in changed if g in self._saved)
        changed = [g for g in changed if g in not_seeded]
        tested = [g for g in changed if g in untested or not self._beliefs[g].trusted]
        for g in changed:
            self._beliefs[g].trusted = max(0, self._beliefs[g].trusted - 1)
        if not tested:
            return result
        undo()
        for g in self._saved:
            g.restore(before[g])
        if all(self._beliefs[g].shared for g in tested):
            return self._compare(unit, undo, seed, tested, result, before)
        return self._test_draws(unit, undo, seed, tested, before)

    def _test_draws(
        self, unit: Callable[[], _Result], undo: Callable[[], None], seed: int, tested: list[_Global], earlier: States
    ) -> _Result:
        """Return the result with these generators seeded, and test whether the function draws from them.

        `earlier` are the states to restore at the end of the step.
        """
        unseeded, seeded, after = {}, {}, {}
        states_of_seeded = {g: g.state() for g in self._saved}
        started = time.monotonic()
        for g in tested:  # one after the other: another thread that draws in between would draw the same number again
            unseeded[g] = g.state()
            g.seed(seed)
            seeded[g] = g.state()
        try:
            result = unit()
        finally:
            for g in tested:
                after[g] = g.state()
                g.restore(unseeded[g])
        after = {g: state for g, state in after.items() if not g.same(state, seeded[g])}
        self._drawn.update(g for g in states_of_seeded if not g.same(g.state(), states_of_seeded[g]))
        for g in tested:
            self._beliefs[g].draws = g in after
        others = _drawn_by_others({g: unseeded[g] for g in after}, time.monotonic() - started) if after else set()
        for g, state in after.items():
            if g not in others:  # only the function can have changed it
                self._seed_from_now_on(g, earlier.get(g, unseeded[g]))
                g.restore(state)
        if not others:
            return result
        undo()
        for g, state in states_of_seeded.items():
            g.restore(state)
        for g in after:
            if g not in others:
                g.restore(seeded[g])
        return self._compare(unit, undo, seed, [g for g in after if g in others], result, earlier)

    def _compare(
        self,
        unit: Callable[[], _Result],
        undo: Callable[[], None],
        seed: int,
        tested: list[_Global],
        first: _Result,
        earlier: States,
    ) -> _Result:
        """Call the function once more while other threads draw from these generators, and compare the losses.

        If they are equal in every bit, the function does not draw from them, or its draws do not matter. Otherwise
        these generators are seeded.
        """
        states_of_seeded, before = {g: g.state() for g in self._saved}, {g: g.state() for g in tested}
        result = unit()
        if torch.equal(first[0].detach().nan_to_num(), result[0].detach().nan_to_num()):
            for g in tested:
                self._beliefs[g].record_passed_test()
            return result
        undo()
        for g, state in states_of_seeded.items():
            g.restore(state)
        for g in tested:
            self._beliefs[g].draws = True
            self._seed_from_now_on(g, earlier.get(g, before[g]))
            g.seed(seed)
        return unit()

    def _seed_from_now_on(self, generator: _Global, state: Any) -> None:
        """Seed this generator from now on, and restore the state at the end of the step."""
        self._saved[generator] = state
        self._drawn.add(generator)


_Result = TypeVar("_Result", bound=tuple[Any, ...])


class _ActiveSteps(threading.local):
    """The steps that this thread makes, innermost last."""

    def __init__(self) -> None:
        self.stack: list[StepRandomness] = []


_STEPS = _ActiveSteps()


def current_step() -> StepRandomness | None:
    """Return the randomness of the step that this thread makes; None if it makes none."""
    return _STEPS.stack[-1] if _STEPS.stack else None


@contextmanager
def own_randomness(device: torch.device, beliefs: dict[str, Belief], *, repeats: bool) -> Iterator[None]:
    """Seed the generators that closures draw from before each evaluation, and restore them at the end of the block.

    Other threads wait for its end before they enter such a block. `beliefs` are the results of earlier steps by
    generator. `repeats` is whether a closure may be called again to test whether it draws; if not, all generators are
    seeded.
    """
    with _GENERATORS_LOCK:
        step = StepRandomness(device, beliefs, repeats=repeats)
        _STEPS.stack.append(step)
        try:
            yield
        finally:
            _STEPS.stack.pop()
            step.end()


def restore_own(before: States, seconds: float) -> bool:
    """Restore the generators that this thread has changed since `before`, and return whether there are any.

    Those that other threads draw from are not restored.
    """
    now = {g: g.state() for g, state in before.items() if not g.same(g.state(), state)}
    others = _drawn_by_others(now, seconds) if now and _others_run() else set()
    for g in now:
        if g not in others:
            g.restore(before[g])
    return len(now) > len(others)


class Undone:
    """Context that restores the global generators if its block draws; `draws` is whether it did."""

    draws = False

    def __init__(self, device: torch.device) -> None:
        self._generators = _generators(device)

    def __enter__(self) -> Undone:
        _GENERATORS_LOCK.acquire()
        self._before = {g: g.state() for g in self._generators}
        self._started = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.draws = restore_own(self._before, time.monotonic() - self._started)
        finally:
            _GENERATORS_LOCK.release()


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    for generator in _generators(device):
        generator.seed(seed)


class _ActiveBuffers(threading.local):
    """The `Buffers` whose blocks this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Buffers] = []


_ACTIVE = _ActiveBuffers()


def _before_forward(module: nn.Module, _: object) -> None:
    """Notify the `Buffers` of this thread that a module is about to run; compiled code skips this."""
    if not is_traced():
        for buffers in _ACTIVE.stack:
            buffers.save(module)


class _Hook:
    """Context in which a hook runs before the forward pass of every module.

    The hook slows small modules down, so the last block that ends removes it. If `stays` is set, it remains: torch
    would recompile a compiled model for every new hook.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._handle: RemovableHandle | None = None
        self.stays = False

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._handle is None:
                self._handle = before_forward(_before_forward)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and not self.stays and self._handle is not None:
                self._handle.remove()
                self._handle = None


HOOK = _Hook()


class Buffers:
    """Context that copies the buffers of modules in training mode before they run.

    It copies the buffers of each module that the hook reports, and of its submodules, which compiled code may run
    without the hook. It also copies those of `earlier_owners`, which compiled code may run as a whole.

    Attributes
    ----------
    owners : list of Module
        Modules with buffers, in training mode or not.
    calls : int
        Number of calls of modules that the hook reported. It is smaller than usual if compiled code runs some of them.
    """

    def __init__(self, earlier_owners: Iterable[nn.Module] = ()) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}
        self._visited: set[int] = set()
        self._earlier_owners = list(earlier_owners)
        self.owners: list[nn.Module] = []
        self.calls = 0

    def __enter__(self) -> Buffers:
        for module in self._earlier_owners:
            self._copy(module)
        HOOK.__enter__()
        _ACTIVE.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _ACTIVE.stack.remove(self)
        HOOK.__exit__()

    def save(self, module: nn.Module) -> None:
        """Copy the buffers of a module and its submodules before its first call."""
        self.calls += 1
        if id(module) not in self._visited:
            for part in module.modules():
                self._visited.add(id(part))
                self._copy(part)

    def _copy(self, module: nn.Module) -> None:
        """Copy the buffers of a module in training mode, without those of its submodules."""
        has_buffers = False
        for name, buffer in module.named_buffers(recurse=False):
            has_buffers = True
            if module.training and (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())
        if has_buffers:
            self.owners.append(module)

    def put_back(self) -> None:
        """Restore the values of all copied buffers."""
        for module, name, buffer, values in self._saved.values():
            # .data does not raise the version of the buffer, so autograd accepts a graph that is kept for more
            # products. Fused kernels update buffers without a new version, too.
            buffer.data.copy_(values)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


class StillBuffers(Buffers):
    """Restores the buffers of modules in training mode at the end of the block."""

    def __exit__(self, *exception: object) -> None:
        try:
            self.put_back()
        finally:
            super().__exit__(*exception)


class Repeated(Buffers):
    """Buffers around a call that may be repeated: `put_back` also resets the counts of the blocks around it."""

    def __enter__(self) -> Repeated:
        self._counts = [(buffers, buffers.calls) for buffers in _ACTIVE.stack]
        super().__enter__()
        return self

    def put_back(self) -> None:
        super().put_back()
        for buffers, calls in self._counts:
            buffers.calls = calls


class InEvaluation(StillBuffers):
    """Switches every module that runs inside the block to evaluation mode until its end."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[nn.Module] = []

    def save(self, module: nn.Module) -> None:
        super().save(module)
        for part in module.modules():
            if part.training:
                self._trained.append(part)
                part.training = False

    def __exit__(self, *exception: object) -> None:
        for module in self._trained:
            module.training = True
        super().__exit__(*exception)
