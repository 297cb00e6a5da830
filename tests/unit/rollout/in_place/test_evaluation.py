"""Shadow evaluations in rollouts in place, over simulated engines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.api.rollout import AnalysisSpec
from aerie.api.status import InPlaceRollout, ShadowEvaluation
from aerie.engine.drafter_endpoint.calls import IsolatePod
from aerie.engine.drafter_endpoint.state import PodIsolation
from aerie.rollout.in_place.engine_pods import list_engine_pods
from aerie.rollout.in_place.evaluation import EvaluationProgress, plan_evaluation_calls
from aerie.rollout.in_place.trial import resume_trial
from tests.nightly import at_night, use_each_nth
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import EFFECTS, Fleet, serving_fleet

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
PROMPTS = {"source": "Prompts", "prompts": {"configMap": "prompts"}}
COPIES = {"source": "Mirror"}
GATEWAY = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}


def begin(name: str, replicas: int = 3, shadow: dict[str, Any] | None = None, **arguments: Any) -> Fleet:
    """Return a fleet with shadow evaluation that has served for a while, and whose spec has just got this drafter."""
    analysis = {"shadow": shadow or PROMPTS, **arguments.pop("analysis", {})}
    fleet = serving_fleet(replicas, rollout={"analysis": analysis, **arguments.pop("rollout", {})}, **arguments)
    fleet.run(2 * MINUTE)
    fleet.drafter(name)
    fleet.wake()
    return fleet


def finish(fleet: Fleet, *, drafter: str) -> None:
    """Let all leases end, and check that every pod serves users with the drafter."""
    fleet.run(20 * MINUTE)
    assert fleet.violations == []
    assert set(fleet.loaded_names()) == fleet.own_names() == {drafter}
    assert all(engine.isolated_until is None for engine in fleet.engines.values())
    assert fleet.status.get("inPlaceRollout") is None


def outcome(fleet: Fleet) -> tuple[str, str]:
    latest = fleet.status["rolloutHistory"][0]
    return latest["result"], latest["message"]


def evaluation(fleet: Fleet) -> tuple[str, str]:
    result = fleet.status["inPlaceRollout"]["evaluation"]
    return result["result"], result["message"]


def isolated(fleet: Fleet) -> list[str]:
    return [name for name, engine in fleet.engines.items() if engine.isolated_until is not None]


def test_a_better_drafter_is_accepted_before_a_user_is_served_with_it() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    begun = fleet.now
    ready = [fleet.condition("Ready")]
    fleet.on_reconcile = lambda _: ready.append(fleet.condition("Ready")) if fleet.condition("Ready") != ready[-1] else None
    fleet.run(MINUTE)
    assert fleet.status["analysis"]["design"] == "EqualRequests"
    fleet.run_until_phase("Staging")
    fleet.run(MINUTE / 2)
    assert fleet.now - begun < 4 * MINUTE
    # Starting: until the kubelet's next probe.
    assert ready[1:] == [("True", "PodIsolated"), ("False", "Starting"), ("True", "AllPodsReady")]
    assert evaluation(fleet)[0] == "Accepted"
    assert isolated(fleet) == [] or fleet.run(MINUTE, lambda: isolated(fleet) == [])
    fleet.run_until_phase("Analyzing")
    assert "Shadow evaluation: Accepted." in fleet.message("Progressing")
    fleet.run_until_phase("Ready")
    assert outcome(fleet)[0] == "Promoted"
    finish(fleet, drafter="better")


def set_traffic(fleet: Fleet, requests_per_second: float) -> None:
    for engine in fleet.engines.values():
        engine.requests_per_second = requests_per_second


@pytest.mark.parametrize("requests_per_second", [0.0, 0.2, 20.0])
@pytest.mark.parametrize("name", ["better", at_night("equal")])
def test_an_accepted_drafter_is_promoted_after_the_time_of_the_ramp_whatever_the_traffic(
    name: str, requests_per_second: float
) -> None:
    fleet = begin(name, replicas=4)
    fleet.run_until_phase("Analyzing")
    assert evaluation(fleet)[0] == "Accepted"
    begun = fleet.now
    set_traffic(fleet, requests_per_second)
    fleet.run_until_phase("Promoting", minutes=15)
    assert 10 * MINUTE <= fleet.now - begun < 13 * MINUTE, "two steps of 5 minutes, and then the next pair"
    fleet.run_until_phase("Ready")
    assert outcome(fleet)[0] == "Promoted"
    assert "was accepted by its shadow evaluation" in outcome(fleet)[1]
    finish(fleet, drafter=name)


def test_a_ramp_without_steps_lasts_as_long_as_any_trial() -> None:
    fleet = begin("better", rollout={"canary": {"stepWeights": []}})
    fleet.run_until_phase("Analyzing")
    begun = fleet.now
    fleet.run_until_phase("Promoting")
    assert 119 * SECOND <= fleet.now - begun < 4 * MINUTE


def test_users_may_still_take_an_accepted_drafter_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = begin("better", replicas=4)
    fleet.run_until_phase("Analyzing")
    assert "Waiting for the ramp" not in fleet.message("Progressing")
    monkeypatch.setitem(EFFECTS, "better", -0.15)  # with the requests of users
    fleet.run_until_phase("RolledBack", minutes=10)
    assert "significantly below the stable drafter's" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


@pytest.mark.parametrize("replicas", [2, 40])
def test_a_drafter_that_hangs_is_rolled_back_before_a_user_is_served_with_it(replicas: int) -> None:
    fleet = begin("better", replicas)
    for engine in fleet.engines.values():
        engine.hangs_with = "better"
    fleet.run_until_phase("RolledBack", minutes=8)
    assert "number of answer tokens is significantly below the stable drafter's by more than 30 %" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


def test_a_drafter_whose_pairs_are_lost_is_rolled_back_before_a_user_is_served_with_it() -> None:
    fleet = begin("better", shadow={**PROMPTS, "maxDuration": "5m"})
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    rollout = InPlaceRollout.model_validate(fleet.status["inPlaceRollout"])
    trial = resume_trial(rollout, AnalysisSpec())
    assert trial is not None
    lossy = replace(trial, state=replace(trial.state, lost_pairs=100))
    fleet.document["status"]["inPlaceRollout"]["state"] = lossy.pack_state()
    fleet.run_until_phase("RolledBack", minutes=8)
    assert "pairs of windows are lost" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


def test_evidence_under_the_traffic_of_users_follows_where_the_spec_says_so() -> None:
    fleet = begin("equal", replicas=4, shadow={**PROMPTS, "only": False})
    fleet.run_until_phase("Analyzing")
    assert evaluation(fleet)[0] == "Accepted"
    set_traffic(fleet, 0.0)
    assert not fleet.run(60 * MINUTE, lambda: fleet.phase == "Promoting")
    assert "A promotion still needs: number of tokens per step" in fleet.message("Progressing")


@pytest.mark.parametrize(("replicas", "phase"), [(3, "Analyzing"), (4, "Evaluating")])
def test_without_a_source_in_the_spec_a_quarter_of_the_capacity_is_the_most_that_users_miss(replicas: int, phase: str) -> None:
    fleet = begin("better", replicas, {"maxDuration": "15m"}, rollout=GATEWAY)
    fleet.run_until_phase(phase)
    if phase == "Analyzing":
        result, message = evaluation(fleet)
        assert (result, "needs 4 ready pods" in message, "set spec.rollout.analysis.shadow.source" in message) == (
            "Skipped",
            True,
            True,
        )
    else:
        fleet.run(MINUTE)
        assert "filters" in fleet.objects["HTTPRoute", "chat"]["spec"]["rules"][0]


@pytest.mark.parametrize(
    ("result", "share", "is_accepted"), [("Accepted", 0.5, True), ("Inconclusive", 0.5, False), ("Skipped", 1.0, False)]
)
def test_evaluation_and_trial_share_the_errors_that_are_allowed(result: str, share: float, is_accepted: bool) -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    rollout = InPlaceRollout.model_validate(fleet.status["inPlaceRollout"])
    trial = resume_trial(rollout, AnalysisSpec())
    assert trial is not None
    assert (trial.plan.error_share, trial.plan.is_accepted) == (0.5, False)
    ended = ShadowEvaluation.model_validate({"result": result, "message": ""})
    trial = resume_trial(rollout.model_copy(update={"phase": "Analyzing", "evaluation": ended}), AnalysisSpec())
    assert trial is not None
    assert (trial.plan.error_share, trial.plan.is_accepted) == (share, is_accepted)


def test_a_worse_drafter_is_rolled_back_and_no_user_has_met_it() -> None:
    fleet = begin("worse")
    fleet.run_until_phase("RolledBack", minutes=8)
    assert outcome(fleet)[0] == "RolledBack"
    assert "significantly below the stable drafter's" in outcome(fleet)[1]
    assert fleet.status["rejectedRevision"] == fleet.desired_revision
    finish(fleet, drafter="eagle3")


def test_the_evaluator_runs_during_the_evaluation_alone() -> None:
    fleet = begin("better")
    evaluators: dict[str, set[bool]] = {}

    def observe(_: Any) -> None:
        evaluators.setdefault(fleet.phase, set()).add(("Deployment", "chat-evaluator") in fleet.objects)

    fleet.on_reconcile = observe
    fleet.run_until_phase("Evaluating")
    fleet.run(5 * SECOND)
    container = fleet.objects["Deployment", "chat-evaluator"]["spec"]["template"]["spec"]["containers"][0]
    assert "--engine=http://10.0.0.7:8000" in container["args"]
    fleet.run_until_phase("Ready")
    assert evaluators["Analyzing"] == evaluators["Promoting"] == {False}
    finish(fleet, drafter="better")


@pytest.mark.parametrize("replicas", [2, 40])
def test_a_gateway_that_does_not_support_copies_ends_the_evaluation(replicas: int) -> None:
    fleet = begin("better", replicas, COPIES, rollout=GATEWAY)
    parent = {"name": "public", "namespace": "default"}

    def has_copies() -> bool:
        return "filters" in fleet.objects["HTTPRoute", "chat"]["spec"]["rules"][0]

    copies: set[str] = set()

    def report_route(_: Any) -> None:
        copies.update([fleet.phase] if has_copies() else [])
        rejected = {"status": "False", "reason": "UnsupportedValue", "message": "invalid type RequestMirror"}
        condition = {"type": "Accepted", **(rejected if has_copies() else {"status": "True", "reason": "Accepted"})}
        fleet.objects["HTTPRoute", "chat"]["status"] = {"parents": [{"parentRef": parent, "conditions": [condition]}]}

    fleet.on_reconcile = report_route
    fleet.run_until_phase("Analyzing")
    result, message = evaluation(fleet)
    assert (result, copies) == ("Skipped", {"Evaluating"})
    assert "does not accept HTTPRoute chat (UnsupportedValue: invalid type RequestMirror)" in message
    assert not has_copies()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_an_equal_drafter_is_accepted() -> None:
    fleet = begin("equal")
    fleet.run_until_phase("Analyzing")
    assert evaluation(fleet)[0] == "Accepted"


@pytest.mark.parametrize("seconds", [0, 90])
def test_no_window_begins_before_the_pod_has_finished_its_requests(seconds: int) -> None:
    fleet = begin("better")
    for engine in fleet.engines.values():
        engine.unfinished_requests = 2
    fleet.run_until_phase("Evaluating")
    fleet.run(timedelta(seconds=seconds))
    assert set(fleet.loaded_names()) == {"eagle3"}
    if seconds:
        assert len(isolated(fleet)) == 1
        assert "still serves requests of users" in fleet.message("Progressing")
    for engine in fleet.engines.values():
        engine.unfinished_requests = 0
    fleet.run_until_phase("Analyzing")
    assert evaluation(fleet)[0] == "Accepted"


def test_a_pod_that_does_not_finish_its_requests_is_given_back() -> None:
    fleet = begin("better")
    for engine in fleet.engines.values():
        engine.unfinished_requests = 2
    fleet.run_until_phase("Evaluating")
    fleet.run_until_phase("Analyzing", minutes=15)
    result, message = evaluation(fleet)
    assert result == "Skipped"
    assert "still serves requests of users after 10m" in message
    assert message.rstrip(".") in fleet.message("Progressing")
    assert isolated(fleet) == []


def test_without_an_evaluator_the_rollout_continues_after_the_limit() -> None:
    fleet = begin("better", shadow={**PROMPTS, "maxDuration": "3m"})
    for engine in fleet.engines.values():
        engine.evaluator_noise = None
    fleet.run_until_phase("Evaluating")
    begun = fleet.now
    fleet.run_until_phase("Analyzing", minutes=10)
    assert fleet.now - begun < 6 * MINUTE
    assert evaluation(fleet)[0] == "Inconclusive"
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


@pytest.mark.parametrize("requests_per_second", [0.0, 0.2])
@pytest.mark.parametrize("name", use_each_nth(2, ["better", "worse", "equal"]))
def test_copies_of_few_requests_end_without_a_verdict_and_the_rollout_continues(name: str, requests_per_second: float) -> None:
    fleet = begin(name, shadow=COPIES, rollout=GATEWAY, requests_per_second=requests_per_second)
    for engine in fleet.engines.values():
        engine.evaluator_noise = 1.0 if requests_per_second else None  # one request in a window, or none in one of them
    fleet.run_until_phase("Evaluating")
    begun = fleet.now
    fleet.run(5 * SECOND)
    (rule,) = fleet.objects["HTTPRoute", "chat"]["spec"]["rules"]
    assert [item["type"] for item in rule["filters"]] == ["RequestMirror"]
    fleet.run_until_phase("Analyzing", minutes=20)
    assert 15 * MINUTE <= fleet.now - begun < 17 * MINUTE
    assert evaluation(fleet)[0] == "Inconclusive"
    assert isolated(fleet) == []
    (rule,) = fleet.objects["HTTPRoute", "chat"]["spec"]["rules"]
    assert "filters" not in rule
    assert not fleet.violations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worse", at_night("better")])
def test_of_a_thousand_pods_one_is_isolated(name: str) -> None:
    fleet = begin(name, 1000)
    fleet.run_until_phase("Evaluating")
    begun, reconciles = fleet.now, fleet.reconciles
    most_isolated = 0

    def observe(_: Any) -> None:
        nonlocal most_isolated
        most_isolated = max(most_isolated, len(isolated(fleet)))

    fleet.on_reconcile = observe
    fleet.run_until_phase("Analyzing", "RolledBack", minutes=30)
    seconds = (fleet.now - begun).total_seconds()
    assert seconds < 8 * 60
    assert most_isolated == 1
    assert fleet.reconciles - reconciles < 2 * seconds, "a reconcile of a thousand pods takes three seconds"
    assert fleet.violations == []
    if name == "worse":
        assert outcome(fleet)[0] == "RolledBack"
    else:
        assert evaluation(fleet)[0] == "Accepted"


@pytest.mark.parametrize(
    ("reports", "result"),
    [
        (lambda _: None, "Skipped"),
        at_night((lambda _: 1, "Skipped")),
        (lambda _: 2**31, "Skipped"),
        (lambda number: number % 2, "Accepted"),
        at_night((lambda number: max(0, number - 3), "Accepted")),  # as soon as the evaluator sends requests, it counts them
    ],
    ids=["unknown", "always", "huge", "alternating", "growing"],
)
def test_a_pod_that_reports_false_numbers_delays_its_own_evaluation_alone(
    reports: Callable[[int], int | None], result: str
) -> None:
    fleet = begin("better")
    for engine in fleet.engines.values():
        engine.report_unfinished = functools.partial(lambda numbers: reports(next(numbers)), itertools.count())
    fleet.run_until_phase("Evaluating")
    fleet.run_until_phase("Analyzing", minutes=15)
    assert evaluation(fleet)[0] == result
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_one_pod_is_not_taken_from_its_users() -> None:
    fleet = begin("better", replicas=1)
    fleet.run_until_phase("Analyzing")
    result, message = evaluation(fleet)
    assert result == "Skipped"
    assert "2 ready pods" in message
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_an_engine_whose_key_is_in_no_secret_gets_no_requests() -> None:
    fleet = begin("better")
    for pod in fleet.pods:
        pod["spec"]["containers"][0]["args"] = ["--api-key=plain-text"]
    fleet.run_until_phase("Analyzing")
    result, message = evaluation(fleet)
    assert result == "Skipped"
    assert "--api-key" in message
    assert "plain-text" not in message
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


@pytest.mark.parametrize("delay", use_each_nth(3, (2, 12, 25, 40, 60, 90)))
def test_the_operator_may_end_at_any_time(delay: int) -> None:
    fleet = begin("better", seed=delay)
    fleet.run_until_phase("Evaluating")
    fleet.run(delay * SECOND)
    fleet.restart_operator()
    fleet.run_until_phase("Ready")
    assert outcome(fleet)[0] == "Promoted"
    finish(fleet, drafter="better")


def test_an_operator_that_stays_away_leaves_all_pods_to_their_users() -> None:
    fleet = begin("worse")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    fleet.followed = {}
    fleet.reconcile_at = None
    fleet.now += 10 * MINUTE
    for engine in fleet.engines.values():
        engine.advance(fleet.now.timestamp())
    assert isolated(fleet) == []
    assert set(fleet.loaded_names()) == {"eagle3"}
    fleet.wake()
    fleet.run_until_phase("RolledBack", minutes=240)
    finish(fleet, drafter="eagle3")


@pytest.mark.parametrize(("remaining", "call"), [(None, IsolatePod(120.0)), (30.0, IsolatePod(120.0)), (50.0, None)])
def test_the_isolation_is_renewed_where_no_change_does_so(remaining: float | None, call: IsolatePod | None) -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(45 * SECOND)
    resource = fleet.observed().resource
    assert resource.status is not None
    rollout = resource.status.in_place_rollout
    assert rollout is not None
    trial = resume_trial(rollout, resource.spec.rollout.analysis)
    assert trial is not None
    (pod,) = (pod for pod in list_engine_pods(fleet.observed(), fleet.status["stable"]["revision"]) if pod.is_isolated)
    assert pod.state is not None
    isolation = None if remaining is None else PodIsolation(remaining, 0)
    pod = replace(pod, observation=replace(pod.observation, state=replace(pod.state, isolation=isolation)))
    late = trial.started_at + timedelta(seconds=trial.window_at(fleet.now).start_seconds + 5)  # after the wash-out
    calls, _ = plan_evaluation_calls(rollout, reports.SOURCE, EvaluationProgress(pod), trial, late)
    assert calls.get(pod.name) == call


@pytest.mark.parametrize("lost", ["deleted", "crashed"])
def test_a_pod_that_ends_ends_the_evaluation(lost: str) -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    name = isolated(fleet)[0]
    if lost == "deleted":
        fleet.delete_pod(name)
    else:
        fleet.crash_engine(name)
    fleet.run_until_phase("Analyzing", minutes=30)
    assert evaluation(fleet)[0] == "Inconclusive"
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_a_user_who_rolls_back_or_changes_the_spec_gets_the_pod_back() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    fleet.annotate(rollback=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("RolledBack", minutes=5)
    finish(fleet, drafter="eagle3")
    fleet.drafter("equal")
    fleet.wake()
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    fleet.drafter("eagle3")
    fleet.wake()
    fleet.run_until_phase("Ready", minutes=5)
    finish(fleet, drafter="eagle3")


def test_a_paused_rollout_gives_the_pod_back() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    assert isolated(fleet)
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": True})
    fleet.wake()
    fleet.run(MINUTE)
    assert isolated(fleet) == []
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": False})
    fleet.wake()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_without_replicas_the_evaluation_restarts() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Evaluating")
    fleet.run(MINUTE)
    fleet.scale(0)
    fleet.run(5 * MINUTE)
    fleet.scale(3)
    fleet.run_until_phase("Evaluating")
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")
