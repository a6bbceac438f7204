"""`minimize` for functions and finite sums, with the interface of SciPy, and certificates of points."""

from sanc.core.runs.status import Status
from sanc.minimisation.certification import Certificate, certificate
from sanc.minimisation.entry import minimize
from sanc.minimisation.result import LeastSquaresResult, Result
from sanc.minimisation.scipy_interface import scipy_method

__all__ = ["Certificate", "LeastSquaresResult", "Result", "Status", "certificate", "minimize", "scipy_method"]
