"""What Aerie writes about a resource: the state from which any replica of the operator goes on, and what a person reads.

Figures are rounded by whoever writes them, so that a status changes when something happened and not because time passed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from aerie.api.base import Json, Model, Time
from aerie.api.rollout import Analysis
from aerie.api.speculation import MOST_TOKENS, LatencyObjective

Text = Annotated[str, Field(max_length=1024)]
Word = Annotated[str, Field(max_length=128)]
Count = Annotated[int, Field(ge=0)]

Phase = Literal[
    "Pending",
    "Preflight",
    "Queued",
    "Starting",
    "Ready",
    "WarmingUp",
    "Analyzing",
    "AwaitingApproval",
    "Ramping",
    "Promoting",
    "Watching",
    "Rechecking",
    "RollingBack",
    "Held",
    "RolledBack",
    "Paused",
    "Failed",
]
Purpose = Literal["Rollout", "Trial"]
CanaryPhase = Literal["Starting", "WarmingUp", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"]


class Condition(Model):
    """One aspect of the state, as Kubernetes defines conditions."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Ready, Progressing, PreflightPassed, Degraded or Tuned."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$")]
    """Why, as one word for programs."""
    message: Annotated[str, Field(max_length=8192)]
    """Why, as a sentence for people, with what to do where something is wrong."""
    last_transition_time: Time
    """When status last changed."""
    observed_generation: Count | None = None
    """Generation of the resource that it speaks of."""


class Tier(Model):
    """One tier of a schedule: the number of tokens for a range of batch sizes."""

    first: Annotated[int, Field(ge=1)]
    """Smallest batch size of the tier."""
    last: Annotated[int, Field(ge=1)]
    """Largest batch size of the tier."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Tokens proposed per step."""


class Setting(Model):
    """A speculation setting."""

    mode: Literal["Off", "Static", "Schedule", "Adaptive"]
    """Off: no drafter. Static: the same number of tokens always. Schedule: by batch size. Adaptive: up to tokens, as the
    engine decides."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Most tokens proposed per step (K); 0 when off."""
    schedule: Annotated[list[Tier], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})] | None = None
    """Tiers of mode Schedule, by rising batch size."""


class Arm(Model):
    """The pods of one revision and what they achieve."""

    revision: Word
    """Hash of all that determines the pods: target, engine, drafter and speculation setting."""
    target: Text | None = None
    """The served model: its source in short, such as owner/name@ and the first characters of its commit."""
    drafter: Text | None = None
    """The drafter: its source in short, such as owner/name@ and the first characters of its commit. Absent without one."""
    setting: Setting | None = None
    """The speculation setting."""
    replicas: Count = 0
    """Pods that there should be."""
    ready_replicas: Count = 0
    """Pods that serve."""
    weight: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percent of the traffic; 1 where it is less and not nothing."""
    acceptance_length: float | None = None
    """Mean tokens per step over the latest traffic, the target's own included: 1 means that no proposed token was accepted.
    Absent without a drafter and before the first traffic; written again when it has moved by 3 %."""
    time_per_output_token: float | None = None
    """Seconds per output token after a request's first, over the latest traffic; written again when moved by 10 %."""
    time_to_first_token: float | None = None
    """Seconds from a request's arrival to its first token, over the latest traffic; written again when moved by 20 %."""
    accepted_length: float | None = None
    """The acceptance length with which it was accepted: the mean over the blocks of its analysis. Absent where it was not
    compared."""


class Queued(Model):
    """A rollout or a trial that may not begin yet, because as many are under way as the operator allows."""

    purpose: Purpose
    """Rollout: of what the spec asks for. Trial: of a speculation setting, by tuning."""
    since: Time
    """Since when it waits. In a namespace, what has waited for longest comes first."""


class Waiting(Model):
    """Pods that are asked for and do not serve."""

    since: Time
    """When they were asked for, or when one more of them served for the last time."""
    serving: Count
    """Most pods that served since then: more of them are progress."""


class CanaryArm(Arm):
    """The revision under judgement, with its control."""

    change: Text
    """What is new in it, in a word: the drafter, K=5, the target, the engine."""
    phase: CanaryPhase = "Starting"
    """Where it is on its way. status.phase says the same, but for a rollout that is paused."""
    started_at: Time
    """When its rollout began."""
    ready_at: Time | None = None
    """When all pods of both arms were ready for the first time: warm-up and deadline count from here."""
    step: Count | None = None
    """Step of the ramp, from 0."""
    step_started_at: Time | None = None
    """When the step, or the promotion, began."""
    control: Arm | None = None
    """The control pods: the stable revision, started together with the canary. Absent where the running pods are the control, and
    from the ramp on."""
    waiting: Waiting | None = None
    """What the phase waits for. Absent while all pods that it asks for serve."""


class PreviousArm(Arm):
    """The revision before the stable one, while pods of it stay after the promotion."""

    phase: Literal["Watching", "Rechecking"] = "Watching"
    """Watching: its pods get no requests. Rechecking: they do, because the acceptance length has fallen since the promotion."""
    since: Time
    """When this phase began."""
    change: Text
    """What is new in the stable revision, in a word."""
    started_at: Time
    """When the rollout of the stable revision began."""


class Comparison(Model):
    """One metric of the canary against the control, as of the last closed block."""

    metric: Word
    """Name of the metric."""
    blocks: Count
    """Blocks counted so far; of GreedyAnswers, prompts that were answered."""
    message: Text | None = None
    """What was found, where no figure says it."""
    estimate: float | None = None
    """Canary over control, less one: 0.05 is 5 % more."""
    lower: float | None = None
    """Lower bound of the estimate. It holds at every moment, however often it is looked at."""
    upper: float | None = None
    """Upper bound of the estimate, likewise."""


class AnalysisStatus(Model):
    """The running analysis, or the last one."""

    parameters: Analysis
    """The parameters, frozen when the analysis began: a later change of the spec does not move the bar."""
    verdict: Literal["Continue", "Promote", "Rollback", "Inconclusive"]
    """What the figures say. Continue: nothing yet."""
    reason: Annotated[str, Field(max_length=4096)] = ""
    """Why, as a sentence; while there is no decision, what is missing for one and how much longer it takes."""
    started_at: Time | None = None
    """When the first block began."""
    comparisons: Annotated[
        list[Comparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """The metrics that are compared. Once the canary is accepted or Held, those that it was accepted or held with."""
    history_blocks: Count | None = None
    """Blocks in which stable pods were counted before the analysis began, each of them: these tell how metrics scatter between
    equal pods. Absent while there were fewer than 120: then the bounds are those of a cautious guess, and wider."""
    inflation: float | None = None
    """How many blocks of the first metric count as one, because neighbours are alike; 3 is the cautious guess."""
    state: Annotated[str, Field(max_length=65536)] = ""
    """Accumulators from which the analysis goes on after a restart of the operator, packed. Private: their form may change."""


MOST_TRIED = 5
"""Trials that a status remembers."""


class Gain(Model):
    """By how much faster tokens come to the same requests, as a share: 0.05 is 5 % more of them a second."""

    estimate: float
    """The middle of what is thought likely, or was measured."""
    lower: float | None = None
    """A prediction: reached with 95 %. A measurement: the lower bound of its comparison."""
    upper: float | None = None
    """A prediction: not exceeded with 95 %. A measurement: the upper bound of its comparison."""


class Chosen(Model):
    """A setting that is in force in place of spec.speculation.tokens, because a canary has proven it."""

    setting: Setting
    """The setting."""
    revision: Word
    """The revision of the pods that run it."""
    basis: Word
    """The revision that the spec alone would make. When it makes another one, the choice is void: the spec is what counts."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo when its trial began. Where that is stricter now, the choice is void."""


class Trial(Model):
    """A setting on its way through a canary."""

    setting: Setting
    """The setting."""
    purpose: Literal["Change", "Explore"]
    """Change: to be kept if it is certainly faster. Explore: to be measured for spec.speculation.tuning.interval, then given
    up; or it becomes a Change, if what it shows by then speaks for its setting."""
    revision: Word
    """The revision of the pods that run it: the canary's, once there is one."""
    basis: Word
    """The revision that the spec alone would make. When it makes another one, the trial is over."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo when it began. When that becomes stricter, the trial is over."""
    predicted: Gain | None = None
    """What is expected of it."""
    started_at: Time
    """When it was decided on; the canary follows."""


Ended = Literal["Promoted", "RolledBack", "Undecided", "Explored", "Superseded", "Failed"]
"""How a trial may end."""


class Tried(Model):
    """How a trial has ended."""

    was: Setting
    """The setting that was in force."""
    tried: Setting
    """The setting that was tried."""
    purpose: Literal["Change", "Explore"]
    """What it was tried for."""
    result: Ended
    """How it ended. Undecided: until the deadline it was neither proven nor refuted. Explored: it was measured, as was meant.
    Superseded: by another spec."""
    revision: Word
    """The revision that was tried."""
    predicted: Gain | None = None
    """What was expected of it."""
    realised: Gain | None = None
    """What the canary has shown against its control; absent where it was not compared."""
    started_at: Time | None = None
    """When it began."""
    ended_at: Time
    """When it ended."""


FailureReason = Literal["NoRoom", "Worse", "Failed"]
"""Why a trial counts as failed."""
MOST_FAILURES = 16
"""Settings whose failures a status remembers."""


class Failure(Model):
    """A setting whose trials have failed, with what has to be before the next one of it."""

    setting: Setting
    """The setting."""
    reason: FailureReason
    """NoRoom: the cluster had no node or quota for its pods. Worse: it was measured, and rolled back. Failed: it never served,
    crashed, or preflight refused it."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """How the last one ended, as a sentence."""
    times: Annotated[int, Field(ge=1)] = 1
    """How often it has failed for this reason: the pause doubles each time."""
    basis: Word
    """The revision that the spec alone makes. With another one the failure is forgotten."""
    began_at: Time
    """When the last trial began."""
    last_at: Time
    """When it ended."""
    pods: Count | None = None
    """Of NoRoom: pods that all arms together needed. With as many that serve, or a trial that needs fewer, there is room."""


class Balance(Model):
    """What tuning has brought and cost, in hours of one replica; as of the end of the last trial, so that it does not change all
    the time. Since then, `rate` times replicas times hours have come on top."""

    gained: float = 0.0
    """What chosen settings have saved against spec.speculation.tokens, by what their canaries have shown."""
    spent: float = 0.0
    """What trials have cost: each hour of each pod beyond spec.replicas that canary, control and pods kept after a promotion
    took, and what pods in the place of replicas have spent on loading."""
    net: float = 0.0
    """What was gained, less what was spent."""
    rate: float = 0.0
    """What the setting in force saves now, as a share: 0.05 is 5 % of the replicas. 0 while it is that of the spec."""
    as_of: Time
    """When this was reckoned."""


MOST_EXPLORED = 8
"""Explorations whose moments a status remembers."""


class SpeculationStatus(Model):
    """The speculation setting in force, and the one that tuning would choose."""

    current: Setting
    """The setting of the stable pods."""
    recommended: Setting | None = None
    """The setting that tuning finds best, when it is another one."""
    predicted: Gain | None = None
    """What the recommended setting is expected to gain over the current one."""
    why: Annotated[str, Field(max_length=4096)] | None = None
    """What speaks for it, or what is missing for a recommendation."""
    chosen: Chosen | None = None
    """The setting that is in force in place of spec.speculation.tokens. Absent where that is in force."""
    trial: Trial | None = None
    """The setting under trial. In mode Auto it is tried by a canary, which ends like any other, by a person's word too."""
    changed_at: Time | None = None
    """When the setting of the stable pods last changed, by tuning or by the spec: tuning.cooldown counts from here."""
    rolled_back_at: Time | None = None
    """When a trial was last taken back or failed: four times tuning.cooldown count from here, twice that after a second failure
    in a row, and so on."""
    failed: Count | None = None
    """Trials in a row that failed without being measured; those that found no room are not counted. Absent for none."""
    failures: Annotated[
        list[Failure], Field(max_length=MOST_FAILURES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """Settings whose trials have failed, the latest first."""
    explored: Annotated[list[Time], Field(max_length=MOST_EXPLORED, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = (
        Field(default_factory=list)
    )
    """When canaries have explored, the newest first."""
    speculated_at: Time | None = None
    """While the setting is Off: when drafts were last verified."""
    changes: Annotated[list[Tried], Field(max_length=MOST_TRIED, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = Field(
        default_factory=list
    )
    """The last trials, the newest first."""
    balance: Balance | None = None
    """What trials have brought and cost so far. Absent before the first one."""


Cause = Literal["StableLost", "GivenUp"]
"""Why a rollback that could not end was turned round."""


class Outcome(Model):
    """How a past rollout ended."""

    revision: Word
    """The revision that was rolled out."""
    change: Text
    """What was new in it."""
    result: Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]
    """How it ended. Superseded: by another spec, or by that of the stable revision. Failed: its pods did not start, or the spec
    became one that cannot run. Explored: a trial by tuning that was to be measured and given up has been."""
    reason: Annotated[str, Field(max_length=2048)]
    """Why, as a sentence."""
    cause: Cause | None = None
    """Why a rollback that could not end was turned round, as one word for programs. StableLost: pods of this revision, which was
    the stable one, could not start any more, and the other one's serve. GivenUp: nor could the other one's, so this one was given
    up for a third. Absent for all other ends, and in outcomes that releases before this field wrote."""
    started_at: Time
    """When it began."""
    ended_at: Time
    """When it ended."""
    drafter: Text | None = None
    """Its drafter, in short."""
    against: Text | None = None
    """The drafter of the revision that it was to replace."""
    comparisons: Annotated[
        list[Comparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """What was known of it in the end, if it was analyzed."""
    retry_at: Time | None = None
    """When it is tried again by itself: the cluster had no room for it, which says nothing of the revision. Absent where it
    waits for another spec or the annotation aerie.dev/retry."""


MOST_CHOICES = 8
"""Targets whose drafters a status remembers."""


class ChosenDrafter(Model):
    """A drafter that Aerie took from its catalog because spec.drafter is missing."""

    target: Text
    """Repository of the target that it is for."""
    repo: Text
    """Repository of the drafter."""
    revision: Word
    """Commit of the repository."""
    kind: Word
    """What the catalog says that it is: EAGLE 3.1 or EAGLE 3."""
    used: bool = False
    """Whether pods were made with it. From then on it is the drafter of this target, whatever the catalog says later; to take
    another one, write spec.drafter."""


class Status(Model):
    """What Aerie last saw and did; written by Aerie alone."""

    observed_generation: Count | None = None
    """Generation of the resource that the status speaks of."""
    phase: Phase | None = None
    """What is going on, in a word. Preflight to Promoting, and RollingBack, are a rollout, which waits for its turn while
    Queued; AwaitingApproval and Held wait for a person, by the annotation aerie.dev/promote or aerie.dev/rollback; Watching and
    Rechecking: it is promoted, and pods of the revision before stay for a while; RolledBack: the stable revision serves, and
    what the spec asks for was rejected; Ready, Paused and Failed are what the conditions explain. docs/rollouts.md has each."""
    conditions: Annotated[
        list[Condition],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    """Ready, Progressing, PreflightPassed, Degraded, and Tuned once tuning has something to say."""
    replicas: Count | None = None
    """Serving pods that there should be and are made, of all arms."""
    ready_replicas: Count | None = None
    """Pods that serve, of all arms."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for autoscalers."""
    stable: Arm | None = None
    """The accepted revision."""
    canary: CanaryArm | None = None
    """The revision under judgement, while there is one; and the first one, until it serves."""
    previous: PreviousArm | None = None
    """The revision before the stable one, while pods of it stay for an instant return."""
    queued: Queued | None = None
    """What waits for its turn, while something does."""
    analysis: AnalysisStatus | None = None
    """What decides about the canary; after its end, what has decided, until the next rollout."""
    speculation: SpeculationStatus | None = None
    """The speculation setting, and what tuning makes of it."""
    drafters: Annotated[
        list[ChosenDrafter],
        Field(
            max_length=MOST_CHOICES,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["target"]},
        ),
    ] = Field(default_factory=list)
    """The drafters that Aerie took from its catalog where spec.drafter was missing, one for each target, the latest first."""
    rejected: Word | None = None
    """The revision that the spec asks for, while it is not tried again: it was rolled back, or its pods did not start. Cleared
    when the spec asks for another revision, or when somebody annotates the resource with a new value of aerie.dev/retry."""
    retry: Text | None = None
    """The value of the annotation aerie.dev/retry that was last seen; another one means: try again."""
    history: Annotated[list[Outcome], Field(max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"})] = Field(
        default_factory=list
    )
    """The last ten rollouts, the newest first."""

    def to_dict(self) -> Json:
        """As the API server takes it; empty lists are left out, because `kubectl describe` shows a line for each."""
        found: Json = _without_empty_lists(super().to_dict())
        return found


def _without_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        told = {name: _without_empty_lists(below) for name, below in value.items()}
        return {name: below for name, below in told.items() if below != []}
    return [_without_empty_lists(below) for below in value] if isinstance(value, list) else value
