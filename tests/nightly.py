"""Parameters of a test, of which `make test` uses some and `make test-all` all.

For another seed, size or fault of a check that the remaining parameters make too: never for the only test of a behaviour. A whole
test with the mark has a comment that names the tests of the same behaviour that stay, often with fewer real parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet


def use_each_nth(step: int, values: Sequence[object]) -> list[object | ParameterSet]:
    """Return all values, those marked `nightly` that are not at a multiple of `step`."""
    return [value if index % step == 0 else at_night(value) for index, value in enumerate(values)]


def at_night(value: object) -> ParameterSet:
    """Return a value of `parametrize` that is marked `nightly`. A tuple has the values of several arguments."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)
