"""Settings that tuning may choose, on real vLLM: engines draft what the setting says, and where drafts cost more than they bring
the tuner says so.

Each setting is given to an engine by the arguments that Aerie writes. On CPU a step of the small target takes little longer than
one of its drafter, so speculation loses: what a tuner has to find out. aerie_lab.testing.steady has how it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from aerie.engine.metrics import rates
from aerie.engine.speculation import Off, Schedule, Static, max_speculative_tokens
from aerie.tuning.decision.types import TuningAction
from aerie_lab.testing.steady import (
    BATCH_SIZES,
    CURRENT_SETTING,
    MIN_WINDOW_STEPS,
    OTHER_SETTING,
    SCHEDULE_SETTING,
    SteadyReport,
    run_steady,
)

SOME_STEPS = 6 / MIN_WINDOW_STEPS
"""A page's counters are not of one instant: between two of them there may be a step, and on busy cores up to four were seen, and
27 on one page of all. So what compares two of them is asked of the median window."""
FORECAST_TOLERANCE = 0.25
"""Share of a speed-up: far below what speculation loses here, which is a factor of two."""
pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM


@pytest.fixture(scope="module")
def told(vllm: Path, tmp_path_factory: pytest.TempPathFactory, report_progress: Callable[[str], None]) -> SteadyReport:
    found = run_steady(vllm, tmp_path_factory.mktemp("tuning"))
    report_progress(found.tuner_result.explanation)
    return found


@pytest.mark.parametrize("batch", BATCH_SIZES)
@pytest.mark.parametrize("setting", [CURRENT_SETTING, OTHER_SETTING, SCHEDULE_SETTING], ids=str)
def test_an_engine_drafts_what_its_setting_says(told: SteadyReport, setting: Static | Schedule, batch: int) -> None:
    wanted = setting.tokens_at(batch) if isinstance(setting, Schedule) else setting.tokens
    batches, verified = [], []
    for window in told.engines[setting].windows[batch]:
        counted = window.counters
        known = rates.mean_batch(counted)
        assert isinstance(known, rates.Bounds)
        batches.append((known.low, known.high))
        assert rates.mean_draft_length(counted) == wanted
        assert counted.speculation is not None
        verified.append(counted.speculation.drafts / counted.request_steps)
        # Every position that the engine is built for is counted, and none beyond what it drafted.
        assert len(counted.speculation.accepted_per_position) == max_speculative_tokens(setting)
        assert not any(counted.speculation.accepted_per_position[wanted:])
    assert [median(ends) for ends in zip(*batches, strict=True)] == pytest.approx([batch, batch], rel=SOME_STEPS)
    assert median(verified) == pytest.approx(1, rel=SOME_STEPS), "each step of a request verifies a draft"


def test_an_engine_without_speculation_counts_no_drafts(told: SteadyReport) -> None:
    for batch in BATCH_SIZES:
        counted = [window.counters for window in told.engines[Off()].windows[batch]]
        assert all(one.speculation is None for one in counted)
        tokens = [known for one in counted if not isinstance(known := rates.tokens_per_step(one), rates.Unknown)]
        assert len(tokens) == len(counted)
        assert median(tokens) == pytest.approx(1, rel=SOME_STEPS)


def test_speculation_that_loses_is_turned_off(told: SteadyReport) -> None:
    found, text = told.tuner_result.decision, told.tuner_result.explanation
    assert (found.action, found.setting) == (TuningAction.CHANGE, Off()), text
    assert found.reason.startswith("speculation is slower on this load: the gain without it is +")
    gains = {one.setting: one.gain for one in found.predictions}
    assert gains[Off()][0] > 0, text
    # The figures are in the account that a person gets.
    for part in ("CHANGE to no speculation", "acceptance ", "step time ", "no speculation ", "measured at K = 3, off"):
        assert part in text, text


def test_what_the_tuner_says_is_what_was_measured(told: SteadyReport) -> None:
    """Its forecast of each batch is about a speed-up that was measured: it is fitted over batches, and cores may be busy.

    How near it is says `make bench NAME=tuning_vllm`.
    """
    assert min(told.median_gain.values()) > 0, told.median_gain
    measured = [
        1 + gain for gain in told.mean_gain.values()
    ]  # over all windows, as it has them: what slowed some of them is in both
    for low, _, high in told.forecast_quantiles.values():
        assert 1 + low < (1 + FORECAST_TOLERANCE) * max(measured), told.mean_gain
        assert 1 + high > (1 - FORECAST_TOLERANCE) * min(measured), told.mean_gain
