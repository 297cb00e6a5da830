"""How many tokens are proposed per step, and how far Aerie may change that by itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from aerie.api.base import Between, Model, Rule, rules, unless_malformed
from aerie.api.engine_options import EngineOptions

MOST_TOKENS = 15
"""Most tokens that may be proposed per step."""

DraftSampling = Literal["Greedy", "Probabilistic"]
"""How the drafter chooses its tokens."""


class LatencyObjective(Model):
    """Latencies that a tuned setting must keep. A latency that is left out is not looked at."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "has(self.timePerOutputToken) || has(self.timeToFirstToken)",
                "write timePerOutputToken, timeToFirstToken or both, or leave slo out",
            )
        )
    )

    time_per_output_token: Annotated[timedelta, Between("1ms", "1m")] | None = None
    """Time per output token (TPOT) of a request, such as 40ms. Not the time between tokens: a step that yields several
    tokens counts as one gap there."""
    time_to_first_token: Annotated[timedelta, Between("1ms", "1h")] | None = None
    """Time from a request's arrival to its first token (TTFT), such as 1s."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percent of the requests that have to be within the times."""

    def stricter_than(self, other: LatencyObjective | None) -> bool:
        """Whether something may keep the other one and not this one."""
        if other is None:
            return True
        pairs = (
            (self.time_per_output_token, other.time_per_output_token),
            (self.time_to_first_token, other.time_to_first_token),
        )
        lower = any(mine is not None and (theirs is None or mine < theirs) for mine, theirs in pairs)
        return lower or self.percentile > other.percentile


class Tuning(Model):
    """How Aerie chooses the number of tokens, and the mode: off, fixed, by batch size, or adaptive."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                f"{unless_malformed('self.interval', 'self.history')} || "
                "duration(self.interval) + duration(self.interval) <= duration(self.history)",
                "history is shorter than two intervals, and a decision needs more than the figures of one: lengthen history or "
                "shorten interval",
                "'history (%s) is shorter than two intervals (%s), and a decision needs more than the figures of one: lengthen "
                "history or shorten interval'.format([self.history, self.interval])",
                ".history",
            )
        )
    )

    mode: Literal["Auto", "Recommend", "Off"] = "Recommend"
    """Auto: a setting that the model of the engine's steps finds better is proven by a canary and then kept; writing it grants
    the canaries their pods, which with rollout.canary.capacity Surge come on top of spec.replicas. Recommend: it is shown in the
    status only; what is in force stays, and no pod is made. Off: spec.speculation.tokens stands, and what was chosen before is
    taken back by a rollout."""
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 7
    """Most tokens per step that tuning may choose; not below spec.speculation.tokens. What it has chosen beyond that is void at
    once. Without effect in mode Off."""
    when_zero: Literal["Keep", "Try"] = "Keep"
    """What happens where spec.speculation.tokens is 0. Keep: no canary drafts, and nothing is recommended. Try: tuning may try
    drafts, beginning with no speculation; spec.drafter has to be named for that."""
    traffic: Literal["Greedy", "Sampled"] | None = None
    """What most requests are: Greedy, with temperature 0, or Sampled, with one above. vLLM has no metric that says it. Where it
    is Sampled and draftSampling is not written, the status recommends Probabilistic; nothing tries it by itself. Default: not
    known, and nothing is recommended."""
    slo: LatencyObjective | None = None
    """Latencies that a chosen setting must keep; a stricter one voids at once what was proven under another. Default: none, the
    throughput decides. A canary is compared with its control by the share of requests beyond these times, and by the mean where
    none is given."""
    interval: Annotated[timedelta, Between("10s", "24h")] = timedelta(minutes=30)
    """How often a setting is decided on, and for how long a canary runs that is only to teach what its setting costs."""
    cooldown: Annotated[timedelta, Between("0s", "168h")] = timedelta(hours=6)
    """Time after a change before the next one is tried; after a trial that ended undecided as well, each time once more; after
    one that was taken back or failed, four times as long, and twice as long again each time the same setting fails."""
    history: Annotated[timedelta, Between("1m", "168h")] = timedelta(hours=24)
    """How far back the figures reach that a decision rests on: well beyond the daily ups and downs of the load."""


class Speculation(Model):
    """How many tokens the drafter proposes per step, and whether Aerie changes that by itself."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.tuning.mode == 'Off' || self.tuning.maxTokens >= self.tokens",
                "tuning.maxTokens is below tokens: raise tuning.maxTokens or lower tokens",
                "'tuning.maxTokens is %d, below tokens, which is %d: raise tuning.maxTokens or lower tokens'"
                ".format([self.tuning.maxTokens, self.tokens])",
                ".tuning.maxTokens",
            )
        )
    )

    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 3
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
    tuning: Tuning = Tuning()
