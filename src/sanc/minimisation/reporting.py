"""What a run of `minimize` prints and passes to the callback after an iteration, and adds to its result at the end."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from sanc.autograd.precision import callers_precision
from sanc.core.oracle import Oracle
from sanc.core.record import Branch
from sanc.core.runs.callbacks import asks_to_stop
from sanc.core.runs.reporting import ending_sentences
from sanc.core.runs.resume import save_run
from sanc.core.runs.run import Run
from sanc.core.runs.status import Status
from sanc.minimisation.arguments import check_callback
from sanc.minimisation.bounds import bounded_sentence
from sanc.minimisation.objective import Unflatten
from sanc.minimisation.result import Result


def reporter(callback: Callable[..., Any] | None, unflatten: Unflatten, disp: bool) -> Callable[[Run], bool]:
    """Return the function that prints a line and calls the callback after an iteration, and returns whether to stop."""
    try:
        parameters = dict(inspect.signature(callback).parameters) if callable(callback) else {}
    except ValueError:  # some functions written in C have no signature
        parameters = {}
    by_name = set(parameters) == {"intermediate_result"}
    required = [p for p in parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    with_state = len(required) == 2  # callback(xk, state), as "trust-constr" calls it
    if not by_name:
        forms = "callback(x), callback(x, intermediate_result) or callback(intermediate_result=…)"
        check_callback(callback, 2 if with_state else 1, f"pass a function that is called as {forms}")

    def report(run: Run) -> bool:
        record = run.history[-1]
        if disp:
            print(
                f"{record.iteration:5d}  f = {record.value: .6e}  ‖g‖ = {record.grad_norm:.2e}  "
                f"λ1 = {record.ritz_value: .2e}  σ = {record.sigma:.1e}  {record.branch}"
            )
        if callback is None:
            return False
        if not (by_name or with_state):
            with callers_precision():
                return asks_to_stop(callback, unflatten(run.full_x))
        value = record.trial_value if record.branch is not Branch.STAYED else record.value
        if record.branch is Branch.STAYED and record.trials == 0 and not run.oracle.exact:
            value = math.nan  # the objective sample was not evaluated
        result: Result[Any] = Result(
            x=unflatten(run.full_x), fun=value, nit=run.iterations, record=record, state=save_run(run)
        )
        with callers_precision():
            if with_state:
                return asks_to_stop(callback, result.x, result)
            return asks_to_stop(callback, intermediate_result=result)

    return report


def certify(run: Run, status: Status, oracle: Oracle) -> None:
    """Compute the certificate of a run that has none and needs one, from the oracle of the whole objective."""
    if run.findings.certificate is None and run.limits.certify and status not in (Status.NOT_FINITE, Status.UNBOUNDED):
        run.note(certificate=run.compute_certificate(oracle, run.limits.max_products, run.seed)[0])


def ending_message(run: Run, status: Status, cause: str) -> str:
    """Return the message of a result; `cause` is a sentence about the start, with a space before it, or empty."""
    noise = run.iteration.state.value_noise if run.step_monitor.noise_tolerated else 0.0
    sentences = ending_sentences(run.findings, run.exponent, noise, run.variables.remark)
    return f"{bounded_sentence(run, status)}{cause} {sentences}".rstrip()
