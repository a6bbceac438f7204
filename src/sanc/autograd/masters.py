"""Master values: float32 values of parameters that are stored in bfloat16 or float16.

The steps of an optimiser are far shorter than the distance between two numbers of such a type, so that most of them
would be rounded away if they were added to the parameters. The vectors of the optimiser are therefore float32, and
the parameters hold them rounded to the nearest number of their type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types of parameters that have master values."""


class MasterValues:
    """The float32 values that were last written to parameters of low precision.

    Attributes
    ----------
    values : dict
        A float32 tensor for each parameter, or for the part of it that this process holds.
    """

    def __init__(self) -> None:
        self.values: dict[Tensor, Tensor] = {}

    def read(self, parameter: Tensor, held: Tensor) -> Tensor:
        """Return the float32 values of a parameter, of which this process holds `held`.

        Entries that differ from the rounded master value were changed by the caller, and count as they are.
        """
        master = self._fitting(parameter, held)
        return held.float() if master is None else torch.where(master.to(held.dtype) == held, master, held.float())

    def write(self, parameters: Sequence[Tensor], held: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Copy new values of parameters of low precision; others are left out.

        They are copied into the memory of the last ones, so that a recording of these copies can be replayed.
        """
        for parameter, local, part in zip(parameters, held, parts, strict=True):
            if parameter.dtype in LOW_PRECISION:
                master = self._fitting(parameter, local)
                if master is None:
                    self.values[parameter] = part.detach().clone()
                else:
                    master.copy_(part)

    def keep_only(self, parameters: Iterable[Tensor]) -> None:
        """Drop the values of all other parameters, which keep their rounded values."""
        kept = set(map(id, parameters))
        self.values = {parameter: value for parameter, value in self.values.items() if id(parameter) in kept}

    def _fitting(self, parameter: Tensor, held: Tensor) -> Tensor | None:
        """Return the master values of a parameter; None if there are none of this shape on this device."""
        master = self.values.get(parameter)
        return master if master is not None and (master.shape, master.device) == (held.shape, held.device) else None
