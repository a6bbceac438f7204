"""What a run reports: its records and certificate in the units of f, and the sentences about its ending."""

from __future__ import annotations

import math
from dataclasses import replace

from sanc.core.record import Record
from sanc.core.runs.status import Findings
from sanc.core.spectrum.curvature import Certificate

_RECORD_NUMBERS = ("sigma", "grad_norm", "ritz_value", "model_decrease", "value", "trial_value")
_CERTIFICATE_NUMBERS = (
    *("grad_norm", "lambda_min", "error_bound", "ritz_error", "residual", "asymmetry"),
    *("gradient_tolerance", "curvature_tolerance"),
)


def unscaled_record(record: Record, exponent: int) -> Record:
    """Return the record of an iteration on 2^exponent · f in the units of f."""
    if not exponent:
        return record
    factor = math.ldexp(1.0, exponent)
    return replace(record, **{name: getattr(record, name) / factor for name in _RECORD_NUMBERS})


def unscaled_certificate(certificate: Certificate | None, exponent: int) -> Certificate | None:
    """Return a certificate of 2^exponent · f in the units of f."""
    if certificate is None or not exponent:
        return certificate
    factor = math.ldexp(1.0, exponent)
    return replace(certificate, **{name: getattr(certificate, name) / factor for name in _CERTIFICATE_NUMBERS})


def ending_sentences(findings: Findings, exponent: int, tolerated_noise: float, remark: str) -> str:
    """Return the cause of the ending, with remarks if f was scaled, if its noise was tolerated, or on its variables."""
    sentences = [findings.cause] if findings.cause else []
    if findings.cause and exponent:
        sentences.append(f"Numbers in this message are of f times 2^{exponent}.")
    if tolerated_noise:
        noise = math.ldexp(tolerated_noise, -exponent)
        sentences.append(f"The run tolerated noise in f of about ±{noise:.1g}.")
    if remark:
        sentences.append(remark)
    return " ".join(sentences)
