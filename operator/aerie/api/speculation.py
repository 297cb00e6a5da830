"""Number of draft tokens per verification step, and the limits within which Aerie may change it automatically."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from aerie.api.engine_options import EngineOptions
from aerie.api.types.base import DurationRange, ResourceModel, ValidationRule, cel_any_malformed_duration, schema_extra

MAX_SPECULATIVE_TOKENS = 15
"""Maximum of draft tokens per verification step."""

DraftSampling = Literal["Greedy", "Probabilistic"]
"""How the drafter samples its tokens."""


class LatencyObjective(ResourceModel):
    """Latency limits that a tuned setting must keep. A latency without a limit is not considered."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "has(self.timePerOutputToken) || has(self.timeToFirstToken)",
                "write timePerOutputToken, timeToFirstToken or both, or leave slo out",
            )
        )
    )

    time_per_output_token: Annotated[timedelta, DurationRange("1ms", "1m")] | None = None
    """Maximum time per output token (TPOT) of a request, such as 40ms. It is not the time between tokens: a step that yields
    several tokens counts as one gap there."""
    time_to_first_token: Annotated[timedelta, DurationRange("1ms", "1h")] | None = None
    """Maximum time from a request's arrival to its first token (TTFT), such as 1s."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percentage of the requests that have to be within the limits."""

    def is_stricter_than(self, other: LatencyObjective | None) -> bool:
        """Return whether a setting may meet the other objective and miss this one."""
        if other is None:
            return True
        pairs = (
            (self.time_per_output_token, other.time_per_output_token),
            (self.time_to_first_token, other.time_to_first_token),
        )
        has_lower_limit = any(
            own_limit is not None and (other_limit is None or own_limit < other_limit) for own_limit, other_limit in pairs
        )
        return has_lower_limit or self.percentile > other.percentile


class TuningSpec(ResourceModel):
    """Automatic choice of the speculation setting: off, a fixed number of draft tokens, a schedule by batch size, or adaptive."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"{cel_any_malformed_duration('self.decisionInterval', 'self.historyWindow')} || "
                "duration(self.decisionInterval) + duration(self.decisionInterval) <= duration(self.historyWindow)",
                "historyWindow is shorter than two decision intervals, and a decision needs the metrics of more than one: "
                "lengthen historyWindow or shorten decisionInterval",
                "'historyWindow (%s) is shorter than two decision intervals (%s), and a decision needs the metrics of more than "
                "one: lengthen historyWindow or shorten decisionInterval'.format([self.historyWindow, self.decisionInterval])",
                ".historyWindow",
            )
        )
    )

    mode: Literal["Auto", "Recommend", "Off"] = "Recommend"
    """Auto: a setting that the model of the engine's steps predicts to be better is tested by a canary, and then kept. Auto
    permits the pods of these canaries, which are additional to spec.replicas with rollout.canary.capacity Surge. Recommend: the
    setting is only shown in the status; the active setting stays, and no pod is created. Off:
    spec.speculation.numSpeculativeTokens applies, and a setting that tuning applied before is reverted by a rollout."""
    max_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 7
    """Maximum number of draft tokens per step that tuning may choose, at least spec.speculation.numSpeculativeTokens. A lower
    maximum immediately voids an applied setting above it."""
    when_zero: Literal["Keep", "Try"] = "Keep"
    """Behaviour when spec.speculation.numSpeculativeTokens is 0. Keep: no canary drafts, and nothing is recommended. Try: tuning
    may test drafts, starting with no speculation; it requires spec.drafter."""
    traffic_sampling: Literal["Greedy", "Sampled"] | None = None
    """Sampling of most requests: Greedy, with temperature 0, or Sampled, with a temperature above 0. vLLM has no metric for it.
    With Sampled, and without draftSampling, the status recommends Probabilistic; no trial tests it automatically. Default:
    unknown, and nothing is recommended."""
    slo: LatencyObjective | None = None
    """Latency limits that a tuned setting must keep. Stricter limits immediately void a setting that was tested under others.
    Default: none; throughput decides. A canary is compared with its control by the share of requests beyond these limits, or by
    mean latency without limits."""
    decision_interval: Annotated[timedelta, DurationRange("10s", "24h")] = timedelta(minutes=30)
    """Time between two decisions on the setting, and duration of a canary that only explores what its setting costs."""
    cooldown_duration: Annotated[timedelta, DurationRange("0s", "168h")] = timedelta(hours=6)
    """Time after a change before the next trial. After n recent inconclusive trials it is n times as long, at most four times.
    After a trial that was rolled back or failed it is four times as long, and doubles each time the same setting fails."""
    history_window: Annotated[timedelta, DurationRange("1m", "168h")] = timedelta(hours=24)
    """Time span of the metrics on which a decision is based. It should be well beyond the daily variation of the load."""


class SpeculationSpec(ResourceModel):
    """Number of draft tokens per verification step, and its tuning."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "self.tuning.mode == 'Off' || self.tuning.maxSpeculativeTokens >= self.numSpeculativeTokens",
                "tuning.maxSpeculativeTokens is below numSpeculativeTokens: raise tuning.maxSpeculativeTokens or lower "
                "numSpeculativeTokens",
                "'tuning.maxSpeculativeTokens is %d, below numSpeculativeTokens, which is %d: raise tuning.maxSpeculativeTokens "
                "or lower numSpeculativeTokens'.format([self.tuning.maxSpeculativeTokens, self.numSpeculativeTokens])",
                ".tuning.maxSpeculativeTokens",
            )
        )
    )

    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] = 3
    """Draft tokens per verification step (num_speculative_tokens, K); tuning starts from it. 0 serves without a drafter, and
    tuning tests none unless tuning.whenZero is Try."""
    draft_sampling: DraftSampling | None = None
    """Sampling of draft tokens (draft_sample_method). Greedy: the most likely token. Probabilistic: by the drafter's
    probabilities, at the temperature of the request; verification compares them with the target's. More draft tokens may be
    accepted at temperatures above 0, and nothing changes at 0. The draft logits take memory for each request, and vLLM 0.22.0 or
    newer is required. Both are lossless. Default: the engine's, which is Greedy up to vLLM 0.33.0. A change is rolled out like
    another drafter."""
    engine_options: EngineOptions | None = None
    """Further keys of the speculative config, with vLLM's names. Rejected are keys that another field sets, keys that change the
    model's outputs, and keys that Aerie does not know. It knows those of vLLM 0.26.0 to 0.33.0. A change is rolled out."""
    tuning: TuningSpec = TuningSpec()
