"""Which stages the rollout of a new drafter has by its spec, and their forecasts, one after the other.

    in place    shadow evaluation in an isolated pod ─┬─ accepted ─► turns during the ramp, without evidence for it
                                                      └─► turns under the traffic of users
    by pods     shadow evaluation by pairs of answers ─┬─ accepted ─► the ramp, which no stage has
                                                       └─► warm-up and analysis under the traffic of users

Whether a rollout is in place, and whether it has a shadow evaluation, is decided by the functions of aerie.rollout, as far as
they need the resource alone. `_continue_after_evaluation` has what follows a shadow evaluation.

Not guaranteed: what only the running pods show, such as a plugin that they do not have. Times of loading, of the isolation and
of the promotion are not in the forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from aerie.analysis.paired.plan import MIN_ACCEPTANCE_SECONDS, PairedPlan
from aerie.analysis.switchback.plan import SwitchbackPlan
from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Off
from aerie.forecast.assumptions import Requests
from aerie.forecast.live import LiveAnalysis, forecast_live
from aerie.forecast.outcomes import Outcomes, Summary, promote_at_once, summarize
from aerie.forecast.pairs import compute_pair_rate, forecast_pairs
from aerie.forecast.turns import forecast_isolated_turns, forecast_user_turns
from aerie.manifests.engine_key import find_engine_key
from aerie.rollout.canary.analysis_run.run import build_analysis_plan, build_block_rule, explain_incomparable_acceptance
from aerie.rollout.in_place.evaluation import MIN_READY_PODS, MIN_READY_PODS_BY_DEFAULT, schedule_evaluation
from aerie.rollout.in_place.observation import compute_min_duration
from aerie.rollout.in_place.trial import schedule_requests
from aerie.rollout.in_place.trial_pods import compute_growth_step, count_desired_pods
from aerie.rollout.revision.desired import DesiredRevision, resolve_desired_revision

RUNS, LIVE_RUNS = 1000, 24
"""Simulated rollouts of each effect; and those of an analysis of canary pods, which costs more (`live`)."""
SEED = 1

Method = Literal["InPlace", "ByPods"]


class ForecastError(ValueError):
    """A resource that has no forecast; the message has the field and what to do."""


@dataclass(frozen=True)
class Stage:
    """A part of the rollout that can end it, with its summary by effect."""

    title: str
    samples: str
    """Noun of the samples, in the plural."""
    serves_users: bool
    """Whether its requests are those of users."""
    summaries: tuple[Summary, ...]


@dataclass(frozen=True)
class RolloutForecast:
    """A rollout's stages, and all of it."""

    method: Method
    stages: tuple[Stage, ...]
    total: tuple[Summary, ...]
    """Summary of all stages together, by effect."""
    notes: tuple[str, ...]
    """What a reader has to know, as sentences."""


@dataclass(frozen=True)
class _StageOutcomes:
    title: str
    samples: str
    serves_users: bool
    outcomes: Sequence[Outcomes]
    """Outcomes by effect."""


def forecast_rollout(
    resource: SpeculativeDeployment, requests: Requests, effects: Sequence[float], *, has_history: bool = False
) -> RolloutForecast:
    """Return the forecast of a change of the drafter alone, for drafters with these relative gains in tokens per step.

    `has_history`: whether a day of stable pods is calibrated before an analysis of canary pods. Raises ForecastError.
    """
    desired = resolve_desired_revision(resource)
    if desired.problem:
        raise ForecastError(desired.problem)
    if resource.spec.drafter is None:
        raise ForecastError("spec.drafter is missing: a forecast is of a new drafter.")
    if isinstance(desired.setting, Off):
        raise ForecastError("spec.speculation.numSpeculativeTokens is 0, so nothing drafts: a forecast needs 1 or more.")
    if resource.spec.replicas == 0:
        raise ForecastError("spec.replicas is 0, so nothing is compared: set the number of pods that serve users.")
    notes: list[str] = []
    method = _choose_method(desired, notes)
    evaluation_obstacle = _find_evaluation_obstacle(desired, method)
    if evaluation_obstacle:
        notes.append(f"Shadow evaluation is skipped: {evaluation_obstacle}")
    has_evaluation = resource.spec.rollout.shadow_source != "None" and not evaluation_obstacle
    compares_times = method == "InPlace" or resource.spec.rollout.canary.control == "Fresh"
    is_only = has_evaluation and compares_times and resource.spec.rollout.analysis.shadow.only
    ramp: _StageOutcomes | None = None
    if method == "InPlace":
        evaluation = _evaluate_in_place(resource, requests, effects) if has_evaluation else None
        users = _analyze_in_place(resource, requests, effects, error_share=0.5 if has_evaluation else 1.0)
        ramp = _analyze_in_place(resource, requests, effects, error_share=0.5, is_accepted=True) if is_only else None
    else:
        evaluation = _evaluate_by_pods(desired, requests, effects) if has_evaluation else None
        users = _analyze_by_pods(desired, requests, effects, has_history=has_history, has_evaluation=has_evaluation)
        canary = resource.spec.rollout.canary
        if canary.step_weights:
            minutes = len(canary.step_weights) * canary.step_duration.total_seconds() / 60
            notes.append(f"After a promotion, the ramp takes {minutes:g} min or more. It can still roll back.")
    if is_only:
        users = replace(users, title=f"Not accepted: {users.title[:1].lower()}{users.title[1:]}")
    stages = [stage for stage in (evaluation, ramp, users) if stage is not None]
    total = _continue_after_evaluation(evaluation, ramp, users, is_only=is_only)
    if requests.per_second == 0:
        notes.append("Without requests, nothing under the traffic of users has a verdict.")
    return RolloutForecast(
        method,
        tuple(Stage(each.title, each.samples, each.serves_users, _summarize(effects, each.outcomes)) for each in stages),
        _summarize(effects, total),
        tuple(notes),
    )


def _continue_after_evaluation(
    evaluation: _StageOutcomes | None, ramp: _StageOutcomes | None, users: _StageOutcomes, *, is_only: bool
) -> Sequence[Outcomes]:
    """Return the ends of whole rollouts: what follows a shadow evaluation that has not rolled back. `ramp`: the stage of accepted
    drafters; None: none can roll them back. `is_only`: whether an acceptance leads there."""
    if evaluation is None:
        return users.outcomes
    totals = []
    for index, (first, last) in enumerate(zip(evaluation.outcomes, users.outcomes, strict=True)):
        if is_only:
            accepted = ramp.outcomes[index] if ramp is not None else promote_at_once(first.runs)
            last = last.unless(first.promoted, accepted)
        totals.append(first.then(last))
    return totals


def _summarize(effects: Sequence[float], outcomes: Sequence[Outcomes]) -> tuple[Summary, ...]:
    return tuple(summarize(effect, each) for effect, each in zip(effects, outcomes, strict=True))


def _choose_method(desired: DesiredRevision, notes: list[str]) -> Method:
    """Return how a change of the drafter alone is rolled out; add the reason, and what else there is, to the notes."""
    mode = desired.resource.spec.rollout.in_place.mode
    if mode == "Off":
        return "ByPods"
    if desired.plugin_obstacle:
        if mode == "Required":
            raise ForecastError(
                f"spec.rollout.inPlace.mode is Required, but no change can be in place. {desired.plugin_obstacle}"
            )
        notes.append(f"By pods, because pods have no plugin of Aerie's: {desired.plugin_obstacle}")
        return "ByPods"
    if mode == "Auto":
        notes.append(
            "What running engines cannot change is rolled out by pods: for its forecast, set spec.rollout.inPlace.mode: Off in "
            "a copy of the file."
        )
    return "InPlace"


def _find_evaluation_obstacle(desired: DesiredRevision, method: Method) -> str:
    """Return why a shadow evaluation that the spec requests would be skipped, as a sentence; empty where it would not."""
    spec = desired.resource.spec
    if spec.rollout.shadow_source == "None":
        return ""
    needed_pods = MIN_READY_PODS_BY_DEFAULT if spec.rollout.analysis.shadow.source is None else MIN_READY_PODS
    if method == "InPlace" and spec.replicas < needed_pods:
        return f"spec.replicas is {spec.replicas}, and it needs {needed_pods} ready pods."
    if method == "ByPods" and desired.shadow_obstacle:
        return desired.shadow_obstacle
    return find_engine_key(desired.pod_template).problem if desired.pod_template is not None else ""


def _arrivals_per_second(resource: SpeculativeDeployment, requests: Requests) -> float:
    """Return the requests per second that reach the evaluator; infinite for a file of prompts."""
    is_file = resource.spec.rollout.shadow_source == "Prompts"
    return math.inf if is_file else requests.per_second * resource.spec.replicas


def _evaluate_in_place(resource: SpeculativeDeployment, requests: Requests, effects: Sequence[float]) -> _StageOutcomes:
    analysis = resource.spec.rollout.analysis
    plan = SwitchbackPlan(
        str(SEED),
        schedule_evaluation(requests.seconds),
        analysis.goal,
        analysis.margin,
        analysis.shadow.max_duration.total_seconds(),
        is_isolated=True,
        error_share=0.5,
    )
    outcomes = forecast_isolated_turns(plan, requests, _arrivals_per_second(resource, requests), effects, RUNS, SEED)
    title = f"Shadow evaluation ({resource.spec.rollout.shadow_source}): equal requests, by turns in an isolated pod"
    return _StageOutcomes(title, "pairs of windows", False, outcomes)


def _analyze_in_place(
    resource: SpeculativeDeployment,
    requests: Requests,
    effects: Sequence[float],
    *,
    error_share: float,
    is_accepted: bool = False,
) -> _StageOutcomes:
    spec, rollout = resource.spec, resource.spec.rollout
    deadline = rollout.analysis.max_duration.total_seconds()
    schedule = schedule_requests(requests.per_second, requests.seconds, spec.replicas)
    plan = SwitchbackPlan(
        str(SEED),
        schedule,
        rollout.analysis.goal,
        rollout.analysis.margin,
        deadline,
        error_share=error_share,
        is_accepted=is_accepted,
    )

    def count_pods(elapsed: float) -> int:
        return count_desired_pods(rollout, spec.replicas, compute_growth_step(rollout, timedelta(seconds=elapsed)))

    min_seconds = compute_min_duration(rollout, is_accepted=is_accepted).total_seconds()
    outcomes = forecast_user_turns(plan, requests, count_pods, effects, RUNS, SEED, min_seconds)
    first, last = count_pods(0.0), count_pods(deadline)
    pods = f"{first} of {spec.replicas} pods" if first == last else f"{first}, later {last} of {spec.replicas} pods"
    title = "Accepted: the ramp, by turns under the traffic of users" if is_accepted else "By turns under the traffic of users"
    return _StageOutcomes(f"{title}, in {pods}", "pairs of windows", True, outcomes)


def _evaluate_by_pods(desired: DesiredRevision, requests: Requests, effects: Sequence[float]) -> _StageOutcomes:
    rollout = desired.resource.spec.rollout
    plan = PairedPlan(
        goal=rollout.analysis.goal,
        margin=rollout.analysis.margin,
        max_duration_seconds=rollout.analysis.shadow.max_duration.total_seconds(),
        compares_tokens=not explain_incomparable_acceptance(desired.arm, desired.arm),
        compares_time=rollout.canary.control == "Fresh",
        min_acceptance_seconds=MIN_ACCEPTANCE_SECONDS,
    )
    rate = compute_pair_rate(requests, _arrivals_per_second(desired.resource, requests))
    outcomes = forecast_pairs(plan, requests, rate, effects, RUNS, SEED)
    title = f"Shadow evaluation ({rollout.shadow_source}): canary and control answer {rate:.2g} equal requests per second"
    return _StageOutcomes(title, "pairs of answers", False, outcomes)


def _analyze_by_pods(
    desired: DesiredRevision, requests: Requests, effects: Sequence[float], *, has_history: bool, has_evaluation: bool
) -> _StageOutcomes:
    spec, rollout = desired.resource.spec, desired.resource.spec.rollout
    canary = min(rollout.canary.replicas, spec.replicas)
    is_fresh = rollout.canary.control == "Fresh"
    control = canary if is_fresh else spec.replicas
    plan = build_analysis_plan(
        rollout.analysis, (desired.arm, desired.arm), (canary, control), None, failed_attempts=int(has_evaluation)
    )
    rule = build_block_rule(plan, desired.resource.spec.metrics.scrape_interval.total_seconds())
    warmup = rollout.analysis.warmup_duration.total_seconds()
    live = LiveAnalysis(plan, rule, spec.replicas, has_history)
    outcomes = [
        replace(each, seconds=each.seconds + warmup, user_requests=each.user_requests + requests.per_second * canary * warmup)
        for each in forecast_live(live, requests, effects, LIVE_RUNS, SEED)
    ]
    arms = f"canary (pods: {canary}) against {'fresh control' if is_fresh else 'stable'} (pods: {control})"
    history = "with" if has_history else "without"
    title = f"Warm-up and analysis under the traffic of users: {arms}, {history} a history of stable pods"
    return _StageOutcomes(title, "blocks", True, outcomes)
