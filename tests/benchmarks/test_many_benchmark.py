"""The sentence on many fits at once follows from the results."""

from __future__ import annotations

from typing import Any

from benchmarks import many


def line(family: str, fits: int, method: str, rate: float, right: float = 1.0, wrong: float = 0.0) -> dict[str, Any]:
    return {"family": family, "fits": fits, "method": method, "rate": rate, "right": right, "wrong": wrong}


def test_rates_are_compared_within_a_family_and_a_number_of_fits() -> None:
    found = []
    for fits, factor in ((1000, 1.0), (10_000, 2.0)):
        for family, loop in (("decay", 5.0), ("decay, bounds", 1.0), ("peak", 2.0), ("peak, bounds", 0.5)):
            found += [line(family, fits, "sanc", 10.0 * factor, 0.99, 0.01), line(family, fits, "curve_fit", loop)]
    found += [line("decay", 1000, "lm", 15.0, 0.8, 0.2), line("peak", 1000, "lm", 4.0), line("peak", 10_000, "lm", 2.0)]
    text = many.in_words(found)
    assert "makes 10,000 fits 4.0 to 10.0 times as fast" in text and "with bounds 20.0 to 40.0 times" in text
    assert "these factors are 2.0 to 5.0 and 10.0 to 20.0." in text
    assert "in 1 of 2 families at 1,000 fits and in 0 of 1 families at 10,000 fits, by at most 1.5 times" in text
    assert (
        "up to 10 times as fast" in text
        and "at least 99.00 % of its fits are right, of the peers' fits 80.00 %" in text
    )
    assert "at most 1.00 % of its rows" in text and text.endswith("of the peers' rows 20.00 %.")
