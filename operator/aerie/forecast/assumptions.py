"""What is assumed of requests, with the measurements that the assumptions are from.

Requests come by Poisson at a constant rate. Answers have log-normal lengths, and tokens come at a constant speed, so a request
lasts in proportion to its length. A request's steps per token deviate from their mean by a log-normal factor. A canary with an
effect takes 1 / (1 + effect) of the steps for the same tokens, and a step takes equally long with both drafters.

* Deviation of requests: the mean of n requests has a standard error of sqrt(0.0744 / n), of which unequal lengths are a part. On
  166 prompts, the difference of the two drafters' means had one of 2.99 %.
* Deviation of pairs, and lengths: `aerie.analysis.paired.power`. On the same 166 prompts in pairs, the standard error was 1.01 %.
* Time of a step: the ratio of its means in adjacent windows deviated by 10 to 12 % for windows of 3 to 16 s, on 2 cores of a CPU
  (`aerie.analysis.switchback.design`). So longer windows do not vary less. GPUs were not measured.
* Pods: the permanent difference in the time of a step is the assumption of the rule between pods, and not measured
  (`aerie.analysis.criteria.sequence_parameters`).

The first three are of EAGLE 3 and EAGLE 3.1 of the bundle, K = 3, temperature 0, on real vLLM 0.32.

Not guaranteed: that other traffic varies so. Answers were short, 41 tokens on average. Tenants and a drifting mix vary more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aerie.analysis.criteria.sequence_parameters import UNCALIBRATED_POD_EFFECT
from aerie.analysis.paired.power import GREEDY_NOISE

TOKENS_PER_STEP = 2.2
"""Mean tokens per step; matters for the drafts of a block alone."""
DEVIATION = math.sqrt(0.0744 / GREEDY_NOISE.size_dispersion)
STEP_TIME_DEVIATION = 0.1 / math.sqrt(2)


@dataclass(frozen=True)
class Requests:
    """What is assumed of requests."""

    per_second: float
    """Users' requests per second and pod."""
    seconds: float = 5.0
    """Mean duration of a request in seconds."""
    tokens: float = 200.0
    """Mean tokens of an answer."""
    deviation: float = DEVIATION
    """Standard deviation of a request's steps per token, relative to the mean."""
    pair_deviation: float = GREEDY_NOISE.deviation
    """Standard deviation of the ratio of steps of two answers to one request."""
    size_dispersion: float = GREEDY_NOISE.size_dispersion
    """Mean square of lengths over the square of their mean, above 1."""
    step_time_deviation: float = STEP_TIME_DEVIATION
    """Standard deviation of the mean time of a step in a window or block of a pod."""
    pod_deviation: float = UNCALIBRATED_POD_EFFECT.sd
    """Standard deviation of the permanent difference of a pod in the time of a step."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one request."""
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return TOKENS_PER_STEP / self.tokens_per_second
