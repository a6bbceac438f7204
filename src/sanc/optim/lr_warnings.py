"""Warnings of an `lr` that was meant as a step size, since it is a factor on the one that the method determines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LR_WARNING_LIMIT = 0.5
"""An `lr` below this was probably meant as a step size: Adam and SGD have at most 0.1, and schedules start at 1."""
_MAX_USUAL_STEP_SIZE, _STEPS_WITHOUT_RISE = 0.1, 50
"""A schedule was probably made for Adam or SGD if it keeps `lr` at most at their largest step size, without a rise in
so many steps. A warm-up rises in every step, starts at a third, or rises once an epoch by a scheduler, which stores the
final value in the groups as ``initial_lr``."""
_MAX_SEARCH_START = 1e-6
"""Searches for a learning rate start at this or less, schedules at 0 or at more."""
_MAX_WARM_UP_STEPS = 500
"""Steps within which the warm-up of a schedule is expected to exceed `_LR_WARNING_LIMIT`."""


@dataclass(frozen=True, slots=True)
class LrWatch:
    """What was seen of `lr` in the steps so far.

    Attributes
    ----------
    ended : bool
        Whether it is not watched any more: it was large, or the warning was given.
    highest : float
        The largest `lr` so far.
    steps : int
        Steps so far.
    last_rise : int
        The last of these steps in which `lr` rose.
    """

    ended: bool = False
    highest: float = 0.0
    steps: int = 0
    last_rise: int = 0

    def after(self, groups: Sequence[Mapping[str, Any]]) -> tuple[LrWatch, str]:
        """Return the watch after a step with these groups, and the text of a warning, empty if there is none.

        There is one warning if every `lr` is small: in a search, or if it falls again, does not rise, or has a long
        warm-up.
        """
        if self.ended:
            return self, ""
        lr = max(group["lr"] for group in groups)
        steps, highest = self.steps + 1, max(self.highest, lr)
        last_rise = steps if lr > self.highest else self.last_rise
        watch = replace(self, highest=highest, steps=steps, last_rise=last_rise, ended=highest >= _LR_WARNING_LIMIT)
        intended = max(highest, *(group.get("initial_lr", 0.0) for group in groups))
        if steps == 1 and 0.0 < intended <= _MAX_SEARCH_START:
            return replace(watch, ended=True), (
                f"lr = {intended:.3g} in the first step, as in a search for a learning rate such as lr_find: leave the "
                "search out and lr at 1, since lr is a factor on the step size that the method determines."
            )
        stays = intended <= _MAX_USUAL_STEP_SIZE and steps - last_rise >= _STEPS_WITHOUT_RISE
        if watch.ended or not (lr < self.highest or stays or steps >= _MAX_WARM_UP_STEPS):
            return watch, ""
        return replace(watch, ended=True), (
            f"lr was at most {highest:.3g} in {steps} steps: it is a factor on the step size that the method "
            "determines, not a step size. Let the schedule rise to 1, as with max_lr=1.0, or leave it out."
        )


def first_warning(lr: float) -> str:
    """Return the text of the warning of an optimiser that is constructed with this largest `lr`; empty if it is 1."""
    if lr >= _LR_WARNING_LIMIT:
        return ""
    return (
        f"lr = {lr!r} is a factor on the step size that the method determines, not a step size: leave it at 1, unless "
        "a scheduler starts at this value. A search such as lr_find is not needed."
    )
