"""Tuning in the rollout: a recommendation becomes a trial, a trial a canary, and its result an applied setting, or not."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api.status import Status
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.rollout.revision.desired import build_status_setting, read_status_setting, resolve_desired_revision
from aerie.rollout.trials.failures import find_capacity_obstacle
from aerie.tuning.recommendation import Recommendation, RecommendationError, RecommendedAction
from tests.golden import Messages
from tests.unit.rollout.world import World, masked, serving_world

MINUTE = timedelta(minutes=1)
K5 = {"mode": "Static", "numSpeculativeTokens": 5}
K3 = {"mode": "Static", "numSpeculativeTokens": 3}


def tuned_world(**spec: Any) -> World:
    """Return a serving world whose tuning may start canaries."""
    speculation = spec.pop("speculation", {})
    tuning = {"mode": "Auto", **speculation.get("tuning", {})}
    return serving_world(**spec, speculation={**speculation, "tuning": tuning})


def edit_speculation(world: World, **speculation: Any) -> None:
    """Write another spec.speculation, in mode Auto."""
    tuning = {"mode": "Auto", **speculation.pop("tuning", {})}
    world.edit(speculation={**speculation, "tuning": tuning})


def recommend(
    world: World,
    setting: SpeculationSetting | None = None,
    action: RecommendedAction = "Change",
    reason: str = "K=5 is +8.0 % better.",
) -> None:
    """Set the tuner's current recommendation for the stable pods."""
    recommended_setting = Static(5) if setting is None else setting
    revision = world.status["stable"]["revision"]
    world.recommendation = Recommendation(
        revision, world.now.timestamp(), action, recommended_setting, (0.02, 0.08, 0.15), reason
    )


def speculation(world: World) -> dict[str, Any]:
    status: dict[str, Any] = world.status["speculation"]
    return status


def reconcile(world: World) -> None:
    """Reconcile once, and let the cluster follow."""
    world.step()
    world.check()
    world.schedule()
    world.ready()


def run_until(world: World, phase: str, slower: float = 0.0, times: int = 200) -> None:
    """Reconcile until the phase; blocks close with the canary's time per output token changed by `slower`."""
    for _ in range(times):
        reconcile(world)
        if world.status["phase"] == phase:
            return
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, step=False)
        else:
            world.now += 5 * MINUTE
    raise AssertionError(f"{world.status['phase']} instead of {phase}: {world.message('Progressing')}")


def run_trial(world: World, slower: float) -> None:
    """Run a trial from its recommendation until it has ended."""
    recommend(world)
    world.step()
    run_until(world, "Analyzing")
    for _ in range(200):
        run_until(world, "Ready", slower)
        if "trial" not in speculation(world):
            return
    raise AssertionError("the trial does not end")


# ------------------------------------------------------------------------------------------------------- no recommendation
def test_without_recommendation_there_is_no_tuning_status() -> None:
    world = tuned_world()
    assert speculation(world) == {"current": K3}
    assert "SpeculationTuned" not in {condition["type"] for condition in world.status["conditions"]}


def test_tuning_blocker_is_shown_and_survives_restart() -> None:
    world = tuned_world()
    recommend(world, None, "Insufficient", "4 of 6 blocks of five minutes are there.")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "InsufficientData")
    assert speculation(world)["message"] == world.message("SpeculationTuned") == "4 of 6 blocks of five minutes are there."
    before = copy.deepcopy(world.status)
    world.recommendation = None
    world.step()
    assert world.status == before


def test_small_changes_of_recommendation_are_not_written() -> None:
    world = tuned_world(speculation={"tuning": {"mode": "Recommend"}})
    recommend(world, reason="K=5 is +8.0 % better.")
    world.step()
    before = copy.deepcopy(world.status)
    recommend(world, reason="K=5 is +8.3 % better.")
    world.step()
    assert world.status == before
    recommend(world, Static(4), reason="K=4 is +8.3 % better.")
    world.step()
    assert speculation(world)["recommended"] == {"mode": "Static", "numSpeculativeTokens": 4}


# ------------------------------------------------------------------------------------------------------------------ a trial
def test_trial_is_written_before_its_objects_are_created() -> None:
    world = tuned_world()
    recommend(world)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.requeue_after) == ((), (), timedelta(0))
    world.step()
    trial = speculation(world)["trial"]
    assert (trial["setting"], trial["purpose"], trial["predicted"]["estimate"]) == (K5, "Improve", 0.08)
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    assert world.status["phase"] == "Ready"
    world.recommendation = None  # an operator that has just started
    world.step()
    assert world.status["phase"] == "Preflight"
    record = world.objects["ConfigMap", f"chat-{trial['revision']}-preflight"]["data"]["resource.json"]
    assert '"numSpeculativeTokens": 5' in record, "preflight checks the setting on trial"


def test_faster_setting_is_applied_without_spec_change() -> None:
    world = tuned_world(rollout={"analysis": {"minDuration": "2h"}})
    old = world.desired_revision
    run_trial(world, -0.1)
    world.settle()
    status = speculation(world)
    new = world.status["stable"]["revision"]
    assert world.document["spec"]["speculation"] == {"tuning": {"mode": "Auto"}}
    assert status["current"] == status["applied"]["setting"] == world.status["stable"]["setting"] == K5
    assert (status["applied"]["specRevision"], status["applied"]["revision"]) == (old, new)
    (change,) = status["trials"]
    assert (change["fromSetting"], change["toSetting"], change["result"], change["purpose"]) == (K3, K5, "Promoted", "Improve")
    assert 0.08 < change["measured"]["lower"] < change["measured"]["estimate"] < change["measured"]["upper"] < 0.15
    assert world.replicas() == {f"chat-{new}": 2}
    assert world.status["rolloutHistory"][0]["change"] == "K=5"
    assert "time per output token" in world.status["rolloutHistory"][0]["message"].lower()
    assert status["savings"]["currentRate"] == change["measured"]["estimate"]
    assert status["savings"]["net"] <= 0, "so far it has only cost"
    world.now += timedelta(hours=100)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
    assert plan.status.to_dict() == world.status, "nothing depends on the clock"


@pytest.mark.parametrize(("slower", "result", "cooldown_hours"), [(0.1, "RolledBack", 24), (0.0, "Inconclusive", 6)])
def test_setting_without_significant_gain_is_rolled_back(slower: float, result: str, cooldown_hours: int) -> None:
    world = tuned_world(rollout={"analysis": {"maxDuration": "1h"}})
    old = world.desired_revision
    recommend(world)
    phases = set()
    for _ in range(120):
        reconcile(world)
        phases.add(world.status["phase"])
        if speculation(world).get("trials") and world.status["phase"] == "Ready":
            break
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, dispersion=0.03, step=False)
        else:
            world.now += MINUTE
    assert not phases & {"Held", "RolledBack", "Ramping"}
    assert speculation(world)["trials"][0]["result"] == result
    assert ("lastRollbackTime" in speculation(world)) == (result == "RolledBack")
    trial = speculation(world)["trials"][0]
    hours = (datetime.fromisoformat(trial["completionTime"]) - datetime.fromisoformat(trial["startTime"])) / timedelta(hours=1)
    assert (2 <= hours < 2.2) if result == "Inconclusive" else hours < 1, "twice the deadline"
    assert (speculation(world)["current"], speculation(world).get("applied")) == (K3, None)
    assert "rejectedRevision" not in world.status
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    ended = world.now
    for hours, reason in ((1, "Cooldown"), (cooldown_hours - 1, "Cooldown"), (cooldown_hours + 1, "Trial")):
        world.now = ended + timedelta(hours=hours)
        recommend(world)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason), "six hours, and four times that"
        if reason == "Cooldown":  # or the tuner, which knows of the cooldown, holds
            recommend(world, action="Hold", reason="K=5 is +8.0 % better. But a change was taken back 1.0 h ago.")
            world.step()
            assert world.condition("SpeculationTuned") == ("False", "Cooldown")


def test_exploration_is_measured_and_ended() -> None:
    world = tuned_world(replicas=3)
    recommend(world, Static(7), "Explore", "A canary with K=7 would teach what is worth 3.6 %.")
    run_until(world, "Analyzing")
    began = world.now
    run_until(world, "RollingBack", -0.2)
    assert timedelta(minutes=28) <= world.now - began <= timedelta(minutes=34)
    assert world.status["rolloutHistory"][0]["result"] == "Explored"
    assert speculation(world)["trials"][0]["result"] == "Explored"
    assert "lastRollbackTime" not in speculation(world)
    run_until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == K3
    recommend(world, Static(7), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial"), "its result may be used immediately"


def test_exploration_is_kept_on_recommendation() -> None:
    world = tuned_world(replicas=3, rollout={"analysis": {"minDuration": "20m"}})
    recommend(world, Static(7), "Explore", "A canary with K=7 would teach what is worth 3.6 %.")
    run_until(world, "Analyzing")
    recommend(world, Static(5))
    world.measure_time(6, -0.2)
    assert speculation(world)["trial"]["purpose"] == "Explore", "another setting is no recommendation of this one"
    recommend(world, Static(7))
    world.step()
    trial = speculation(world)["trial"]
    assert (trial["purpose"], trial["predicted"]["estimate"]) == ("Improve", 0.08)
    blocks = world.status["analysis"]["comparisons"][0]["sampleCount"]
    assert blocks >= 6, "counted blocks are kept"
    run_until(world, "Monitoring", -0.2)
    assert speculation(world)["trials"][0]["result"] == "Promoted"
    assert speculation(world)["current"] == {"mode": "Static", "numSpeculativeTokens": 7}


def test_kept_exploration_without_proof_is_rolled_back() -> None:
    world = tuned_world(replicas=3)
    recommend(world, Static(7), "Explore")
    run_until(world, "Analyzing")
    recommend(world, Static(7))
    run_until(world, "RollingBack", 0.1)
    (change,) = speculation(world)["trials"]
    assert (change["purpose"], change["result"]) == ("Improve", "RolledBack")
    assert "lastRollbackTime" in speculation(world)


def test_recommendation_from_before_ready_canary_is_ignored() -> None:
    world = tuned_world(replicas=3)
    recommend(world, Static(7), "Explore")
    run_until(world, "WarmingUp")
    recommend(world, Static(7))
    assert world.recommendation is not None
    world.recommendation = replace(world.recommendation, decision_time=world.recommendation.decision_time - 3600)
    run_until(world, "Analyzing")
    world.measure_time(3, -0.2)
    assert speculation(world)["trial"]["purpose"] == "Explore"


@pytest.mark.parametrize("slower", [0.1, 0.0])
def test_cooldown_ends_when_traffic_changed_since_the_trial(slower: float) -> None:
    world = tuned_world(rollout={"analysis": {"maxDuration": "1h"}})
    run_trial(world, slower)
    world.settle()
    world.now += timedelta(hours=1)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    recommend(world)
    assert world.recommendation is not None
    trial = speculation(world)["trials"][0]
    began, ended = (datetime.fromisoformat(trial[name]).timestamp() for name in ("startTime", "completionTime"))
    for since, reason in ((began - 1, "Cooldown"), ((began + ended) / 2, "Trial")):
        world.recommendation = replace(world.recommendation, traffic_changed_at=since)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason)


def test_exploration_that_breaks_objective_is_rolled_back() -> None:
    world = tuned_world(replicas=3, speculation={"tuning": {"decisionInterval": "3h"}})
    recommend(world, Static(7), "Explore")
    run_until(world, "Analyzing")
    run_until(world, "RollingBack", 1.0)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"


def test_preflight_may_reject_a_trial() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    world.step()
    revision = speculation(world)["trial"]["revision"]
    world.conclude(f"chat-{revision}-preflight", {"passed": False, "summary": "no.", "errors": ["✗ C9 memory: too little."]})
    plan = world.step()
    assert "C9 memory" in world.status["rolloutHistory"][0]["message"]
    assert speculation(world)["trials"][0]["result"] == "Failed"
    assert [event.reason for event in plan.events if event.type == "Warning"] == ["Failed"]
    world.settle()
    assert world.status["phase"] == "Ready"
    assert list(world.deployments()) == [world.desired_revision]


def test_trial_without_preflight_result_ends_at_deadline() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    plan = world.step()
    assert plan.requeue_after is not None
    assert plan.requeue_after <= timedelta(minutes=30)
    world.now += timedelta(minutes=31)
    world.step()
    assert "spec.rollout.progressDeadline (30m)" in world.status["rolloutHistory"][0]["message"]
    assert "trial" not in speculation(world)


@pytest.mark.parametrize("parts", range(12))
def test_crash_after_any_write_loses_no_trial(parts: int) -> None:
    world = tuned_world()
    recommend(world)
    world.step(parts)
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    for _ in range(40):
        world.step(parts % 5)
        reconcile(world)
        if world.status["phase"] == "Analyzing":
            break
        world.now += MINUTE
    run_until(world, "Monitoring", -0.1)
    assert speculation(world)["current"] == K5


# -------------------------------------------------------------------------------------------------------------- user actions
@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_no_trial_in_other_modes(mode: str, messages: Messages) -> None:
    world = tuned_world(speculation={"tuning": {"mode": mode}})
    recommend(world)
    world.settle()
    assert "trial" not in speculation(world)
    if mode == "Recommend":
        assert speculation(world)["recommended"] == K5
        messages.check("mode Recommend", world.message("SpeculationTuned"))
    else:
        assert world.condition("SpeculationTuned") == ("False", "Off")


@pytest.mark.parametrize("mode", ["Recommend", "Off"])
@pytest.mark.parametrize("phase", ["Preflight", "Starting", "WarmingUp", "Analyzing"])
def test_a_trial_ends_with_the_mode(mode: str, phase: str) -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    for _ in range(20):
        world.step()
        if world.status["phase"] == phase:
            break
        world.check()
        if world.status["phase"] != "Preflight":
            world.schedule()
            world.ready()
        world.now += 5 * MINUTE
    assert world.status["phase"] == phase
    world.edit(speculation={"tuning": {"mode": mode}})
    world.step()
    assert "trial" not in speculation(world)
    assert speculation(world)["trials"][0]["result"] == "Superseded"
    run_until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_mode_off_restores_spec_setting_by_canary() -> None:
    world = tuned_world()
    run_trial(world, -0.1)
    world.edit(speculation={"tuning": {"mode": "Recommend"}})
    world.settle()
    assert speculation(world)["current"] == K5, "the applied setting stays"
    world.edit(speculation={"tuning": {"mode": "Off"}})
    world.step()
    assert world.status["phase"] == "Preflight"
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)
    assert speculation(world)["savings"]["currentRate"] == 0


@pytest.mark.parametrize("phase", ["Preflight", "Analyzing", "afterwards"])
def test_user_setting_overrides_tuned_setting(phase: str) -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    if phase == "afterwards":
        run_trial(world, -0.1)
    elif phase == "Analyzing":
        run_until(world, "Analyzing")
    edit_speculation(world, numSpeculativeTokens=2)
    world.step()
    assert "trial" not in speculation(world)
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert world.status["canary"]["change"] == "K=2"
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == {"mode": "Static", "numSpeculativeTokens": 2}
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_spec_with_setting_on_trial_adopts_its_canary() -> None:
    world = tuned_world()
    recommend(world)
    run_until(world, "Analyzing")
    edit_speculation(world, numSpeculativeTokens=5)
    world.step()
    assert "trial" not in speculation(world)
    assert world.status["phase"] == "Analyzing", "the same pods continue"
    run_until(world, "Ready", -0.1)
    world.settle()
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_rollback_of_promotion_restores_previous_setting() -> None:
    world = tuned_world()
    old = world.desired_revision
    recommend(world)
    run_until(world, "Monitoring", -0.1)
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(rollback=world.status["stable"]["revision"])
    world.step()
    assert world.status["stable"]["revision"] == old
    assert "applied" not in speculation(world)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"
    assert "lastRollbackTime" in speculation(world)
    run_until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    world.now += timedelta(hours=30)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected"), "a user has rolled it back"


def test_manual_actions_apply_to_trials() -> None:
    for action, result in (("rollback", "RolledBack"), ("promote", "Promoted")):
        world = tuned_world()
        recommend(world)
        run_until(world, "Analyzing")
        world.annotate(**{action: speculation(world)["trial"]["revision"]})
        run_until(world, "Ready", 0.0)
        assert speculation(world)["trials"][0]["result"] == result


def test_no_trial_without_pods() -> None:
    world = tuned_world()
    recommend(world)
    world.step()
    world.edit(replicas=0)
    world.settle()
    assert "trial" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 0}


# ----------------------------------------------------------------------------------------------------------- blocked trials
def test_no_trial_on_stale_or_foreign_recommendation() -> None:
    world = tuned_world()
    recommend(world)
    assert world.recommendation is not None
    for other in (
        Recommendation("another", *_fields_after_revision(world.recommendation)),
        Recommendation(
            world.recommendation.revision,
            world.recommendation.decision_time - 3601,
            *_fields_after_revision(world.recommendation)[1:],
        ),
    ):
        world.recommendation = other
        world.settle()
        assert "trial" not in speculation(world)


def _fields_after_revision(recommendation: Recommendation) -> tuple[Any, ...]:
    return (
        recommendation.decision_time,
        recommendation.action,
        recommendation.setting,
        recommendation.predicted_gain,
        recommendation.reason,
    )


def test_unsupported_setting_is_not_tried_and_named(messages: Messages) -> None:
    world = tuned_world(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--data-parallel-size=2"]})
    recommend(world, Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 64, 3)), 5))
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected")
    assert "data parallel size 2" in world.message("SpeculationTuned")
    recommend(world, Static(9))
    world.step()
    messages.check("beyond maxSpeculativeTokens", world.message("SpeculationTuned"))


def test_a_trial_waits_for_rollouts_and_for_pods(messages: Messages) -> None:
    world = tuned_world()
    world.ready(value="False")
    recommend(world)
    world.step()
    messages.check("pods not ready", world.message("SpeculationTuned"))
    world.ready()
    world.drafter("eagle31")
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "RolloutInProgress")
    assert "trial" not in speculation(world)


# ----------------------------------------------------------------------------------------------------------------- round trips
def speculation_settings() -> st.SearchStrategy[SpeculationSetting]:
    tokens = st.integers(1, 15)
    schedules = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 7)), min_size=1, max_size=4).map(_schedule)
    return st.one_of(st.just(Off()), tokens.map(Static), tokens.map(Adaptive), schedules)


def _schedule(steps: list[tuple[int, int]]) -> Schedule:
    tiers, first = [], 1
    for width, tokens in steps:
        tiers.append(ScheduleTier(first, first + width, tokens))
        first += width + 1
    tiers[0] = ScheduleTier(tiers[0].first, tiers[0].last, max(1, tiers[0].tokens))
    return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))


@given(speculation_settings())
def test_setting_round_trips_through_status_and_recommendation(setting: SpeculationSetting) -> None:
    assert read_status_setting(build_status_setting(setting)) == setting
    recommendation = Recommendation("r1", 1.5, "Change", setting, (0.1, 0.2, 0.3), "It is better.")
    assert Recommendation.from_dict(recommendation.to_dict()) == recommendation


def test_invalid_recommendation_is_rejected() -> None:
    good = Recommendation("r1", 1.5, "Change", Static(5), (0.1, 0.2, 0.3), "It is better.").to_dict()
    for change in (
        {"action": "Try"},
        {"setting": None},
        {"predicted_gain": [0.1]},
        {"predicted_gain": [0.1, float("nan"), 0.2]},
        {"decision_time": "soon"},
    ):
        with pytest.raises(RecommendationError):
            Recommendation.from_dict({**good, **change})
    with pytest.raises(RecommendationError):
        Recommendation.from_dict({})


def test_setting_changes_revision_and_pods() -> None:
    world = tuned_world()
    resource = world.observed().resource
    desired = [
        resolve_desired_revision(resource, setting=setting)
        for setting in (Static(3), Static(5), Off(), Schedule((ScheduleTier(1, 8, 3),), 3))
    ]
    assert desired[0].revision == world.desired_revision
    assert len({setting.revision for setting in desired}) == 4
    arguments = [setting.pod_template["spec"]["containers"][0]["args"] for setting in desired if setting.pod_template]
    assert ["--speculative-config" in each for each in arguments] == [True, True, False, True]
    assert desired[3].arm.setting is not None
    assert desired[3].arm.setting.to_dict()["schedule"] == [{"minBatchSize": 1, "maxBatchSize": 8, "numSpeculativeTokens": 3}]


# ----------------------------------------------------------------------------------------------- user settings take precedence
def test_tuning_is_off_by_default() -> None:
    world = serving_world()
    recommend(world)
    world.settle()
    assert "trial" not in speculation(world)
    assert speculation(world)["recommended"] == K5


def test_zero_tokens_forbid_trials_unless_allowed() -> None:
    world = tuned_world(speculation={"numSpeculativeTokens": 0})
    recommend(world, Static(3), "Explore")
    world.settle()
    assert "trial" not in speculation(world)
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    assert "whenZero: Try" in world.message("SpeculationTuned")
    edit_speculation(world, numSpeculativeTokens=0, tuning={"whenZero": "Try"})
    recommend(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    edit_speculation(world, numSpeculativeTokens=0)
    world.step()
    assert "trial" not in speculation(world), "and ended immediately"


def test_zero_tokens_without_drafter_message_names_drafter(messages: Messages) -> None:
    world = tuned_world(drafter=None, speculation={"numSpeculativeTokens": 0, "tuning": {"whenZero": "Try"}})
    recommend(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    messages.check("no drafter", world.message("SpeculationTuned"))


@pytest.mark.parametrize(
    ("bound", "name"),
    [({"maxSpeculativeTokens": 4}, "maxSpeculativeTokens"), ({"slo": {"timePerOutputToken": "20ms"}}, "slo")],
)
def test_setting_beyond_new_bound_is_dropped(bound: dict[str, Any], name: str, messages: Messages) -> None:
    world = tuned_world(rollout={"analysis": {"minDuration": "0s"}})
    run_trial(world, -0.1)
    world.settle()
    assert speculation(world)["current"] == K5
    edit_speculation(world, tuning=bound)
    world.step()
    assert world.status["phase"] == "Preflight"
    assert world.condition("SpeculationTuned") == ("False", "SettingVoid")
    messages.check(f"applied setting beyond {name}", world.message("SpeculationTuned"))
    run_until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)


def test_stricter_objective_ends_trial_and_looser_does_not() -> None:
    world = tuned_world(speculation={"tuning": {"slo": {"timePerOutputToken": "20ms"}}})
    recommend(world)
    world.step()
    edit_speculation(world, tuning={"slo": {"timePerOutputToken": "30ms"}})
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    edit_speculation(world, tuning={"slo": {"timePerOutputToken": "30ms", "timeToFirstToken": "1s"}})
    world.step()
    assert "trial" not in speculation(world)


# ------------------------------------------------------------------------------------------------------- trials that fail
def run_crashing_trial(world: World) -> None:
    """Run a trial whose engines crash, from its recommendation to its end."""
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    trial = speculation(world)["trial"]["revision"]
    for _ in range(60):
        world.step()
        world.check()
        world.schedule()
        world.crash(trial, 3)
        world.ready(world.desired_revision)
        if "trial" not in speculation(world) and world.status["phase"] == "Ready":
            return
        world.now += MINUTE
    raise AssertionError("the trial does not end")


def test_cooldown_after_failed_starts_doubles() -> None:
    world = tuned_world()
    for times, hours in ((1, 24), (2, 48), (3, 96)):
        run_crashing_trial(world)
        (failure,) = speculation(world)["failures"]
        assert (failure["setting"], failure["reason"], failure["failureCount"]) == (K5, "Failed", times)
        ended = world.now
        world.now = ended + timedelta(hours=hours - 1)
        recommend(world)
        assert world.recommendation is not None
        world.recommendation = replace(world.recommendation, traffic_changed_at=world.now.timestamp() - 1)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "Cooldown"), "other traffic does not make it start"
        world.now = ended + timedelta(hours=hours, minutes=1)


def test_other_spec_or_retry_clears_failed_settings() -> None:
    for change in ("spec", "word"):
        world = tuned_world()
        run_crashing_trial(world)
        if change == "spec":
            edit_speculation(world, numSpeculativeTokens=2)
            run_until(world, "Analyzing")
            world.annotate(promote=world.desired_revision)
            run_until(world, "Ready")
        else:
            world.annotate(retry="now")
            world.step()
        assert "failures" not in speculation(world)
        assert "consecutiveFailures" not in speculation(world)


def run_trial_without_room(world: World) -> None:
    """Run a trial in a cluster that has room for the replicas alone."""
    recommend(world)
    world.step()
    places = world.document["spec"]["replicas"]
    for _ in range(60):
        world.step()
        world.check()
        world.schedule()
        for pod in world.pods[places:]:
            pod["status"] = {"phase": "Pending", "conditions": [NO_NODE]}
        if "trial" not in speculation(world) and world.status["phase"] == "Ready":
            return
        world.now += MINUTE
    raise AssertionError("the trial does not end")


NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes: Insufficient nvidia.com/gpu",
}


def test_lack_of_room_blocks_trials_and_message_names_fixes(messages: Messages) -> None:
    world = tuned_world()
    run_trial_without_room(world)
    assert speculation(world)["failures"][0]["reason"] == "InsufficientCapacity"
    assert speculation(world)["savings"]["spent"] == 0, "a pod without a node costs nothing"
    world.now += timedelta(days=30)
    for setting in (Static(5), Static(7)):
        recommend(world, setting)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "InsufficientCapacity")
    for fragment in ("2 ", "capacity: Reuse", "quota", "aerie.dev/retry"):
        assert fragment in world.message("SpeculationTuned")
    messages.check("no capacity for a trial", masked(world.message("SpeculationTuned")))
    for change in ("fewer pods", "a rollout found room", "a manual retry"):
        other = copy.deepcopy(world)
        if change == "fewer pods":
            other.edit(replicas=3, rollout={"canary": {"capacity": "Reuse"}})
        elif change == "a rollout found room":
            other.edit(replicas=4)
        else:
            other.annotate(retry="there are more nodes now")
        other.settle()
        recommend(other)
        other.step()
        assert other.condition("SpeculationTuned") == ("False", "Trial"), change


def test_lack_of_room_message_counts_current_trial_pods(messages: Messages) -> None:
    """An autoscaler has since requested more replicas, and not all of them serve."""
    world = tuned_world()
    run_trial_without_room(world)
    world.edit(replicas=8)
    world.now += timedelta(days=1)
    speculation_status = Status.from_dict(world.status).speculation
    assert speculation_status is not None
    obstacle = find_capacity_obstacle(speculation_status, world.observed(), speculation_status.failures[0].spec_revision)
    messages.check("no capacity for a trial", masked(obstacle))


def test_time_from_a_clock_ahead_counts_from_now() -> None:
    world = tuned_world()
    ahead = (world.now + timedelta(days=7)).isoformat()
    world.document["status"]["speculation"]["lastChangeTime"] = ahead
    world.step()
    assert datetime.fromisoformat(speculation(world)["lastChangeTime"]) == world.now
    world.now += timedelta(hours=7)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")


def test_blocked_tuner_is_not_reported_optimal() -> None:
    world = tuned_world()
    recommend(world, Off(), "Hold", "no canary could ask for acceptance again.")
    assert world.recommendation is not None
    world.recommendation = replace(world.recommendation, blocked_reason="CannotProbe")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "CannotProbe")


# ---------------------------------------------------------------------------------------------------------------- savings
@pytest.mark.parametrize(("capacity", "hours"), [("Surge", 4.0), ("Reuse", 0.0)])
def test_savings_count_each_surplus_pod_while_it_exists(capacity: str, hours: float) -> None:
    world = tuned_world(replicas=4, rollout={"analysis": {"maxDuration": "1h"}, "canary": {"capacity": capacity}})
    recommend(world)
    world.step()
    for _ in range(120):
        reconcile(world)
        if "trial" not in speculation(world):
            break
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, 0.0, dispersion=0.03, step=False)
        else:
            world.now += MINUTE
    assert speculation(world)["trials"][0]["result"] == "Inconclusive"
    spent = speculation(world)["savings"]["spent"]
    assert hours <= spent < hours + 0.6, "two pods, for two hours and a warm-up"
    assert speculation(world)["savings"]["net"] == -spent


def test_retained_pods_are_counted_when_deleted() -> None:
    world = tuned_world(rollout={"canary": {"scaleDownDelay": "10h"}})
    recommend(world)
    run_until(world, "Monitoring", -0.1)
    before = speculation(world)["savings"]["spent"]
    world.now += timedelta(hours=10)
    world.settle()
    assert world.status["phase"] == "Ready"
    assert 19 < speculation(world)["savings"]["spent"] - before < 21
