r"""The paper's constants as functions: sample sizes, σ_max, the κ's and the iteration bounds, with errata corrected.

Symbols: :math:`L_0, L_1, L_2` are Lipschitz constants of f, its gradient and its Hessian. ε_g and ε_B bound the errors
of the sampled gradient and Hessian. ε_s is the step norm at which the method may stop. δ is a probability of failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sanc.errors import require

__all__ = [
    "ComplexityBound",
    "complexity_bound",
    "gradient_sample_size",
    "growing_sample_sizes",
    "hessian_sample_size",
    "kappa_d",
    "kappa_l",
    "kappa_s1",
    "kappa_s2",
    "sigma_max",
    "smallest_epsilon",
]


_MAX_SHRINKAGE = 1e9
"""Bound on ‖s₀‖/‖s‖. The sample sizes reach any practical limit before it, and its fourth power does not overflow."""


def _require_positive(**arguments: float) -> None:
    """Raise an error unless all arguments are positive and finite."""
    for name, value in arguments.items():
        require(0 < value < math.inf, name, value, "pass a positive finite number")


def _require_not_negative(**arguments: float) -> None:
    """Raise an error unless all arguments are finite and ≥ 0."""
    for name, value in arguments.items():
        require(0 <= value < math.inf, name, value, "pass a finite number ≥ 0")


def _require_probability(delta: float) -> None:
    """Raise an error unless δ is between 0 and 1."""
    require(0 < delta < 1, "delta", delta, "pass a probability between 0 and 1")


def gradient_sample_size(L0: float, epsilon_g: float, delta: float) -> int:
    r"""Return a sample size with ‖g − ∇f‖ ≤ ε_g with probability 1 − δ.

    .. math:: |S_g| \ge 4 L_0^2 \left(1 + 2\sqrt{\log(1/\delta)}\right)^2 / \epsilon_g^2

    Parameters
    ----------
    L0 : float
        Lipschitz constant of f.
    epsilon_g : float
        Bound ε_g on the error of the sampled gradient.
    delta : float
        Probability of failure δ.
    """
    _require_positive(L0=L0, epsilon_g=epsilon_g)
    _require_probability(delta)
    return math.ceil(4 * L0**2 * (1 + 2 * math.sqrt(math.log(1 / delta))) ** 2 / epsilon_g**2)


def hessian_sample_size(L1: float, epsilon_B: float, delta: float, dim: int) -> int:
    r"""Return a sample size with ‖B − ∇²f‖ ≤ ε_B with probability 1 − δ.

    .. math:: |S_B| \ge 16 L_1^2 \log(2d/\delta) / \epsilon_B^2

    Parameters
    ----------
    L1 : float
        Lipschitz constant of the gradient.
    epsilon_B : float
        Bound ε_B on the error of the sampled Hessian.
    delta : float
        Probability of failure δ.
    dim : int
        Number of variables.
    """
    _require_positive(L1=L1, epsilon_B=epsilon_B, dim=dim)
    _require_probability(delta)
    return math.ceil(16 * L1**2 * math.log(2 * dim / delta) / epsilon_B**2)


def sigma_max(sigma0: float, gamma: float, L2: float, epsilon_g: float, epsilon_B: float, epsilon_s: float) -> float:
    r"""Return an upper bound of σ over all iterations.

    .. math::
        \sigma_{\max} = \max\{\sigma_0,\; \gamma(\tfrac32 L_2 + 3\epsilon_g/\epsilon_s^2 + 3\epsilon_B/(2\epsilon_s))\}

    The paper's lemma omits a factor ‖s‖ in the last term.

    Parameters
    ----------
    sigma0 : float
        The first σ.
    gamma : float
        Factor by which σ grows after a rejection.
    L2 : float
        Lipschitz constant of the Hessian.
    epsilon_g : float
        Bound ε_g on the error of the sampled gradient.
    epsilon_B : float
        Bound ε_B on the error of the sampled Hessian.
    epsilon_s : float
        Step norm ε_s at which the method may stop.
    """
    _require_positive(sigma0=sigma0, L2=L2, epsilon_s=epsilon_s)
    _require_not_negative(epsilon_g=epsilon_g, epsilon_B=epsilon_B)
    require(1 < gamma < math.inf, "gamma", gamma, "pass a finite number above 1")
    return max(sigma0, gamma * (1.5 * L2 + 3 * epsilon_g / epsilon_s**2 + 1.5 * epsilon_B / epsilon_s))


def kappa_l(L2: float, sigma_max: float) -> float:
    r"""Return :math:`\kappa_l = L_2 + 2\sigma_{\max}`, the constant in the lower bound on ‖s‖.

    Parameters
    ----------
    L2 : float
        Lipschitz constant of the Hessian.
    sigma_max : float
        Upper bound of σ.
    """
    _require_positive(L2=L2, sigma_max=sigma_max)
    return L2 + 2 * sigma_max


def kappa_s1(eta1: float, sigma_min: float, sigma_max: float, L2: float) -> float:
    r"""Return :math:`\kappa_{s1}`, the constant in the decrease of a step far from first-order points.

    .. math:: \kappa_{s1} = \eta_1\sigma_{\min} / (36\sqrt6\,(L_2 + 2\sigma_{\max})^{3/2})

    Parameters
    ----------
    eta1 : float
        Smallest ratio ρ of an accepted step.
    sigma_min : float
        Lower bound of σ.
    sigma_max : float
        Upper bound of σ.
    L2 : float
        Lipschitz constant of the Hessian.
    """
    _require_positive(eta1=eta1, sigma_min=sigma_min)
    return eta1 * sigma_min / (36 * math.sqrt(6) * math.pow(kappa_l(L2, sigma_max), 1.5))


def kappa_s2(eta1: float, sigma_min: float, sigma_max: float) -> float:
    r"""Return :math:`\kappa_{s2}`, the constant in the decrease of a step far from second-order points.

    .. math:: \kappa_{s2} = \eta_1\sigma_{\min} / (6\sigma_{\max}^3)

    The paper prints σ_max instead of its cube.

    Parameters
    ----------
    eta1 : float
        Smallest ratio ρ of an accepted step.
    sigma_min : float
        Lower bound of σ.
    sigma_max : float
        Upper bound of σ.
    """
    _require_positive(eta1=eta1, sigma_min=sigma_min, sigma_max=sigma_max)
    return eta1 * sigma_min / (6 * sigma_max**3)


def kappa_d(L2: float) -> float:
    r"""Return :math:`\kappa_d = 1/(24 L_2^2)`, the constant in the decrease of a step along negative curvature.

    Parameters
    ----------
    L2 : float
        Lipschitz constant of the Hessian.
    """
    _require_positive(L2=L2)
    return 1 / (24 * L2**2)


def smallest_epsilon(epsilon_g: float, epsilon_B: float, kappa_l: float) -> float:
    r"""Return the smallest ε of the complexity theorem, :math:`\max\{3\epsilon_g,\; 8\epsilon_B^2/(3\kappa_l)\}`.

    The theorem also requires ε_B ≤ ε'/12 with ε' = max(ε, ‖g‖)/2.

    Parameters
    ----------
    epsilon_g : float
        Bound ε_g on the error of the sampled gradient.
    epsilon_B : float
        Bound ε_B on the error of the sampled Hessian.
    kappa_l : float
        The constant `kappa_l`.
    """
    _require_positive(kappa_l=kappa_l)
    _require_not_negative(epsilon_g=epsilon_g, epsilon_B=epsilon_B)
    return max(3 * epsilon_g, 8 * epsilon_B**2 / (3 * kappa_l))


@dataclass(frozen=True, slots=True)
class ComplexityBound:
    """Upper bounds on the number of iterations to a point of each order.

    Attributes
    ----------
    first_order : int
        l1 with ε^{3/2} in both terms. It is a bound if λ1 ≤ −√ε/2 at unsuccessful steps, as the paper's lemma requires.
        Otherwise their guaranteed decrease is ‖g‖²/(4 L1) − ε_g²/L1, which vanishes at ε = 3 ε_g.
    first_order_stated : int
        l1 as stated in the theorem, with ε³ in the curvature term.
    second_order : int
        l2.
    """

    first_order: int
    first_order_stated: int
    second_order: int

    @property
    def total(self) -> int:
        """l1 + l2 + 1, the iterations to an ε-second-order point, with l1 as stated in the theorem."""
        return self.first_order_stated + self.second_order + 1


def complexity_bound(
    gap: float, epsilon: float, *, eta1: float, sigma_min: float, sigma_max: float, L2: float
) -> ComplexityBound:
    r"""Return the worst-case numbers of iterations of SANC.

    .. math::
        l_1 = \lceil (f_0 - f_{low}) / (\min\{\kappa_{s1}, \kappa_d\}\,\epsilon^{3/2}) \rceil, \qquad
        l_2 = \lceil (f_0 - f_{low}) / (\min\{\kappa_{s2}, \kappa_d\}\,\epsilon^3) \rceil

    Parameters
    ----------
    gap : float
        f(x0) − f_low.
    epsilon : float
        The tolerance ε, below 1.
    eta1, sigma_min, sigma_max, L2 : float
        Constants of the method and of the function.
    """
    _require_positive(gap=gap, epsilon=epsilon)
    require(epsilon < 1, "epsilon", epsilon, "pass a number below 1")
    s1 = kappa_s1(eta1, sigma_min, sigma_max, L2)
    s2 = kappa_s2(eta1, sigma_min, sigma_max)
    d = kappa_d(L2)
    return ComplexityBound(
        first_order=math.ceil(gap / (min(s1, d) * epsilon**1.5)),
        first_order_stated=math.ceil(gap / min(s1 * epsilon**1.5, d * epsilon**3)),
        second_order=math.ceil(gap / (min(s2, d) * epsilon**3)),
    )


def growing_sample_sizes(step_norm: float, reference_norm: float, base: tuple[int, int], limit: int) -> tuple[int, int]:
    r"""Return the sizes of SCR's growing samples: |S_g| ∝ 1/‖s‖⁴ and |S_B| ∝ 1/‖s‖² (Kohler and Lucchi 2017).

    Parameters
    ----------
    step_norm : float
        ‖s‖ of the last accepted step.
    reference_norm : float
        ‖s‖ at which the sizes are `base`.
    base : tuple of int
        Smallest sizes (|S_g|, |S_B|).
    limit : int
        Largest size, the number of rows.
    """
    _require_positive(step_norm=step_norm, reference_norm=reference_norm)
    shrinkage = min(max(1.0, reference_norm / step_norm), _MAX_SHRINKAGE)
    gradient = min(limit, math.ceil(base[0] * shrinkage**4))
    hessian = min(limit, math.ceil(base[1] * shrinkage**2))
    return gradient, hessian
