"""`argmin` of a sum of squares: `least_squares` minimises it, and its whole Hessian has the derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.optimize import Bounds
from torch import Tensor

from sanc.errors import ArgumentError, shown
from sanc.implicit.derivatives import norm_of
from sanc.implicit.examination import SolveOptions
from sanc.implicit.problem import ImplicitProblem
from sanc.leastsquares import least_squares
from sanc.leastsquares.losses import Loss
from sanc.minimisation.arguments import reject_arguments

METHOD = "least_squares"
"""The name of the method of `argmin`."""
_ARGUMENTS = ("tol", "max_iter", "max_nfev", "max_time", "seed", "callback", "precond", "loss", "f_scale")
"""Arguments of `least_squares` that `argmin` passes on."""


def _huber(z: Tensor) -> Tensor:
    return torch.where(z <= 1.0, z, 2.0 * z.clamp(min=1.0).sqrt() - 1.0)


TORCH_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda z: z,
    "soft_l1": lambda z: 2.0 * (z / ((1.0 + z).sqrt() + 1.0)),
    "huber": _huber,
    "cauchy": torch.log1p,
    "arctan": torch.arctan,
}
"""The losses of `least_squares` by name, as functions that torch differentiates."""


class LeastSquaresProblem(ImplicitProblem):
    """The cost ½ C² Σ φ((r_i/C)²) of residuals r(x, θ), as a function of x and θ with its minima."""

    def __init__(
        self,
        residuals: Callable[..., Tensor],
        x0: Any,
        theta: Any,
        solve_options: SolveOptions,
        options: dict[str, Any],
    ) -> None:
        self._residuals = residuals
        self._hvp = options.pop("hvp", "auto")
        reject_arguments("least_squares", options, (*_ARGUMENTS, "bounds"))
        loss, scale = options["loss"], options["f_scale"]
        if callable(loss):
            raise ArgumentError(
                f"loss = {shown(loss)} is a function of arrays, which torch cannot differentiate: pass a name, or put "
                "the loss into fun and leave method out."
            )
        Loss(loss, scale)  # checks both
        phi = TORCH_LOSSES[loss]

        def cost(x: Any, parameters: Any) -> Any:
            r = residuals(x, parameters)
            if not isinstance(r, Tensor):
                return r  # `least_squares` reports it
            return 0.5 * scale**2 * phi((r / scale).square()).sum()

        super().__init__(cost, x0, theta, solve_options, options)

    @property
    def hvp(self) -> Any:
        return self._hvp

    def minimise_from(self, x0: Any, theta: tuple[Tensor, ...], *, certify: bool) -> Any:
        options = {name: value for name, value in self._options.items() if name != "bounds"}
        return least_squares(
            self._residuals, x0, bounds=self._sides(), args=(self.parameters(theta),), certify=certify, **options
        )

    def gradient_norm(self, result: Any) -> float:
        multipliers = result.get("multipliers")
        held = 0.0 if multipliers is None else self._flat(multipliers)
        return norm_of(result.grad - held)

    def gradient_tolerance(self, result: Any) -> float:
        return math.inf  # its tolerance is on angles

    def _sides(self) -> Any:
        """Return the bounds in a form of `least_squares`."""
        if self._box is None:
            return None
        if self._tree is not None:
            return self._tree.build(self._box.lower), self._tree.build(self._box.upper)
        return Bounds(*(side.double().cpu().numpy() for side in (self._box.lower, self._box.upper)))
