"""Ctrl-C at any line of a step: either the step was made as a whole, or nothing has changed."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import sanc
from sanc.core import interrupts
from tensors import flat


def at_line(number, call):
    """Call with a Ctrl-C at the n-th line of ours that is run; True where there were so many."""
    count = 0

    def watch(frame, event, _):
        nonlocal count
        if "sanc" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return watch

    sys.settrace(watch)
    try:
        call()
    finally:
        sys.settrace(None)
    return count >= number


def trained(style, kind, preset, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    opt = kind(model.parameters(), preset=preset, seed=1, check=False)
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 1).double()) for _ in range(steps + 2)]

    def step(k):
        a, b = batches[k]

        def loss():
            return (model(a) - b).square().mean()

        def backward():
            opt.zero_grad()
            value = loss()
            value.backward()
            return value

        if style != "gradients":
            opt.step(loss if style == "loss" else backward)
            return
        opt.train()
        if any(p.grad is not None for p in model.parameters()):
            opt.step()

    def pass_before(k):
        if style == "gradients":
            opt.train()
            opt.zero_grad()
            torch.manual_seed(k)
            (model(batches[k][0]) - batches[k][1]).square().mean().backward()

    for k in range(steps):
        pass_before(k)
        step(k)
    pass_before(steps)
    return model, opt, lambda: step(steps), lambda: (pass_before(steps + 1), step(steps + 1))


def snapshot(model, opt):
    numbers = {
        k: v for k, v in opt.state_dict()["run_state"]["numbers"].items() if k not in ("seconds", "second_order")
    }
    return [*(value.clone() for value in model.state_dict().values()), torch.get_rng_state()], repr(numbers)


def equal(one, other):
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.fixture(autouse=True)
def pythons_handler():
    """A job in the background of a shell ignores Ctrl-C, and so would its tests."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


CASES = [
    ("loss", sanc.SANC, "robust", 2),
    ("loss", sanc.SANC, "robust", 12),
    ("backward", sanc.SCR, "robust", 12),
    ("gradients", sanc.SANC, "robust", 4),
    ("loss", sanc.SANC, "paper", 2),
    ("loss", sanc.CRM, "paper", 2),
]


def sweep(style, kind, preset, steps, stride, first=1):
    """Interrupt a step at every so many lines; return how many were tried and what was neither whole nor undone."""
    model, opt, step, after = trained(style, kind, preset, steps)
    before = snapshot(model, opt)
    step()
    done = snapshot(model, opt)
    after()
    later = flat(model)
    tried, bad, line = 0, [], first
    hooks = len(torch_module._global_forward_pre_hooks)
    while True:
        model, opt, step, after = trained(style, kind, preset, steps)
        interrupted, reached = False, True
        try:
            reached = at_line(line, step)
        except KeyboardInterrupt:
            interrupted = True
        if not reached:
            return tried, bad
        now = snapshot(model, opt)
        if equal(now, before) and not equal(now, done):
            step()
        ok = interrupted and equal(snapshot(model, opt), done)
        after()
        if not (ok and torch.equal(flat(model), later)) or len(torch_module._global_forward_pre_hooks) != hooks:
            bad.append(line)
        tried += 1
        line += stride


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
@pytest.mark.parametrize(("style", "kind", "preset", "steps"), CASES)
def test_ctrl_c_makes_a_step_whole_or_not_at_all(style, kind, preset, steps):
    tried, bad = sweep(style, kind, preset, steps, stride=397)
    assert tried > 2 and not bad


def test_a_handler_that_an_interrupt_left_behind_is_not_taken_for_the_callers(monkeypatch):
    """Between any two lines a Ctrl-C may come, also between those that clean up after one."""
    monkeypatch.setattr(interrupts, "_caller_handler", signal.default_int_handler)
    test_the_callers_handler_answers_and_stays()
    held = interrupts.uninterrupted(lambda: signal.getsignal(signal.SIGINT))
    assert held() is interrupts._defer


def test_a_step_inside_the_closure_of_another_one():
    """The caller's handler answers in both closures and after each step."""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    outer, inner = sanc.SANC([p], preset="paper"), sanc.SANC([q], preset="paper")
    heard = []
    kept = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)

        def loss():
            assert signal.getsignal(signal.SIGINT) is mine
            return (q**2).sum()

        def closure():
            with torch.enable_grad():
                inner.step(loss)
            assert signal.getsignal(signal.SIGINT) is mine
            before = len(heard)
            signal.raise_signal(signal.SIGINT)
            assert len(heard) == before + 1
            return (p**2).sum()

        for _ in range(2):
            outer.step(closure)
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, kept)


def test_the_callers_handler_answers_and_stays():
    p = nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p], preset="paper")
    heard = []
    kept = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)

        def closure():
            assert signal.getsignal(signal.SIGINT) is mine
            signal.raise_signal(signal.SIGINT)
            assert heard
            return (p**2).sum()

        opt.step(closure)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, kept)


def test_other_threads_step_as_before():
    p = nn.Parameter(torch.ones(2))
    opt = sanc.SANC([p], preset="paper")
    thread = threading.Thread(target=lambda: opt.step(lambda: (p**2).sum()))
    thread.start()
    thread.join()
    assert opt.record is not None
