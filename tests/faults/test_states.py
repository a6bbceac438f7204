"""Invalid values in every entry of a saved state, and Ctrl-C at many lines of a step."""

from __future__ import annotations

import copy

import pytest
import torch

import sanc
from tensors import flat
from tests.core import test_interrupts as interrupts
from tests.core import test_saved as saved
from training_styles import drive

pytestmark = pytest.mark.slow

MORE = [*saved.WRONG, KeyError, "", [1.0], {"a": 1}, 2**70, 1j]


@pytest.mark.filterwarnings("ignore:the state was saved with")
@pytest.mark.parametrize(("kind", "preset", "style", "options"), [case[:4] for case in saved.CASES])
def test_a_corrupted_state_is_rejected_or_works(kind, preset, style, options, tally):
    """After an accepted state the run continues; a rejected state changes nothing, bit for bit."""
    model, opt, rest = saved.optimiser(kind, preset, style, **options)
    state = copy.deepcopy(opt.state_dict())
    before, cases, failures = flat(model).clone(), 0, []
    for number, (path, _) in enumerate(saved.leaves(state)):
        for wrong in MORE[number % 3 :: 3]:
            cases += 1
            try:
                broken = saved.changed(state, path, wrong)
                opt.load_state_dict(broken)
            except sanc.SancError:
                continue
            except Exception as error:
                failures.append((path, wrong, repr(error)))
                continue
            if cases % 29 == 0:  # test some accepted states by a step
                other, twin, _ = saved.optimiser(kind, preset, style, **options)
                try:
                    twin.load_state_dict(broken)
                    drive(style, other, twin, rest[:1])
                    if not torch.isfinite(flat(other)).all():
                        failures.append((path, wrong, "not finite"))
                except sanc.SancError:
                    pass
                except Exception as error:
                    failures.append((path, wrong, repr(error)))
    opt.load_state_dict(state)
    twin_model, twin, _ = saved.optimiser(kind, preset, style, **options)
    assert torch.equal(before, flat(model))
    drive(style, model, opt, rest)
    drive(style, twin_model, twin, rest)
    if not torch.equal(flat(model), flat(twin_model)):
        failures.append("the run does not continue as before")
    tally("corrupted states", cases, failures)


@pytest.mark.parametrize(("style", "kind", "preset", "steps"), interrupts.CASES)
def test_ctrl_c_at_many_lines_of_a_step(style, kind, preset, steps, tally):
    tried, bad = interrupts.sweep(style, kind, preset, steps, stride=61, first=3)
    tally("asynchronous interrupts", tried, bad)
