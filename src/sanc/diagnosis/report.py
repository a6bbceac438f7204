"""What `diagnose` reports: numbers, their meaning in words, and a picture."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sanc.core.space import Floats
from sanc.errors import TERMINAL_WIDTH, ArgumentTypeError, missing_attribute, shown

_MIN_DRAWN_DENSITY = 1e-6
"""Smallest density that is drawn, relative to the largest."""
_MIN_KERNEL_WIDTH = 1e-12
"""Smallest width of a kernel of the drawn density, relative to the largest |λ|."""
_NOTABLE_DECREASE_FRACTION = 1e-2
"""Share of the loss, on the batches of the decrease, from which a decrease is notable."""
_NEGLIGIBLE_CURVATURE_RATIO = 1e-3
"""Share of λ_max up to which λ_min, or a negative lower bound of it, counts as zero."""
_NOISY_FRACTION = 0.5
"""Share of batch noise in ‖g‖² from which the gradient counts as noise."""


_REPORT_REMEDIES = {
    **dict.fromkeys(("eigenvalues", "spectrum", "hessian"), "use lambda_min, lambda_max and density"),
    **dict.fromkeys(("loss", "fun"), "use value"),
    "message": "print the report",
}
"""What to use in place of attributes that a report does not have."""


@dataclass(frozen=True)
class Report:
    """Loss, gradient and curvature of a network at its parameters.

    Attributes
    ----------
    parameters, rows, batches : int
        Numbers of parameters that require a gradient, and of rows and batches of the data.
    value, held_out_value : float
        Mean losses of the batches, and of the batches held out; NaN if there are none.
    grad_norm : float
        ‖g‖ on all batches.
    noise_share : float
        Estimated fraction of ‖g‖² that is batch noise; NaN for one batch.
    noise_scale : float
        Gradient-noise scale in rows: tr Cov(g of one row) / ‖∇f‖² without noise. Infinite if the gradient is all noise.
    lambda_min, lambda_max : float
        Extreme Ritz values of the Hessian: λ_min is at most and λ_max at least this, up to `ritz_error`.
    lambda_min_bound, lambda_max_bound : float
        Bounds on the other side, which hold with probability `confidence`.
    ritz_error, confidence : float
        Error of the Ritz values, and the probability.
    effective_dimension : float
        Participation ratio (Σ|λ|)² / Σλ² of the spectrum, by its converged eigenvalues and stochastic Lanczos
        quadrature of the others.
    effective_dimension_error : float
        Its error: the standard error over the random start vectors, the quadrature error and the effect of the error of
        Hessian products together.
    gradient_decrease : float
        Decrease of the held-out loss by the gradient step with the norm ‖g‖/max(|λ_min|, |λ_max|); with the bounds of
        both if products or time limit them. NaN without held-out batches or time.
    curvature_decrease, curvature_step_norm : float
        Decrease of the held-out loss by the step along the most negative curvature, and the norm of this step, which
        minimises the loss of the other batches. Both are NaN without negative curvature, and the decrease is NaN
        without held-out batches. The search ends at `max_time`.
    products : int
        Hessian products.
    hvp : str
        How the products were computed.
    limit : str
        What keeps the bounds from the accuracy asked for: "roundoff", or "products or time"; empty if they reached it.
    dimension_limit : str
        "roundoff" if the error of products is the largest part of the error of the dimension; otherwise empty.
    density : tuple of arrays
        Nodes of the spectral density, converged eigenvalues and Ritz values of random starts, and their weights, which
        add up to 1.
    profiles : dict
        Distances from x and losses along the eigenvectors of "lambda_min" and "lambda_max", as far as time allows.
    """

    parameters: int
    rows: int
    batches: int
    value: float
    held_out_value: float
    grad_norm: float
    noise_share: float
    noise_scale: float
    lambda_min: float
    lambda_max: float
    lambda_min_bound: float
    lambda_max_bound: float
    ritz_error: float
    confidence: float
    effective_dimension: float
    effective_dimension_error: float
    gradient_decrease: float
    curvature_decrease: float
    curvature_step_norm: float
    products: int
    hvp: str
    limit: str
    dimension_limit: str
    density: tuple[Floats, Floats] = field(repr=False)
    profiles: dict[str, tuple[Floats, Floats]] = field(repr=False)

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, _REPORT_REMEDIES)

    @property
    def epsilon(self) -> float:
        """Smallest ε for which this is an ε-second-order point: ‖g‖ ≤ ε, and λ_min ≥ −ε with the confidence."""
        return max(self.grad_norm, -self.lambda_min_bound)

    @property
    def complete(self) -> bool:
        """Whether the bounds reached the accuracy asked for."""
        return not self.limit

    @property
    def saddle(self) -> bool:
        """Whether the Hessian has negative curvature beyond roundoff; this is certain, not probable."""
        return self.lambda_min + self.ritz_error < 0.0

    @property
    def max_lr(self) -> float:
        """2/λ_max: plain gradient steps with a larger learning rate diverge along the steepest direction."""
        return 2.0 / self.lambda_max if self.lambda_max > 0.0 else math.inf

    @property
    def safe_lr(self) -> float:
        """A learning rate below which plain gradient steps are stable, with probability `confidence`.

        If roundoff limits the bounds, it is far below `max_lr`, which is then the better guide.
        """
        return 2.0 / self.lambda_max_bound if self.lambda_max_bound > 0.0 else math.inf

    @property
    def interpretation(self) -> str:
        """What the numbers mean, in one or two sentences."""
        loss = abs(self.value if math.isnan(self.held_out_value) else self.held_out_value)
        if math.isnan(self.gradient_decrease):
            descends = self.grad_norm**2 / 2 * self.max_lr / 2 > _NOTABLE_DECREASE_FRACTION * loss
        else:
            descends = self.gradient_decrease > _NOTABLE_DECREASE_FRACTION * loss
        escapes = self.curvature_decrease > _NOTABLE_DECREASE_FRACTION * loss
        if self.noise_share > _NOISY_FRACTION:
            gradient = "Batch noise dominates the gradient: larger batches, averages or smaller steps are needed."
        elif descends:
            gradient = "Not trained to the end: a plain gradient step still lowers the loss by more than 1 %."
        else:
            gradient = "A plain gradient step lowers the loss by less than 1 %."
        if not self.saddle:
            negligible = _NEGLIGIBLE_CURVATURE_RATIO * abs(self.lambda_max)
            if self.lambda_min_bound < -negligible:
                curvature = "No negative curvature was found."
            elif self.lambda_min <= negligible:
                curvature = "The loss curves down in no direction, and is flat in some."
            else:
                curvature = "The loss curves up in all directions."
        elif math.isnan(self.curvature_decrease):
            missing = "held-out batches" if math.isnan(self.held_out_value) else "time"
            curvature = f"Negative curvature exists; without {missing} no step along it was tested."
        elif not escapes:
            curvature = "Negative curvature exists, but a step along it does not lower the loss by 1 %."
        elif not descends:
            curvature = "At a saddle: a step along negative curvature lowers the held-out loss by more than 1 %."
        else:
            comparison = "more" if self.curvature_decrease > self.gradient_decrease else "less"
            curvature = (
                f"A step along negative curvature lowers the held-out loss too, {comparison} than the gradient step."
            )
        return f"{gradient} {curvature}"

    @property
    def _learning_rate(self) -> str:
        """The range of stable learning rates in words."""
        if self.lambda_max_bound <= 0.0:
            return "gradient steps of any length lower a quadratic model"
        if self.limit == "roundoff":  # the bound is far from λ_max, whose Ritz value has a small residual
            return f"plain gradient steps need lr < {self.max_lr:.3g}, up to roundoff"
        return f"plain gradient steps need lr < {self.safe_lr:.3g}"

    def as_dict(self) -> dict[str, float]:
        """Return all numbers by name, for loggers."""
        skipped = {"density", "profiles", "hvp", "limit", "dimension_limit"}
        numbers = {entry.name: float(getattr(self, entry.name)) for entry in fields(self) if entry.name not in skipped}
        return numbers | {"epsilon": self.epsilon, "max_lr": self.max_lr, "safe_lr": self.safe_lr}

    def __str__(self) -> str:
        held_out = "" if math.isnan(self.held_out_value) else f", held out {self.held_out_value:.4g}"
        noise = "unknown for one batch"
        if not math.isnan(self.noise_share):
            noise = f"{100 * self.noise_share:.0f} % of ‖g‖², noise scale {self.noise_scale:.3g} rows"
        lines = {
            "loss": f"{self.value:.4g} on {self.rows} rows{held_out}",
            "gradient": f"‖g‖ = {self.grad_norm:.3g}, batch noise {noise}",
            "λ_max": f"in [{self.lambda_max:.4g}, {self.lambda_max_bound:.4g}]: {self._learning_rate}",
            "λ_min": f"in [{self.lambda_min_bound:.4g}, {self.lambda_min:.4g}]",
            "second order": f"to ε = {self.epsilon:.3g}",
            "dimension": f"{self.effective_dimension:.3g} effective of {self.parameters} "
            f"(± {self.effective_dimension_error:.2g}{f', {self.dimension_limit}' if self.dimension_limit else ''})",
        }
        if not math.isnan(self.gradient_decrease):
            lines["gradient step"] = f"changes the held-out loss by {-self.gradient_decrease:+.3g}"
        if not math.isnan(self.curvature_decrease):
            lines["escape step"] = (
                f"of norm {self.curvature_step_norm:.3g} changes the held-out loss by {-self.curvature_decrease:+.3g}"
            )
        stopped = f", bounds limited by {self.limit}" if self.limit else ""
        lines["cost"] = f"{self.products} Hessian products ({self.hvp}), confidence {self.confidence:g}{stopped}"
        width = max(map(len, lines))
        rows: list[str] = []
        for name, text in lines.items():
            first, *others = textwrap.wrap(text, TERMINAL_WIDTH - width - 2)
            rows += [f"{name:>{width}}: {first}", *(" " * (width + 2) + other for other in others)]
        return "\n".join([*textwrap.wrap(self.interpretation, TERMINAL_WIDTH), "", *rows])

    def plot(self, figure: Any = None) -> Any:
        """Draw the spectral density and the loss along the extreme eigenvectors; return the figure of Matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError("report.plot() needs Matplotlib: install it, or sanc[lab].") from missing
        if figure is not None and not hasattr(figure, "subplots"):
            raise ArgumentTypeError(
                f"figure = {shown(figure)} is no figure of Matplotlib: leave it out, and call savefig(path) of "
                "what plot() returns."
            )
        figure = Figure(figsize=(9.0, 3.5), layout="constrained") if figure is None else figure
        left, right = figure.subplots(1, 2)
        values, weights = self.density
        width = max(float(np.ptp(values)) / 100, _MIN_KERNEL_WIDTH * max(1.0, float(np.abs(values).max())))
        grid = np.linspace(values.min() - 5 * width, values.max() + 5 * width, 400)
        kernels = np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        density = kernels @ weights
        left.semilogy(grid, np.maximum(density, _MIN_DRAWN_DENSITY * density.max()))
        left.set(xlabel="λ", ylabel="spectral density")
        for name, (distances, losses) in self.profiles.items():
            right.plot(distances, losses, label=f"along the eigenvector of {name.replace('lambda_', 'λ_')}")
        right.set(xlabel="distance from x", ylabel="loss")
        right.legend()
        return figure
