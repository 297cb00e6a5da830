"""Rollouts in place from the change of the spec to their end, over simulated engines."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.api.types.base import format_timestamp
from aerie.engine.metrics.exposition import MAX_COUNTER_VALUE
from aerie.rollout.facts.concurrency import ConcurrencyLimits, StartPermission, allocate_slots, read_slot_claim
from tests.nightly import at_night, use_each_nth
from tests.unit.rollout.in_place import fleet as fleet_module
from tests.unit.rollout.in_place.fleet import Fleet, digest_of, serving_fleet

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)


def begin(name: str, replicas: int = 1, **arguments: Any) -> Fleet:
    """Return a fleet that has served for a while, and whose spec has just got this drafter."""
    fleet = serving_fleet(replicas, **arguments)
    fleet.run(2 * MINUTE)
    fleet.drafter(name)
    fleet.wake()
    return fleet


def finish(fleet: Fleet, *, drafter: str) -> None:
    """Let all leases end, and check that every pod serves with the drafter."""
    fleet.run(20 * MINUTE)
    assert fleet.violations == []
    assert set(fleet.loaded_names()) == {drafter}
    assert fleet.own_names() == {drafter}
    assert fleet.status.get("inPlaceRollout") is None


def outcome(fleet: Fleet) -> tuple[str, str]:
    latest = fleet.status["rolloutHistory"][0]
    return latest["result"], latest["message"]


def test_better_drafter_is_promoted_within_minutes_without_a_pod() -> None:
    fleet = begin("better")
    pods, begun = [pod["metadata"]["name"] for pod in fleet.pods], fleet.now
    phases: list[str] = []
    fleet.on_reconcile = lambda _: phases.append(fleet.phase)
    fleet.run_until_phase("Ready")
    assert fleet.now - begun < 4 * MINUTE
    assert list(dict.fromkeys(phases)) == ["Preflight", "Staging", "Analyzing", "Promoting", "Ready"]
    assert outcome(fleet)[0] == "Promoted"
    assert fleet.status["analysis"]["verdict"] == "Promote"
    stable = fleet.status["stable"]
    assert (stable["drafter"], stable["inPlace"]["digest"]) == ("models/better", digest_of("better"))
    finish(fleet, drafter="better")
    assert [pod["metadata"]["name"] for pod in fleet.pods] == pods
    reconciles = fleet.reconciles
    fleet.run(60 * MINUTE)
    assert fleet.reconciles - reconciles < 5


def test_worse_drafter_returns_and_is_rejected() -> None:
    fleet = begin("worse", requests_per_second=20.0)
    fleet.run_until_phase("Analyzing")
    begun = fleet.now
    fleet.run_until_phase("RolledBack")
    assert fleet.now - begun < 3 * MINUTE
    assert outcome(fleet)[0] == "RolledBack"
    finish(fleet, drafter="eagle3")
    assert fleet.phase == "RolledBack"
    assert fleet.status["rejectedRevision"] == fleet.desired_revision
    fleet.annotate(retry="again")
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.run_until_phase("RolledBack")
    assert fleet.violations == []


def test_trial_without_requests_waits_for_a_user() -> None:
    fleet = begin("better", requests_per_second=0.0)
    fleet.run_until_phase("Analyzing")
    fleet.run_until_phase("Held", minutes=245)
    fleet.run(20 * MINUTE)
    assert set(fleet.loaded_names()) == {"eagle3"}
    assert "Waiting for manual promotion or rollback" in fleet.message("Progressing")
    fleet.annotate(promote=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("Ready")
    assert outcome(fleet) == ("Promoted", "Promoted manually.")
    finish(fleet, drafter="better")


@pytest.mark.parametrize(("action", "result"), [("promote", "Promoted"), ("rollback", "RolledBack")])
def test_a_request_names_its_user_while_pods_change_and_in_the_history(action: str, result: str) -> None:
    fleet = begin("better", requests_per_second=0.0)
    fleet.run_until_phase("Analyzing")
    requested_by = {"action": action, "user": "alice", "time": fleet.now.isoformat(), "reason": "AL loss is fine"}
    fleet.annotate(**{action: fleet.desired_revision, "requested-by": json.dumps(requested_by)})
    fleet.wake()
    fleet.run_until_phase("Promoting" if action == "promote" else "RollingBack")
    assert " requested by alice: AL loss is fine." in fleet.message("Progressing")
    fleet.run_until_phase("Ready" if action == "promote" else "RolledBack")
    assert outcome(fleet)[0] == result
    assert outcome(fleet)[1].endswith(" by alice: AL loss is fine.")
    assert fleet.status["rolloutHistory"][0]["requestedBy"]["action"] == action


def test_a_rollback_by_evidence_is_not_of_the_user_who_requests_it_while_pods_return() -> None:
    fleet = begin("worse", requests_per_second=20.0)
    fleet.run_until_phase("RollingBack")
    for engine in fleet.engines.values():
        engine.hangs = True
    fleet.run(SECOND)
    assert fleet.phase == "RollingBack"
    requested_by = {"action": "rollback", "user": "alice", "time": fleet.now.isoformat()}
    fleet.annotate(**{"rollback": fleet.desired_revision, "requested-by": json.dumps(requested_by)})
    fleet.wake()
    fleet.run_until_phase("RolledBack")
    assert "alice" not in outcome(fleet)[1]
    assert "requestedBy" not in fleet.status["rolloutHistory"][0]


def test_inconclusive_trial_is_rolled_back_where_the_spec_says_so() -> None:
    analysis = {"onInconclusive": "Rollback", "maxDuration": "30m", "minDuration": "0s"}
    fleet = begin("better", requests_per_second=0.0, rollout={"analysis": analysis})
    fleet.run_until_phase("RolledBack", minutes=40)
    assert "cannot be distinguished" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


def test_passed_trial_waits_for_approval() -> None:
    fleet = begin("better", rollout={"canary": {"approval": "Manual"}})
    fleet.run_until_phase("AwaitingApproval")
    fleet.run(20 * MINUTE)
    assert set(fleet.loaded_names()) == {"eagle3"}
    fleet.annotate(promote=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


@pytest.mark.parametrize(
    ("phase", "change"),
    use_each_nth(
        2, [*itertools.product(("Staging", "Analyzing", "AwaitingApproval", "Promoting"), ("third", "reverted", "rollback"))]
    ),
)
def test_change_of_the_spec_in_every_phase(phase: str, change: str) -> None:
    canary = {"approval": "Manual"} if phase == "AwaitingApproval" else {}
    fleet = begin("better", 30, rollout={"canary": canary})
    fleet.run_until_phase(phase)
    if phase == "Promoting":
        fleet.run(3 * SECOND)
    if change == "rollback":
        fleet.annotate(rollback=fleet.desired_revision)
    else:
        fleet.drafter("equal" if change == "third" else "eagle3")
    fleet.wake()
    if change == "third":
        fleet.run_until_phase("Analyzing")
        assert outcome(fleet)[0] == "Superseded"
        assert set(fleet.loaded_names()) <= {"eagle3", "equal"}
        assert fleet.own_names() == {"eagle3"}
    else:
        fleet.run_until_phase("RolledBack" if change == "rollback" else "Ready", minutes=2)
        assert outcome(fleet)[0] == ("RolledBack" if change == "rollback" else "Superseded")
        finish(fleet, drafter="eagle3")
    assert fleet.violations == []


def test_paused_trial_returns_its_pods_and_continues() -> None:
    fleet = begin("better", 4)
    fleet.run_until_phase("Analyzing")
    fleet.run(30 * SECOND)
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": True})
    fleet.wake()
    fleet.run(10 * SECOND)
    assert fleet.phase == "Paused"
    assert set(fleet.loaded_names()) == {"eagle3"}
    fleet.run(5 * MINUTE)
    assert set(fleet.loaded_names()) == {"eagle3"}
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": False})
    fleet.wake()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


@pytest.mark.parametrize("change", [{"paused": True}, {"canary": {"approval": "unreadable"}}])
@pytest.mark.parametrize("phase", ["Staging", "Promoting"])
def test_deadline_does_not_run_while_a_rollout_is_paused_or_suspended(phase: str, change: dict[str, Any]) -> None:
    fleet = begin("better", 30, rollout={"progressDeadline": "5m"})
    fleet.run_until_phase(phase)
    fleet.run((2 if phase == "Promoting" else 0) * SECOND)
    rollout = fleet.document["spec"]["rollout"]
    fleet.edit(rollout={**rollout, **change})
    fleet.wake()
    fleet.run(6 * MINUTE)
    assert fleet.phase == "Paused"
    fleet.edit(rollout=rollout)
    fleet.wake()
    fleet.run(0 * MINUTE)
    assert fleet.status["inPlaceRollout"]["phaseStartTime"] == format_timestamp(fleet.now)
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_pods_that_fail_while_a_promotion_is_paused_count() -> None:
    fleet = begin("better", 30)
    fleet.run_until_phase("Promoting")
    fleet.run(2 * SECOND)
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": True})
    fleet.wake()
    fleet.run(SECOND)
    assert fleet.phase == "Paused"
    for pod in fleet.pods[:2]:
        fleet.ready_pod(pod["metadata"]["name"], "False")
    fleet.run(SECOND)
    fleet.edit(rollout={**fleet.document["spec"]["rollout"], "paused": False})
    fleet.wake()
    fleet.run(SECOND)
    assert fleet.phase == "RolledBack"
    assert "2 of 30 pods" in outcome(fleet)[1]


def test_return_to_the_drafter_of_the_pods_own_revision_is_in_place() -> None:
    fleet = begin("better", 3)
    fleet.run_until_phase("Ready")
    fleet.run(MINUTE)
    fleet.drafter("eagle3")
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    fleet.annotate(promote=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="eagle3")
    assert fleet.status["stable"]["drafter"] == "models/eagle3"
    assert len(fleet.deployments()) == 1


def test_new_and_restarted_pods_come_to_the_promoted_drafter() -> None:
    fleet = begin("better", 3)
    fleet.run_until_phase("Ready")
    fleet.scale(5)
    fleet.run(MINUTE)
    fleet.crash_engine(fleet.pods[0]["metadata"]["name"])
    finish(fleet, drafter="better")
    assert len(fleet.engines) == 5


def test_pod_with_an_earlier_drafter_is_changed_after_the_promotion() -> None:
    fleet = begin("better", 3)
    fleet.run_until_phase("Ready")
    fleet.run(MINUTE)
    engine = next(iter(fleet.engines.values()))
    engine.own = engine.loaded = digest_of("eagle3")  # its volume had the earlier ConfigMap
    finish(fleet, drafter="better")


@pytest.mark.parametrize(("mode", "phase"), [("Auto", "Starting"), ("Required", "Failed")])
def test_pod_that_rejects_the_drafter_ends_the_rollout_in_place(mode: str, phase: str) -> None:
    fleet = serving_fleet(2, rollout={"inPlace": {"mode": mode}})
    for engine in fleet.engines.values():
        engine.rejects = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase(phase)
    text = fleet.message("Progressing") if mode == "Required" else fleet.status["canary"]["change"]
    assert "rejects the drafter: fc.weight has another shape" in text
    assert set(fleet.loaded_names()) == {"eagle3"}
    if mode == "Required":
        finish(fleet, drafter="eagle3")
        assert fleet.phase == "Failed"


def test_mode_required_that_cannot_claims_no_slot_and_writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = serving_fleet(1, rollout={"inPlace": {"mode": "Required"}})
    conclude, compared = fleet.conclude, {"inPlaceRunning": fleet.desired_revision, "inPlaceProblems": ["hidden_size differs."]}
    monkeypatch.setattr(fleet, "conclude", lambda name, result: conclude(name, {**result, **compared}))
    fleet.drafter("better")
    name, limits, phases, written = ("default", "chat"), ConcurrencyLimits(max_rollouts=1), [], []
    for _ in range(12):
        claim = read_slot_claim(fleet.document)
        allocation = allocate_slots({name: claim} if claim is not None else {}, limits)
        fleet.start_permission = allocation.permission_for(name, claim)
        before = fleet.status
        fleet.reconcile()
        fleet.check_jobs()
        phases.append(fleet.phase)
        written.append(fleet.status != before)
        fleet.now += SECOND
    assert fleet.condition("Progressing") == ("False", "InPlaceImpossible")
    begun = phases.index("Failed")
    assert set(phases[begun:]) == {"Failed"}
    assert len(phases) - begun > 5
    assert not any(written[begun + 1 :])
    assert read_slot_claim(fleet.document) is None


def test_pods_with_different_files_are_not_compared() -> None:
    fleet = serving_fleet(2, rollout={"inPlace": {"mode": "Required", "pods": 2}})
    sorted(fleet.engines.items())[1][1].other_files = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Failed")
    assert "read different files from /models/drafters/better" in fleet.message("Progressing")


def test_pod_that_does_not_answer_ends_the_start_at_the_deadline() -> None:
    fleet = serving_fleet(1, rollout={"inPlace": {"mode": "Required"}, "progressDeadline": "5m"})
    next(iter(fleet.engines.values())).hangs = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.run_until_phase("Failed", minutes=6)
    assert "has not answered" in fleet.message("Progressing")
    assert fleet.violations == []


def test_pod_that_does_not_answer_delays_no_start_of_others() -> None:
    fleet = serving_fleet(40)
    fleet.run(2 * MINUTE)
    fleet.engines[min(fleet.engines)].hangs = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Analyzing", minutes=3)
    fleet.run_until_phase("Ready")
    assert outcome(fleet)[0] == "Promoted"


def test_pod_that_does_not_answer_keeps_no_other_from_a_trial() -> None:
    fleet = begin("equal", 3, requests_per_second=0.3)
    fleet.run_until_phase("Analyzing")
    first, hanging, last = sorted(fleet.engines)
    fleet.engines[hanging].hangs = True
    fleet.ready_pod(first, "False")
    fleet.run(10 * MINUTE)
    assert [pod["name"] for pod in fleet.status["inPlaceRollout"]["pods"]] == [last]


def test_trial_grows_and_replaces_pods_that_are_gone() -> None:
    fleet = begin("equal", 100, requests_per_second=0.0, rollout={"canary": {"stepWeights": [10, 90], "stepDuration": "5m"}})
    fleet.run_until_phase("Analyzing")
    sizes = []
    for _ in range(5):
        fleet.run(6 * MINUTE)
        sizes.append(len(fleet.status["inPlaceRollout"]["pods"]))
    assert sizes[0] in (1, 10)
    assert sizes[-1] == 40
    first = fleet.status["inPlaceRollout"]["pods"][0]
    fleet.delete_pod(first["name"])
    fleet.run(20 * MINUTE)
    rollout = fleet.status["inPlaceRollout"]
    assert len(rollout["pods"]) == 40
    assert rollout["pods"][0]["index"] == 0
    assert rollout["pods"][0]["name"] != first["name"]
    assert rollout["pods"][0]["firstPair"] > 0
    assert fleet.violations == []


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, at_night(200)])
def test_promotion_takes_less_than_a_minute(replicas: int) -> None:
    fleet = begin("better", replicas)
    fleet.run_until_phase("Promoting")
    begun = fleet.now
    fleet.run_until_phase("Ready", minutes=2)
    assert fleet.now - begun < MINUTE
    finish(fleet, drafter="better")


def test_slow_loads_of_a_promotion_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = begin("better", 40)
    fleet.run_until_phase("Promoting")
    monkeypatch.setattr(fleet_module, "LOAD_SECONDS", 240.0)
    fleet.run_until_phase("Ready", minutes=7)  # four batches, begun 30 s apart
    assert outcome(fleet)[0] == "Promoted"


def test_promotion_that_many_pods_reject_is_rolled_back() -> None:
    fleet = begin("better", 40)
    fleet.run_until_phase("Analyzing")
    for name in sorted(fleet.engines)[20:]:
        fleet.engines[name].rejects = True
    fleet.run_until_phase("RolledBack")
    assert "cannot be promoted in place" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


def test_promotion_that_a_pod_rejected_succeeds_at_a_retry_once_the_pod_is_mended() -> None:
    fleet = begin("better", 2)
    fleet.run_until_phase("Analyzing")
    trial_pod = fleet.status["inPlaceRollout"]["pods"][0]["name"]
    other = next(engine for name, engine in fleet.engines.items() if name != trial_pod)
    other.rejects = True
    fleet.run_until_phase("RolledBack")
    assert "1 of 2 pods cannot be promoted in place" in outcome(fleet)[1]
    fleet.run(MINUTE)
    other.rejects = False
    fleet.annotate(retry="1")
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def test_few_late_pods_do_not_block_a_promotion_and_are_changed_later() -> None:
    fleet = begin("better", 40)
    fleet.run_until_phase("Analyzing")
    late = fleet.engines[sorted(fleet.engines)[30]]
    late.hangs = True
    fleet.run_until_phase("Ready", minutes=45)
    assert "Some pods do not have the drafter yet" in outcome(fleet)[1]
    late.hangs = False
    finish(fleet, drafter="better")


def test_pods_that_end_after_the_change_roll_the_promotion_back() -> None:
    fleet = begin("better", 30)
    fleet.run_until_phase("Promoting")
    fleet.run(4 * SECOND)
    for name in sorted(fleet.engines)[:4]:
        fleet.crash_engine(name)
    fleet.run_until_phase("RolledBack")
    assert "is not ready any more" in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


@pytest.mark.parametrize("mode", ["Auto", "Required"])
def test_zero_replicas_restart_the_trial_and_its_deadline(mode: str) -> None:
    fleet = begin("better", 2, rollout={"inPlace": {"mode": mode}, "progressDeadline": "5m"})
    fleet.run_until_phase("Analyzing")
    fleet.scale(0)
    fleet.run(SECOND)
    stored = fleet.status["inPlaceRollout"]
    fleet.run(20 * MINUTE)
    assert fleet.condition("Progressing") == ("False", "ScaledToZero")
    assert fleet.status["inPlaceRollout"] == stored
    fleet.scale(2)
    fleet.run(SECOND)
    began = fleet.status["inPlaceRollout"]["phaseStartTime"]
    assert began > stored["phaseStartTime"]
    fleet.run(20 * SECOND)
    assert fleet.status["inPlaceRollout"]["phaseStartTime"] == began
    assert fleet.condition("Progressing") == ("True", "Staging")
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


@pytest.mark.parametrize("offset", [0.0, -300.0, 300.0])
def test_engine_that_ends_counts_for_the_drafter_of_its_window(offset: float) -> None:
    fleet = begin("equal", 2, requests_per_second=0.5, rollout={"inPlace": {"mode": "Auto", "pods": 2}})
    fleet.clock_offset = offset
    for engine in fleet.engines.values():
        engine.clock_offset = offset
    fleet.run_until_phase("Analyzing")

    def crash_canaries(_: Any) -> None:
        for name, engine in list(fleet.engines.items()):
            if engine.loaded == digest_of("equal") and engine.own == digest_of("eagle3"):
                fleet.crash_engine(name, seconds=5)

    fleet.on_reconcile = crash_canaries
    fleet.run_until_phase("RolledBack", minutes=30)
    assert "Engines ended" in outcome(fleet)[1]
    fleet.on_reconcile = lambda _: None
    finish(fleet, drafter="eagle3")


def test_clock_of_a_pod_does_not_matter() -> None:
    fleet = serving_fleet(1)
    fleet.run(2 * MINUTE)
    next(iter(fleet.engines.values())).clock_offset = 1000.0
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Ready")
    finish(fleet, drafter="better")


def first_window_seconds(fleet: Fleet) -> float:
    fleet.run_until_phase("Analyzing")
    return float(fleet.status["inPlaceRollout"]["firstWindowSeconds"])


@pytest.mark.parametrize("seconds", [300.0, -3600.0, 0.0])
def test_clock_of_a_pod_does_not_change_the_windows(seconds: float) -> None:
    fleet = serving_fleet(1, requests_per_second=20.0)
    next(iter(fleet.engines.values())).clock_offset = seconds
    fleet.drafter("better")
    fleet.wake()
    assert first_window_seconds(fleet) == 4.0


def test_windows_are_short_where_traffic_has_begun_after_idle_days() -> None:
    fleet = serving_fleet(1, requests_per_second=0.0)
    fleet.run(2 * 24 * 60 * MINUTE)
    for engine in fleet.engines.values():
        engine.advance(fleet.now.timestamp())
        engine.requests_per_second = 20.0
    fleet.drafter("worse")
    fleet.wake()
    assert first_window_seconds(fleet) == 4.0


@pytest.mark.parametrize("interval", [60.0, 300.0])
def test_windows_are_short_where_pods_are_rarely_read(interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "READ_INTERVAL", interval)
    fleet = begin("better", requests_per_second=20.0)
    assert first_window_seconds(fleet) == 4.0
    fleet.run(20 * SECOND)
    fleet.drafter("equal")
    fleet.wake()
    fleet.run_until_phase("Staging")
    assert first_window_seconds(fleet) == 4.0


@pytest.mark.parametrize("event", ["restart", "zero replicas", "new operator"])
def test_windows_are_short_where_pods_are_first_read_late(event: str) -> None:
    fleet = begin("better", requests_per_second=20.0)
    fleet.run_until_phase("Staging")
    match event:
        case "restart":
            fleet.crash_engine(next(iter(fleet.engines)), 40)
        case "zero replicas":
            fleet.scale(0)
            fleet.run(5 * MINUTE)
            fleet.scale(1)
        case _:
            fleet.run(8 * SECOND)
            fleet.restart_operator()
            fleet.reconcile_at = None
            fleet.run(5 * MINUTE)
            fleet.wake()
    assert first_window_seconds(fleet) == 4.0


@pytest.mark.parametrize("value", use_each_nth(2, [MAX_COUNTER_VALUE, 1e15, 1.0]))
def test_any_counters_that_a_report_can_have_leave_the_status_writable(value: float) -> None:
    """A larger value makes the counters invalid (engine/drafter_endpoint/state.py)."""
    fleet = begin("equal", 2, requests_per_second=5.0)
    fleet.run_until_phase("Analyzing")
    engine = fleet.engines[fleet.status["inPlaceRollout"]["pods"][0]["name"]]
    report_window = engine._report_window

    def lie(window: Any) -> Any:
        report = report_window(window)
        assert report.counters is not None
        counters = replace(report.counters, generation_tokens=value, request_steps=value, step_seconds=value)
        return replace(report, counters=counters)

    engine._report_window = lie  # type: ignore[method-assign]
    fleet.run(10 * MINUTE)
    assert fleet.violations == []
    json.dumps(fleet.status, allow_nan=False)
    assert fleet.status["analysis"]["message"] != "No pair of windows is counted yet."


def test_operator_that_is_away_counts_nothing_twice_and_pods_return() -> None:
    fleet = begin("equal", 1, requests_per_second=1.0)
    fleet.run_until_phase("Analyzing")
    fleet.run(2 * MINUTE)
    fleet.restart_operator()
    fleet.reconcile_at = None
    fleet.run(10 * MINUTE)  # nobody reconciles
    assert fleet.loaded_names() == ["eagle3"]
    fleet.wake()
    fleet.run_until_phase("Ready", minutes=300)
    finish(fleet, drafter="equal")


@pytest.mark.parametrize(("phase", "seconds"), [("Staging", 0), ("Promoting", 0), ("Promoting", 4)])
def test_operator_that_is_away_beyond_the_deadline_continues(phase: str, seconds: int) -> None:
    fleet = begin("better", 30)
    fleet.run_until_phase(phase)
    fleet.run(seconds * SECOND)
    assert fleet.phase == phase
    fleet.restart_operator()
    fleet.reconcile_at = None
    fleet.run(45 * MINUTE)  # nobody reconciles
    fleet.wake()
    fleet.run_until_phase("Ready", minutes=10)
    finish(fleet, drafter="better")


def test_pods_that_hang_after_an_absence_are_late_at_their_first_failure() -> None:
    fleet = begin("better", 30)
    fleet.run_until_phase("Promoting")
    fleet.restart_operator()
    fleet.reconcile_at = None
    fleet.run(45 * MINUTE)
    for engine in fleet.engines.values():
        engine.hangs = True
    fleet.wake()
    fleet.run_until_phase("RollingBack", minutes=1)
    assert "pods are late" in fleet.message("Progressing")


def test_pod_that_cannot_come_to_the_drafter_is_named() -> None:
    fleet = begin("better", 3)
    fleet.run_until_phase("Ready")
    engine = next(iter(fleet.engines.values()))
    engine.own = engine.loaded = digest_of("eagle3")
    engine.rejects = True
    reconciles = fleet.reconciles
    assert reconciles <= 3 * max(len(item.windows) for item in fleet.engines.values()), "of the whole rollout"
    fleet.run(5 * MINUTE)
    assert fleet.condition("Degraded") == ("True", "WrongDrafter")
    assert f"pod {engine.pod}: fc.weight has another shape." in fleet.message("Degraded")
    assert fleet.reconciles - reconciles < 30
    engine.rejects = False
    finish(fleet, drafter="better")
    assert fleet.condition("Degraded") == ("False", "AsExpected")


@pytest.mark.slow
def test_thousand_pods_are_promoted_within_a_minute() -> None:
    fleet = begin("better", 1000)
    fleet.run_until_phase("Promoting")
    assert len(fleet.status["inPlaceRollout"]["pods"]) <= 40
    begun = fleet.now
    fleet.run_until_phase("Ready", minutes=2)
    assert fleet.now - begun < MINUTE
    assert fleet.violations == []


def test_rejected_drafter_is_tried_again_on_request() -> None:
    fleet = begin("better", 1, rollout={"inPlace": {"mode": "Required"}})
    fleet.run_until_phase("Ready")
    engine = next(iter(fleet.engines.values()))
    engine.rejects = True
    fleet.drafter("equal")
    fleet.wake()
    fleet.run_until_phase("Failed")
    fleet.run(5 * MINUTE)
    engine.rejects = False
    fleet.annotate(retry="1")
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    assert fleet.violations == []


def test_drafter_with_the_same_files_under_another_name_is_promoted() -> None:
    fleet = serving_fleet(2)
    fleet.run(2 * MINUTE)
    for engine in fleet.engines.values():
        engine.copies["copy"] = "eagle3"
    fleet.drafter("copy")
    fleet.wake()
    fleet.run_until_phase("Ready", minutes=240)
    assert fleet.status["stable"]["drafter"] == "models/copy"
    finish(fleet, drafter="eagle3")


def test_pod_that_a_change_breaks_ends_the_trial_and_no_later_one() -> None:
    fleet = begin("better", 2)
    fleet.run_until_phase("Analyzing")
    broken = fleet.engines[fleet.status["inPlaceRollout"]["pods"][0]["name"]]
    broken.break_down()
    fleet.ready_pod(broken.pod, "False")
    fleet.run_until_phase("RolledBack")
    assert "is broken by a change of its drafter" in outcome(fleet)[1]
    fleet.drafter("equal")
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    fleet.run(5 * MINUTE)
    assert fleet.phase == "Analyzing"
    assert fleet.violations == []


def test_rejected_load_ends_the_trial() -> None:
    fleet = begin("better", 1)
    fleet.run_until_phase("Analyzing")
    fleet.engines[fleet.status["inPlaceRollout"]["pods"][0]["name"]].rejects = True
    fleet.run_until_phase("RolledBack", minutes=2)
    assert "rejects the drafter: fc.weight has another shape." in outcome(fleet)[1]
    finish(fleet, drafter="eagle3")


def test_rollout_in_place_holds_a_slot_until_it_waits_for_a_user_or_returns() -> None:
    fleet = begin("better", 1, rollout={"canary": {"approval": "Manual"}})
    fleet.start_permission = StartPermission(frozenset(), "3 rollouts are in progress")
    fleet.run_until_phase("Queued")
    assert fleet.status.get("inPlaceRollout") is None
    fleet.start_permission = StartPermission()
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.start_permission = StartPermission(frozenset())
    for phase, holds_slot in (("Analyzing", True), ("AwaitingApproval", False), ("Promoting", True)):
        fleet.run_until_phase(phase)
        claim = read_slot_claim(fleet.document)
        assert (claim is not None and claim.holds_slot) is holds_slot
        fleet.annotate(**({"promote": fleet.desired_revision} if phase == "AwaitingApproval" else {}))
        fleet.wake()
    fleet.run_until_phase("Ready")
    assert read_slot_claim(fleet.document) is None
    finish(fleet, drafter="better")


def test_emergency_return_to_the_drafter_of_the_pods_own_revision() -> None:
    fleet = begin("better", 2)
    fleet.run_until_phase("Ready")
    for name in list(fleet.engines):  # the folder was deleted, and no pod comes to the drafter any more
        fleet.ready_pod(name, "False")
    fleet.drafter("eagle3")
    fleet.wake()
    fleet.run(10 * SECOND)
    assert outcome(fleet)[0] == "Promoted"
    assert "no pod is ready with the drafter" in outcome(fleet)[1]
    assert "inPlace" not in fleet.status["stable"]
    assert fleet.expected_digest(fleet.status["stable"]["revision"]) is None
