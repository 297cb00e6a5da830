"""The benchmark of extensions: clear differences are decided by the deadline, and small ones in extensions too."""

from __future__ import annotations

import pytest

from benchmarks import extension
from benchmarks._verdict_cells import Cell, days
from benchmarks._verdict_model import Canary, Traffic

pytestmark = pytest.mark.slow

CALIBRATIONS = days(Traffic(), 3, range(1), seed=1)


def test_clear_differences_are_decided_by_the_deadline() -> None:
    assert extension.run(Cell("", "better", Canary(per_step=1.2, time=1 / 1.2)), range(2), CALIBRATIONS, 1) == ["Promote"] * 2
    assert extension.run(Cell("", "worse", Canary(per_step=0.8)), range(2), CALIBRATIONS, 1) == ["Rollback"] * 2


def test_equal_drafters_are_promoted_in_extensions_too() -> None:
    outcomes = extension.run(next(cell for cell in extension.CELLS if cell.key == "equal"), range(20), CALIBRATIONS, 1)
    assert {"Promote", "PromoteExtended", "Held"} <= set(outcomes)


def test_the_guardrails_roll_back_in_an_extension() -> None:
    cell = next(cell for cell in extension.CELLS if not cell.history)
    assert set(extension.run(cell, range(3), [], 1)) <= {"Held", "RollbackHeld"}
