"""Optimisers by name for `torch.hub`: ``torch.hub.load("sanc-optim/sanc", "sanc", model.parameters())``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from sanc import ARC as arc  # noqa: N811
from sanc import CR as cr  # noqa: N811
from sanc import CRM as crm  # noqa: N811
from sanc import NCD as ncd  # noqa: N811
from sanc import SANC as sanc  # noqa: N811
from sanc import SCR as scr  # noqa: N811

dependencies = ["torch", "numpy", "scipy"]

__all__ = ["arc", "cr", "crm", "ncd", "sanc", "scr"]
