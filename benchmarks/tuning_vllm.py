"""What tuning makes of real vLLM on CPU with the bundle's models, where speculation loses; measured as in tests/vllm/test_tuning.

| key                        | what is measured                                                                                |
|----------------------------|-------------------------------------------------------------------------------------------------|
| ms_per_token_KEY_bN        | a user's mean time per output token at a batch of N: K = 3, K = 1, the schedule 1-2:3,3-8:1, off  |
| kbar_deviation             | the most by which draft tokens per draft differed from the setting, in any window                |
| says_off                   | 1 if the tuner, with the figures of K = 3 and of no speculation, says to turn it off             |
| off_predicted_pct          | gain of no speculation over K = 3 by its forecast, with the 5 and 95 % points                    |
| off_measured_pct_bN        | gain in a user's tokens per second that was measured, by batch                                   |
| off_forecast_pct_bN        | the same by its forecast, at the same batch; at the same requests, as above, it is another       |
| unseen_off_predicted_pct   | the forecast of the same gain with the figures of K = 3 and K = 1 alone, with its points         |

Two engines share two cores; the figures compare settings with each other, and say nothing about a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from aerie.engine.metrics import rates
from aerie.engine.speculation import Off, Schedule, SpeculationSetting, Static
from aerie.tuning.decision.types import TuningDecision
from aerie_lab.binaries import ensure_family
from aerie_lab.testing.steady import BATCH_SIZES, CURRENT_SETTING, OTHER_SETTING, MeasuredEngine, run_steady, run_tuner


def measure() -> dict[str, float]:
    vllm = ensure_family("vllm", lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        told = run_steady(vllm, Path(scratch))
    print(told.tuner_result.explanation)
    unseen = run_tuner([told.engines[CURRENT_SETTING], told.engines[OTHER_SETTING]])
    print("Without the figures of no speculation:\n\n" + unseen.explanation)
    times = {
        f"ms_per_token_{_key(setting)}_b{batch}": round(1000 * one.seconds_per_token(batch), 3)
        for setting, one in told.engines.items()
        for batch in BATCH_SIZES
    }
    return {
        **times,
        "kbar_deviation": max(_deviation(one) for one in told.engines.values()),
        "says_off": float(told.tuner_result.decision.setting == Off()),
        **_predicted("off", told.tuner_result.decision),
        **{f"off_measured_pct_b{batch}": round(100 * gain, 1) for batch, gain in told.mean_gain.items()},
        **{f"off_forecast_pct_b{batch}": round(100 * middle, 1) for batch, (_, middle, _) in told.forecast_quantiles.items()},
        **_predicted("unseen_off", unseen.decision),
    }


def _key(setting: SpeculationSetting) -> str:
    match setting:
        case Off():
            return "off"
        case Static(tokens):
            return f"k{tokens}"
    return "schedule"


def _deviation(one: MeasuredEngine) -> float:
    if isinstance(one.setting, Off):
        return 0.0
    found = 0.0
    for batch, taken in one.windows.items():
        wanted = one.setting.tokens_at(batch) if isinstance(one.setting, Schedule) else OTHER_SETTING.tokens
        wanted = one.setting.tokens if isinstance(one.setting, Static) else wanted
        for window in taken:
            drafted = rates.mean_draft_length(window.counters)
            found = max(found, abs(drafted - wanted) if isinstance(drafted, float) else float("inf"))
    return found


def _predicted(name: str, decision: TuningDecision) -> dict[str, float]:
    low, _, middle, high = next((one.gain for one in decision.predictions if one.setting == Off()), (float("nan"),) * 4)
    points = {"predicted_pct": middle, "predicted_low_pct": low, "predicted_high_pct": high}
    return {f"{name}_{key}": round(100 * value, 1) for key, value in points.items()}
