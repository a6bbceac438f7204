"""State of other libraries that belongs to another object of the process is no concern of an optimiser."""

from __future__ import annotations

import re
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import sanc
from sanc.autograd import guards
from sanc.autograd.buffers import RestoredBuffers
from sanc.autograd.precision import callers_precision, full_precision

CPU = torch.device("cpu")
WRAPPER = """
class AcceleratedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)
"""


@pytest.fixture
def prepare(monkeypatch):
    """Return a stand-in for `Accelerator(gradient_accumulation_steps=4).prepare`, with accelerate's module names."""
    state, wrappers = types.ModuleType("accelerate.state"), types.ModuleType("accelerate.optimizer")
    state.GradientState = lambda: types.SimpleNamespace(num_steps=4)
    exec(WRAPPER, vars(wrappers))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", wrappers)
    return wrappers.AcceleratedOptimizer


def problem(seed=0):
    weights = torch.randn(3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return weights, sanc.SANC([weights], seed=0), lambda: (weights**4 - weights**2).sum()


def test_closures_of_a_prepared_optimiser_are_an_error(prepare):
    weights, opt, closure = problem()
    before = weights.detach().clone()
    with pytest.raises(sanc.ArgumentError, match=r"accumulates over 4 batches.*accelerator.backward\(loss\)"):
        prepare(opt).step(closure)
    assert torch.equal(weights, before) and opt.record is None
    prepare(prepare(opt)).optimizer.optimizer.step(closure)  # accelerate does not skip this step
    assert opt.record is not None


def test_closures_of_a_twice_wrapped_optimiser_are_an_error(prepare):
    _, opt, closure = problem()
    with pytest.raises(sanc.ArgumentError, match="accumulates over 4 batches"):
        prepare(prepare(opt)).step(closure)


@pytest.mark.parametrize("method", ["sanc", "scr", "arc", "cr", "crm", "ncd"])
@pytest.mark.parametrize("before", [0, 2])
def test_accumulation_of_another_optimiser_is_no_error(prepare, method, before):
    """The steps are those without accelerate, also if it is imported after some of them."""
    _other = prepare(problem(1)[1])
    (weights, _, closure), (expected, _, same) = problem(), problem()
    opt, reference = (getattr(sanc, method.upper())([w], seed=0) for w in (weights, expected))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "accelerate.state")
        for _ in range(before):
            opt.step(closure)
        for _ in range(before + 2):
            reference.step(same)
    for _ in range(2):
        opt.step(closure)
    assert torch.equal(weights, expected)


def test_an_optimiser_inside_the_step_of_a_prepared_one_is_not_prepared(prepare):
    _, inner, inner_closure = problem(1)
    outer_weights = torch.ones(2, requires_grad=True)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step(inner_closure)

    prepare(Outer([outer_weights], lr=0.1)).step()
    assert inner.record is not None


def test_accelerate_may_be_imported_in_part(monkeypatch):
    """`accelerate.state` alone, which libraries import to ask for the rank, wraps no optimiser."""
    state = types.ModuleType("accelerate.state")
    state.GradientState = lambda: types.SimpleNamespace(num_steps=4)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.delitem(sys.modules, "accelerate.optimizer", raising=False)
    assert guards.accumulated_batches([]) == 1
    _, opt, closure = problem()
    opt.step(closure)
    assert opt.record is not None


def test_autocast_of_another_device_type_or_thread_is_not_that_of_a_step():
    with torch.autocast("cpu", torch.bfloat16):
        assert guards.autocast_of(CPU) == ("cpu", torch.bfloat16)
        assert guards.autocast_of(torch.device("cuda")) is None
        found = []
        thread = threading.Thread(target=lambda: found.append(guards.autocast_of(CPU)))
        thread.start()
        thread.join()
        with full_precision(CPU):
            assert guards.autocast_of(CPU) is None
            with callers_precision():
                assert guards.autocast_of(CPU) == ("cpu", torch.bfloat16)
    assert found == [None] and guards.autocast_of(CPU) is None


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_code_that_is_traced_is_distinguished_from_code_that_runs():
    compiled = torch.compile(lambda x: x + 1 if guards.is_traced() else x - 1, backend="eager")
    zero = torch.zeros(())
    assert compiled(zero) == 1 and not guards.is_traced()
    with guards.uncompiled():
        assert compiled(zero) == -1
    assert compiled(zero) == 1


def test_modules_of_other_optimisers_do_not_enter_this_step():
    """A hook reports the modules of the whole process; buffers are those of modules that this thread runs inside."""
    ours, theirs = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    x = torch.randn(8, 2)
    with RestoredBuffers() as restored:
        thread = threading.Thread(target=theirs, args=(x,))
        thread.start()
        thread.join()
        ours(x)
    assert restored.owners == [ours]
    assert theirs.num_batches_tracked == 1 and ours.num_batches_tracked == 0


def test_a_hook_is_removed_by_its_handle_alone():
    calls = []
    handles = [guards.before_forward(lambda module, inputs, k=k: calls.append(k)) for k in range(2)]
    handles[0].remove()
    nn.Identity()(torch.ones(1))
    handles[1].remove()
    nn.Identity()(torch.ones(1))
    assert calls == [1]


def test_state_of_other_libraries_is_used_in_one_module():
    state = r"sys\.modules|torch\.compiler\.|is_autocast_enabled|get_autocast_dtype|register_module_\w+_hook"
    sources = [path for path in Path(sanc.__file__).parent.rglob("*.py") if "lab" not in path.parts]

    def users(pattern):
        return {path.name for path in sources if re.search(pattern, path.read_text(encoding="utf-8"))}

    assert users(rf"{state}|import accelerate\b") == {"guards.py"}
    assert users("_getframe") == {"guards.py", "errors.py"}  # a warning names the line of the caller
