"""`minimize` for functions and finite sums, with the interface of SciPy, and certificates of points."""

from sanc.core.runs.status import Status
from sanc.minimisation.certification import Certificate, certificate
from sanc.minimisation.minimizing import minimize, scipy_method
from sanc.minimisation.result import LeastSquaresResult, Result

__all__ = ["Certificate", "LeastSquaresResult", "Result", "Status", "certificate", "minimize", "scipy_method"]
