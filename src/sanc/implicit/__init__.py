"""Derivatives of a minimum with respect to parameters of the function: `argmin`."""

from sanc.implicit.entry import argmin
from sanc.implicit.solution import Derivative, Solution

__all__ = ["Derivative", "Solution", "argmin"]
