"""Nonlinear least squares and curve fitting, with the iteration, endings and certificates of `minimize`."""

from sanc.leastsquares.curve_fitting import curve_fit
from sanc.leastsquares.entry import least_squares
from sanc.leastsquares.networks import NetworkResiduals

__all__ = ["NetworkResiduals", "curve_fit", "least_squares"]
