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
    """Latencies that a tuned setting must keep. A latency that is left out is not looked at."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "has(self.timePerOutputToken) || has(self.timeToFirstToken)",
                "write timePerOutputToken, timeToFirstToken or both, or leave slo out",
            )
        )
    )

    time_per_output_token: Annotated[timedelta, DurationRange("1ms", "1m")] | None = None
    """Time per output token (TPOT) of a request, such as 40ms. Not the time between tokens: a step that yields several
    tokens counts as one gap there."""
    time_to_first_token: Annotated[timedelta, DurationRange("1ms", "1h")] | None = None
    """Time from a request's arrival to its first token (TTFT), such as 1s."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percent of the requests that have to be within the times."""

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
    """How Aerie chooses the number of tokens, and the mode: off, fixed, by batch size, or adaptive."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"{cel_any_malformed_duration('self.decisionInterval', 'self.historyWindow')} || "
                "duration(self.decisionInterval) + duration(self.decisionInterval) <= duration(self.historyWindow)",
                "historyWindow is shorter than two decision intervals, and a decision needs the metrics of more than one: lengthen "
                "historyWindow or shorten decisionInterval",
                "'historyWindow (%s) is shorter than two decision intervals (%s), and a decision needs the metrics of more than "
                "one: lengthen historyWindow or shorten decisionInterval'.format([self.historyWindow, self.decisionInterval])",
                ".historyWindow",
            )
        )
    )

    mode: Literal["Auto", "Recommend", "Off"] = "Recommend"
    """Auto: a setting that the model of the engine's steps finds better is proven by a canary and then kept; writing it grants
    the canaries their pods, which with rollout.canary.capacity Surge come on top of spec.replicas. Recommend: it is shown in the
    status only; what is in force stays, and no pod is made. Off: spec.speculation.numSpeculativeTokens stands, and what was chosen before is
    taken back by a rollout."""
    max_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 7
    """Most tokens per step that tuning may choose; not below spec.speculation.numSpeculativeTokens. What it has chosen beyond that is void at
    once. Without effect in mode Off."""
    when_zero: Literal["Keep", "Try"] = "Keep"
    """What happens where spec.speculation.numSpeculativeTokens is 0. Keep: no canary drafts, and nothing is recommended. Try: tuning may try
    drafts, beginning with no speculation; spec.drafter has to be named for that."""
    traffic_sampling: Literal["Greedy", "Sampled"] | None = None
    """What most requests are: Greedy, with temperature 0, or Sampled, with one above. vLLM has no metric that says it. Where it
    is Sampled and draftSampling is not written, the status recommends Probabilistic; nothing tries it by itself. Default: not
    known, and nothing is recommended."""
    slo: LatencyObjective | None = None
    """Latencies that a chosen setting must keep; a stricter one voids at once what was proven under another. Default: none, the
    throughput decides. A canary is compared with its control by the share of requests beyond these times, and by the mean where
    none is given."""
    decision_interval: Annotated[timedelta, DurationRange("10s", "24h")] = timedelta(minutes=30)
    """How often a setting is decided on, and for how long a canary runs that is only to teach what its setting costs."""
    cooldown_duration: Annotated[timedelta, DurationRange("0s", "168h")] = timedelta(hours=6)
    """Time after a change before the next one is tried; after a trial that ended undecided as well, each time once more; after
    one that was taken back or failed, four times as long, and twice as long again each time the same setting fails."""
    history_window: Annotated[timedelta, DurationRange("1m", "168h")] = timedelta(hours=24)
    """How far back the figures reach that a decision rests on: well beyond the daily ups and downs of the load."""


class SpeculationSpec(ResourceModel):
    """How many tokens the drafter proposes per step, and whether Aerie changes that by itself."""

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
    """Tokens proposed per step (num_speculative_tokens, K); what tuning starts from. 0 serves without a drafter, and
    tuning tries none unless tuning.whenZero is Try."""
    draft_sampling: DraftSampling | None = None
    """How the drafter chooses its tokens (draft_sample_method). Greedy: the likeliest one. Probabilistic: by its probabilities,
    at the temperature of the request, which are then held against the target's: more may be accepted at temperatures above 0,
    nothing changes at 0, and the draft logits take memory for each request; vLLM 0.22.0 or newer. Both are lossless. Default:
    as the engine does, which is Greedy up to vLLM 0.33.0. A change is rolled out like another drafter."""
    engine_options: EngineOptions | None = None
    """Further keys of the speculative config, as vLLM calls them. Refused are those that another field says, that change what
    the model answers, and those that Aerie does not know (it knows those of vLLM 0.26.0 to 0.33.0). A change is rolled out."""
    tuning: TuningSpec = TuningSpec()
