"""The state of a network in training, measured at its parameters: `diagnose`."""

from sanc.diagnosis.entry import diagnose
from sanc.diagnosis.report import Report

__all__ = ["Report", "diagnose"]
