"""Corrupt metrics: what a broken exporter, a proxy in between or an engine of another make would expose.

    missing        /metrics has status 404
    frozen         the exposition stays as it was when the corruption began, while the engine keeps working
    nan            the counters are NaN
    negative       the counters are below zero, and decrease
    renamed        the metric families have other names
    worse-drafter  half as many draft tokens are accepted from then on, so that answers take more steps: drafts, steps of
                   requests and their time grow 1.4 times as fast, accepted tokens 0.7 times. Where 1.5 tokens of a draft were
                   accepted, the total number of tokens stays the same

The engine itself keeps working. The option `metrics_corruption` sets the corruption from the start, and
POST /simulator/metrics-corruption at any time (`server`).
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from aerie_lab.errors import StateError

MetricsCorruption = Literal["missing", "frozen", "nan", "negative", "renamed", "worse-drafter"]
_DRAFTING_COUNTER_PATTERN = re.compile(
    r"^(vllm:(?:spec_decode_num_(?:accepted_tokens\w*|drafts|draft_tokens)_total|inter_token_latency_seconds_(?:count|bucket|sum))"
    r"(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)
_COUNTER_PATTERN = re.compile(r"^(vllm:\w+_(?:total|count|bucket)(?:\{.*\})?) (\S+)$", re.MULTILINE)


def parse_corruption(text: str) -> MetricsCorruption:
    """Return the corruption of this name. Raises StateError."""
    for name in get_args(MetricsCorruption):
        if text == name:
            corruption: MetricsCorruption = name
            return corruption
    raise StateError(f"there is no metrics corruption '{text}': one of {', '.join(get_args(MetricsCorruption))}.")


class MetricsCorruptor:
    """Turns the true exposition into a corrupt one."""

    def __init__(self, corruption: MetricsCorruption | None = None) -> None:
        self._corruption = corruption
        self._baseline_exposition: str | None = None

    def set_corruption(self, corruption: MetricsCorruption | None) -> None:
        """Corrupt the metrics in this way from now on; None: expose the true ones."""
        self._corruption, self._baseline_exposition = corruption, None

    def corrupt(self, exposition: str) -> str | None:
        """Return what is exposed instead of the true exposition; None: nothing at all."""
        match self._corruption:
            case None:
                return exposition
            case "missing":
                return None
            case "frozen":
                self._baseline_exposition = self._baseline_exposition or exposition
                return self._baseline_exposition
            case "nan":
                return _COUNTER_PATTERN.sub(r"\1 NaN", exposition)
            case "negative":
                return _COUNTER_PATTERN.sub(lambda sample: f"{sample[1]} {-1 - float(sample[2])}", exposition)
            case "renamed":
                return exposition.replace("vllm:", "engine:")
            case "worse-drafter":
                self._baseline_exposition = self._baseline_exposition or exposition
                baseline = {
                    sample[1]: float(sample[2]) for sample in _DRAFTING_COUNTER_PATTERN.finditer(self._baseline_exposition)
                }
                return _DRAFTING_COUNTER_PATTERN.sub(
                    lambda sample: f"{sample[1]} {_worsened_value(baseline, sample)}", exposition
                )


def _worsened_value(baseline: dict[str, float], sample: re.Match[str]) -> float:
    """Return a counter's value as if it had grown since the baseline with a worse drafter."""
    start, name = baseline.get(sample[1], 0.0), sample[1].partition("{")[0]  # a model may be called "accepted"
    increase = (7 if "accepted" in name else 14) * (float(sample[2]) - start)
    return start + (increase / 10 if name.endswith("_sum") else increase // 10)
