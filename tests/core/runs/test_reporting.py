"""What a run on 2^k · f reports, in the units of f."""

from __future__ import annotations

from sanc.core.record import Record
from sanc.core.runs.reporting import ending_sentences, unscaled_record
from sanc.core.runs.status import Findings


def test_a_record_is_divided_by_the_factor_of_f():
    record = Record(3, value=6.0, trial_value=2.0, grad_norm=8.0, rho=0.5, step_norm=0.25, sigma=16.0)
    unscaled = unscaled_record(record, 1)
    assert (unscaled.value, unscaled.trial_value, unscaled.grad_norm, unscaled.sigma) == (3.0, 1.0, 4.0, 8.0)
    assert (unscaled.rho, unscaled.step_norm, unscaled.iteration) == (0.5, 0.25, 3)  # they have no unit of f
    assert unscaled_record(record, 0) is record


def test_the_message_names_the_factor_of_f_the_noise_and_the_variables():
    message = ending_sentences(Findings(cause="No step lowers f."), 2, 4e-6, "The variables were scaled.")
    assert message == (
        "No step lowers f. Numbers in this message are of f times 2^2. The run tolerated noise in f of about ±1e-06. "
        "The variables were scaled."
    )
    assert ending_sentences(Findings(), 2, 0.0, "") == ""
