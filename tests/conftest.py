"""Shared fixtures: one thread, seeded generators, and the skip of GPU tests where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the models of the tests are too small to share


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20190609)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
