"""Nonlinear least-squares fits of NIST's Statistical Reference Datasets, as unconstrained problems.

Observations, two starts, certified parameters and residual sums of squares (to eleven digits) are those that NIST
publishes at https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml. Each fit minimises
f(b) = Σ (y_i − model(b, x_i))², and each start is a separate problem: the first is far from the solution, the second
near. Seven long sets are in `benchmarks.long_fits`.

A run solves a fit if f agrees with the certified sum of squares to six digits. The gradient tolerance is 1e-8, or less
if the sum is far below 1. Roundoff in f seldom permits such a gradient, because parameters differ by up to twelve
orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common import Floats, zoo

_D = torch.float64


def numbers(text: str) -> Tensor:
    """Return the numbers of a text."""
    return torch.tensor([float(entry) for entry in text.split()], dtype=_D)


@dataclass(frozen=True, eq=False)
class Fit:
    """A model, its observations, two starts, and the certified parameters and sum of squares."""

    name: str
    model: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    starts: tuple[str, str]
    parameters: str
    squares: float
    gtol: float = 1e-8

    def __call__(self, b: Tensor) -> Tensor:
        """Sum of squared residuals."""
        return (self.y - self.model(b, self.x)).square().sum()

    @property
    def certified(self) -> Tensor:
        """The certified parameters."""
        return numbers(self.parameters)


_MISRA_X = numbers("77.6 114.9 141.1 190.8 239.9 289.0 332.8 378.4 434.8 477.3 536.8 593.1 689.1 760.0")
_MISRA_Y = numbers("10.07 14.73 17.94 23.93 29.61 35.18 40.02 44.82 50.76 55.05 61.01 66.40 75.47 81.78")
_LANCZOS_X = 0.05 * torch.arange(24, dtype=_D)
_LANCZOS1 = """2.513400000000E+00 2.044333373291E+00 1.668404436564E+00 1.366418021208E+00 1.123232487372E+00
9.268897180037E-01 7.679338563728E-01 6.388775523106E-01 5.337835317402E-01 4.479363617347E-01 3.775847884350E-01
3.197393199326E-01 2.720130773746E-01 2.324965529032E-01 1.996589546065E-01 1.722704126914E-01 1.493405660168E-01
1.300700206922E-01 1.138119324644E-01 1.000415587559E-01 8.833209084540E-02 7.833544019350E-02 6.976693743449E-02
6.239312536719E-02"""
_LANCZOS_STARTS = ("1.2 0.3 5.6 5.5 6.5 7.6", "0.5 0.7 3.6 4.2 4 6.3")


def _rounded(text: str, digits: int) -> Tensor:
    """Round as NIST did for Lanczos2 (six digits) and Lanczos3 (four decimals)."""
    kept = f".{digits - 1}e" if digits > 5 else f".{digits}f"
    return torch.tensor([float(f"{float(entry):{kept}}") for entry in text.split()], dtype=_D)


def _exponentials(b: Tensor, x: Tensor) -> Tensor:
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


def cubic_ratio(b: Tensor, x: Tensor) -> Tensor:
    """Return the ratio of two cubic polynomials."""
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _enso(b: Tensor, x: Tensor) -> Tensor:
    year, second, third = (2 * math.pi * x / period for period in (12.0, b[3], b[6]))
    waves = b[1] * torch.cos(year) + b[2] * torch.sin(year) + b[4] * torch.cos(second) + b[5] * torch.sin(second)
    return b[0] + waves + b[7] * torch.cos(third) + b[8] * torch.sin(third)


_NELSON_Y = """15 17 15.5 16.5 15.5 15 16 14.5 15 14.5 12.5 11 14 13 14 11.5 14 16 13 13.5 13 13.5 12.5 12.5 12.5 12
11.5 12 13 11.5 13 12.5 13.5 17.5 17.5 13.5 12.5 12.5 15 13 12 13 12 13.5 10 11.5 11 9.5 15 15 15.5 16 13 10.5 13.5
14 12.5 12 11.5 11.5 6.5 5.5 6 6 18.5 17 15.3 16 13 14 12.5 11 12 12 11.5 12 6 6 5 5.5 12.5 13 16 12 11 9.5 11 11 11
10 10.5 10.5 2.7 2.7 2.5 2.4 13 13.5 16.5 13.6 11.5 10.5 13.5 12 7 6.9 8.8 7.9 1.2 1.5 1 1.5 13 12.5 16.5 16 11 11.5
10.5 10 7.27 7.5 6.7 7.6 1.5 1 1.2 1.2"""
_NELSON_X = torch.stack(
    [numbers("1 2 4 8 16 32 48 64").repeat_interleave(16), numbers("180 225 250 275").repeat_interleave(4).repeat(8)]
)
_ENSO_Y = """12.9 11.3 10.6 11.2 10.9 7.5 7.7 11.7 12.9 14.3 10.9 13.7 17.1 14.0 15.3 8.5 5.7 5.5 7.6 8.6 7.3 7.6
12.7 11.0 12.7 12.9 13.0 10.9 10.4 10.2 8.0 10.9 13.6 10.5 9.2 12.4 12.7 13.3 10.1 7.8 4.8 3.0 2.5 6.3 9.7 11.6 8.6
12.4 10.5 13.3 10.4 8.1 3.7 10.7 5.1 10.4 10.9 11.7 11.4 13.7 14.1 14.0 12.5 6.3 9.6 11.7 5.0 10.8 12.7 10.8 11.8
12.6 15.7 12.6 14.8 7.8 7.1 11.2 8.1 6.4 5.2 12.0 10.2 12.7 10.2 14.7 12.2 7.1 5.7 6.7 3.9 8.5 8.3 10.8 16.7 12.6
12.5 12.5 9.8 7.2 4.1 10.6 10.1 10.1 11.9 13.6 16.3 17.6 15.5 16.0 15.2 11.2 14.3 14.5 8.5 12.0 12.7 11.3 14.5 15.1
10.4 11.5 13.4 7.5 0.6 0.3 5.5 5.0 4.6 8.2 9.9 9.2 12.5 10.9 9.9 8.9 7.6 9.5 8.4 10.7 13.6 13.7 13.7 16.5 16.8 17.1
15.4 9.5 6.1 10.1 9.3 5.3 11.2 16.6 15.6 12.0 11.5 8.6 13.8 8.7 8.6 8.6 8.7 12.8 13.2 14.0 13.4 14.8"""
_CHWIRUT_X = """0.5 1 1.75 3.75 5.75 0.875 2.25 3.25 5.25 0.75 1.75 2.75 4.75 0.625 1.25 2.25 4.25 0.5 3 0.75 3 1.5
6 3 6 1.5 3 0.5 2 4 0.75 2 5 0.75 2.25 3.75 5.75 3 0.75 2.5 4 0.75 2.5 4 0.75 2.5 4 0.5 6 3 0.5 2.75 0.5 1.75"""
_CHWIRUT_Y = """92.9 57.1 31.05 11.5875 8.025 63.6 21.4 14.25 8.475 63.8 26.8 16.4625 7.125 67.3 41 21.15 8.175 81.5
13.12 59.9 14.62 32.9 5.44 12.56 5.44 32 13.95 75.8 20 10.42 59.5 21.67 8.55 62 20.2 7.76 3.75 11.81 54.7 23.7 11.55
61.3 17.7 8.74 59.2 16.3 8.62 81 4.87 14.62 81.7 17.17 81.3 28.9"""
_ROSZMAN_X = """-4868.68 -4868.09 -4867.41 -3375.19 -3373.14 -3372.03 -2473.74 -2472.35 -2469.45 -1894.65 -1893.40
-1497.24 -1495.85 -1493.41 -1208.68 -1206.18 -1206.04 -997.92 -996.61 -996.31 -834.94 -834.66 -710.03 -530.16
-464.17"""
_ROSZMAN_Y = """0.252429 0.252141 0.251809 0.297989 0.296257 0.295319 0.339603 0.337731 0.333820 0.389510 0.386998
0.438864 0.434887 0.427893 0.471568 0.461699 0.461144 0.513532 0.506641 0.505062 0.535648 0.533726 0.568064 0.612886
0.624169"""
_MGH17_Y = """0.844 0.908 0.932 0.936 0.925 0.908 0.881 0.850 0.818 0.784 0.751 0.718 0.685 0.658 0.628 0.603 0.580
0.558 0.538 0.522 0.506 0.490 0.478 0.467 0.457 0.448 0.438 0.431 0.424 0.420 0.414 0.411 0.406"""
_MGH10_Y = "34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872"
_THURBER_X = """-3.067 -2.981 -2.921 -2.912 -2.840 -2.797 -2.702 -2.699 -2.633 -2.481 -2.363 -2.322 -1.501 -1.460
-1.274 -1.212 -1.100 -1.046 -0.915 -0.714 -0.566 -0.545 -0.400 -0.309 -0.109 -0.103 0.010 0.119 0.377 0.790 0.963
1.006 1.115 1.572 1.841 2.047 2.200"""
_THURBER_Y = """80.574 84.248 87.264 87.195 89.076 89.608 89.868 90.101 92.405 95.854 100.696 101.060 401.672
390.724 567.534 635.316 733.054 759.087 894.206 990.785 1090.109 1080.914 1122.643 1178.351 1260.531 1273.514
1288.339 1327.543 1353.863 1414.509 1425.208 1421.384 1442.962 1464.350 1468.705 1447.894 1457.628"""
_ECKERLE_X = """400 405 410 415 420 425 430 435 436.5 438 439.5 441 442.5 444 445.5 447 448.5 450 451.5 453 454.5
456 457.5 459 460.5 462 463.5 465 470 475 480 485 490 495 500"""
_ECKERLE_Y = """0.0001575 0.0001699 0.0002350 0.0003102 0.0004917 0.0008710 0.0017418 0.0046400 0.0065895 0.0097302
0.0149002 0.0237310 0.0401683 0.0712559 0.1264458 0.2073413 0.2902366 0.3445623 0.3698049 0.3668534 0.3106727
0.2078154 0.1164354 0.0616764 0.0337200 0.0194023 0.0117831 0.0074357 0.0022732 0.0008800 0.0004579 0.0002345
0.0001586 0.0001143 0.0000710"""

FITS = (
    Fit("Misra1a", lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)), _MISRA_X, _MISRA_Y,
        ("500 0.0001", "250 0.0005"), "2.3894212918E+02 5.5015643181E-04", 1.2455138894e-01),
    Fit("Misra1b", lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2), _MISRA_X, _MISRA_Y,
        ("500 0.0001", "300 0.0002"), "3.3799746163E+02 3.9039091287E-04", 7.5464681533e-02),
    Fit("Misra1c", lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5), _MISRA_X, _MISRA_Y,
        ("500 0.0001", "600 0.0002"), "6.3642725809E+02 2.0813627256E-04", 4.0966836971e-02),
    Fit("Misra1d", lambda b, x: b[0] * b[1] * x / (1 + b[1] * x), _MISRA_X, _MISRA_Y,
        ("500 0.0001", "450 0.0003"), "4.3736970754E+02 3.0227324449E-04", 5.6419295283e-02),
    Fit("Chwirut2", lambda b, x: torch.exp(-b[0] * x) / (b[1] + b[2] * x), numbers(_CHWIRUT_X), numbers(_CHWIRUT_Y),
        ("0.1 0.01 0.02", "0.15 0.008 0.010"), "1.6657666537E-01 5.1653291286E-03 1.2150007096E-02", 5.1304802941e02),
    Fit("DanWood", lambda b, x: b[0] * x ** b[1], numbers("1.309 1.471 1.490 1.565 1.611 1.680"),
        numbers("2.138 3.421 3.597 4.340 4.882 5.660"), ("1 5", "0.7 4"), "7.6886226176E-01 3.8604055871E+00",
        4.3173084083e-03),
    Fit("Lanczos1", _exponentials, _LANCZOS_X, numbers(_LANCZOS1), _LANCZOS_STARTS,
        "9.5100000027E-02 1.0000000001E+00 8.6070000013E-01 3.0000000002E+00 1.5575999998E+00 5.0000000001E+00",
        1.4307867721e-25, 1e-15),
    Fit("Lanczos2", _exponentials, _LANCZOS_X, _rounded(_LANCZOS1, 6), _LANCZOS_STARTS,
        "9.6251029939E-02 1.0057332849E+00 8.6424689056E-01 3.0078283915E+00 1.5529016879E+00 5.0028798100E+00",
        2.2299428125e-11, 1e-14),
    Fit("Lanczos3", _exponentials, _LANCZOS_X, _rounded(_LANCZOS1, 4), _LANCZOS_STARTS,
        "8.6816414977E-02 9.5498101505E-01 8.4400777463E-01 2.9515951832E+00 1.5825685901E+00 4.9863565084E+00",
        1.6117193594e-08, 1e-12),
    Fit("MGH09", lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
        numbers("4 2 1 0.5 0.25 0.167 0.125 0.1 0.0833 0.0714 0.0625"),
        numbers("0.1957 0.1947 0.1735 0.1600 0.0844 0.0627 0.0456 0.0342 0.0323 0.0235 0.0246"),
        ("25 39 41.5 39", "0.25 0.39 0.415 0.39"),
        "1.9280693458E-01 1.9128232873E-01 1.2305650693E-01 1.3606233068E-01", 3.0750560385e-04),
    Fit("MGH10", lambda b, x: b[0] * torch.exp(b[1] / (x + b[2])), 45 + 5 * torch.arange(1, 17, dtype=_D),
        numbers(_MGH10_Y), ("2 400000 25000", "0.02 4000 250"),
        "5.6096364710E-03 6.1813463463E+03 3.4522363462E+02", 8.7945855171e01),
    Fit("MGH17", lambda b, x: b[0] + b[1] * torch.exp(-b[3] * x) + b[2] * torch.exp(-b[4] * x),
        10.0 * torch.arange(33, dtype=_D), numbers(_MGH17_Y), ("50 150 -100 1 2", "0.5 1.5 -1 0.01 0.02"),
        "3.7541005211E-01 1.9358469127E+00 -1.4646871366E+00 1.2867534640E-02 2.2122699662E-02",
        5.4648946975e-05, 1e-11),
    Fit("Thurber", cubic_ratio, numbers(_THURBER_X), numbers(_THURBER_Y),
        ("1000 1000 400 40 0.7 0.3 0.03", "1300 1500 500 75 1 0.4 0.05"),
        "1.2881396800E+03 1.4910792535E+03 5.8323836877E+02 7.5416644291E+01 9.6629502864E-01 3.9797285797E-01 "
        "4.9727297349E-02", 5.6427082397e03),
    Fit("BoxBOD", lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)), numbers("1 2 3 5 7 10"),
        numbers("109 149 149 191 213 224"), ("1 1", "100 0.75"), "2.1380940889E+02 5.4723748542E-01", 1.1680088766e03),
    Fit("Rat42", lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)), numbers("9 14 21 28 42 57 63 70 79"),
        numbers("8.93 10.80 18.59 22.33 39.35 56.11 61.73 64.62 67.08"), ("100 1 0.1", "75 2.5 0.07"),
        "7.2462237576E+01 2.6180768402E+00 6.7359200066E-02", 8.0565229338),
    Fit("Rat43", lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]), torch.arange(1, 16, dtype=_D),
        numbers("16.08 33.83 65.80 97.20 191.55 326.20 386.87 520.53 590.03 651.92 724.93 699.56 689.96 637.56 717.41"),
        ("100 10 1 1", "700 5 0.75 1.3"), "6.9964151270E+02 5.2771253025E+00 7.5962938329E-01 1.2792483859E+00",
        8.7864049080e03),
    Fit("Eckerle4", lambda b, x: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2), numbers(_ECKERLE_X),
        numbers(_ECKERLE_Y), ("1 10 500", "1.5 5 450"), "1.5543827178 4.0888321754 451.54121844", 1.4635887487e-03),
    Fit("Roszman1", lambda b, x: b[0] - b[1] * x - torch.atan(b[2] / (x - b[3])) / math.pi, numbers(_ROSZMAN_X),
        numbers(_ROSZMAN_Y), ("0.1 -0.00001 1000 -100", "0.2 -0.000005 1200 -150"),
        "2.0196866396E-01 -6.1953516256E-06 1.2044556708E+03 -1.8134269537E+02", 4.9484847331e-04, 1e-11),
    Fit("ENSO", _enso, torch.arange(1, 169, dtype=_D), numbers(_ENSO_Y),
        ("11 3 0.5 40 -0.7 -1.3 25 -0.3 1.4", "10 3 0.5 44 -1.5 0.5 26 -0.1 1.5"),
        "1.0510749193E+01 3.0762128085E+00 5.3280138227E-01 4.4311088700E+01 -1.6231428586E+00 5.2554493756E-01 "
        "2.6887614440E+01 2.1232288488E-01 1.4966870418E+00", 7.8853978668e02),
    Fit("Nelson", lambda b, x: b[0] - b[1] * x[0] * torch.exp(-b[2] * x[1]), _NELSON_X, torch.log(numbers(_NELSON_Y)),
        ("2 0.0001 -0.01", "2.5 0.000000005 -0.05"), "2.5906836021E+00 5.6177717026E-09 -5.7701013174E-02",
        3.7976833176),
)  # fmt: skip


def problems() -> list[zoo.ZooProblem]:
    """Return each fit from each of its starts as a test problem."""
    found = []
    for fit in FITS:
        for number, start in enumerate(fit.starts, 1):
            x0: Floats = numbers(start).numpy()
            limits = {"rtol": 1e-6, "atol": 1e-18, "gtol": fit.gtol}
            found.append(zoo.ZooProblem(f"{fit.name}-{number}", fit, x0, (fit.squares,), "NIST StRD", **limits))
    return found
