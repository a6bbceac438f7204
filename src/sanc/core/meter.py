"""The counters of evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from sanc.core.record import Calls


@dataclass(slots=True)
class Meter:
    """Counts the evaluations of an oracle.

    Attributes
    ----------
    value, gradient, product : int
        Components in the values, gradients and Hessian products evaluated.
    paper_calls : int
        Calls as the paper's figures count them.
    nfev, njev, nhev : int
        Values, gradients and Hessian products, each counted once whatever its components.
    """

    value: int = 0
    gradient: int = 0
    product: int = 0
    paper_calls: int = 0
    nfev: int = 0
    njev: int = 0
    nhev: int = 0

    def count_value(self, size: int) -> None:
        """Count one function value over `size` components."""
        self.value += size
        self.nfev += 1

    def count_gradient(self, size: int) -> None:
        """Count one gradient over `size` components."""
        self.gradient += size
        self.njev += 1

    def count_product(self, size: int) -> None:
        """Count one Hessian product over `size` components."""
        self.product += size
        self.nhev += 1

    def counts(self) -> tuple[int, ...]:
        """Return all counts, for `restore`."""
        return self.value, self.gradient, self.product, self.paper_calls, self.nfev, self.njev, self.nhev

    def restore(self, counts: tuple[int, ...]) -> None:
        """Set all counts to those that `counts` returned."""
        self.value, self.gradient, self.product, self.paper_calls, self.nfev, self.njev, self.nhev = counts

    def snapshot(self) -> Calls:
        """Return the current component counts."""
        return Calls(self.value, self.gradient, self.product, self.paper_calls)
