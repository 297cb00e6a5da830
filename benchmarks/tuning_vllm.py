"""Tuning of real vLLM on CPU with the bundle's models, where speculation is slower; measured as in tests/vllm/test_tuning.

| key                        | what is measured                                                                                |
|----------------------------|-------------------------------------------------------------------------------------------------|
| ms_per_token_KEY_bN        | a user's mean time per output token at a batch of N: K = 3, K = 1, the schedule 1-2:3,3-8:1, off  |
| kbar_deviation             | the most by which draft tokens per draft differed from the setting, in any window                |
| says_off                   | 1 if the tuner, with telemetry of K = 3 and of no speculation, decides to turn it off            |
| off_predicted_pct          | gain of no speculation over K = 3 by its forecast, with the 5 and 95 % points                    |
| off_measured_pct_bN        | gain in a user's tokens per second that was measured, by batch                                   |
| off_forecast_pct_bN        | the same by its forecast, at the same batch; at the same requests, as above, it is another       |
| unseen_off_predicted_pct   | the forecast of the same gain with telemetry of K = 3 and K = 1 alone, with its points           |

Two engines share two cores; the results compare settings with each other, and show nothing about a GPU.
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
        steady = run_steady(vllm, Path(scratch))
    print(steady.tuner_result.explanation)
    without_off = run_tuner([steady.engines[CURRENT_SETTING], steady.engines[OTHER_SETTING]])
    print("Without the figures of no speculation:\n\n" + without_off.explanation)
    times = {
        f"ms_per_token_{_key(setting)}_b{batch}": round(1000 * engine.seconds_per_token(batch), 3)
        for setting, engine in steady.engines.items()
        for batch in BATCH_SIZES
    }
    return {
        **times,
        "kbar_deviation": max(_deviation(engine) for engine in steady.engines.values()),
        "says_off": float(steady.tuner_result.decision.setting == Off()),
        **_predicted("off", steady.tuner_result.decision),
        **{f"off_measured_pct_b{batch}": round(100 * gain, 1) for batch, gain in steady.mean_gain.items()},
        **{f"off_forecast_pct_b{batch}": round(100 * middle, 1) for batch, (_, middle, _) in steady.forecast_quantiles.items()},
        **_predicted("unseen_off", without_off.decision),
    }


def _key(setting: SpeculationSetting) -> str:
    match setting:
        case Off():
            return "off"
        case Static(tokens):
            return f"k{tokens}"
    return "schedule"


def _deviation(engine: MeasuredEngine) -> float:
    if isinstance(engine.setting, Off):
        return 0.0
    deviation = 0.0
    for batch, windows in engine.windows.items():
        expected_tokens = engine.setting.tokens_at(batch) if isinstance(engine.setting, Schedule) else OTHER_SETTING.tokens
        expected_tokens = engine.setting.tokens if isinstance(engine.setting, Static) else expected_tokens
        for window in windows:
            drafted = rates.mean_draft_length(window.counters)
            deviation = max(deviation, abs(drafted - expected_tokens) if isinstance(drafted, float) else float("inf"))
    return deviation


def _predicted(name: str, decision: TuningDecision) -> dict[str, float]:
    low, _, middle, high = next(
        (prediction.gain for prediction in decision.predictions if prediction.setting == Off()), (float("nan"),) * 4
    )
    points = {"predicted_pct": middle, "predicted_low_pct": low, "predicted_high_pct": high}
    return {f"{name}_{key}": round(100 * value, 1) for key, value in points.items()}
