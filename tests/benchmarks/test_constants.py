"""The constants that `benchmarks.constants` varies exist, and each of its other values differs from the present one."""

import pytest

from benchmarks import constants

NAMED = {
    name: values
    for part in (constants.EXACT, constants.BOUNDS, constants.DIAGNOSIS, constants.SAMPLES)
    for name, values in part.items()
}


@pytest.mark.parametrize("names", NAMED)
def test_every_constant_exists_and_is_varied(names):
    present = {constants.value_of(name) for name in names.split(", ")}
    assert len(present) == 1, "modules that share a constant have the same value"
    assert not present & set(map(float, NAMED[names]))
