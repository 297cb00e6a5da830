"""Tuning in the rollout: an advice becomes a trial, a trial a canary, and what it has shown a choice, or not."""

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
from tests.unit.rollout.world import World, masked, serving

MINUTE = timedelta(minutes=1)
K5 = {"mode": "Static", "numSpeculativeTokens": 5}
K3 = {"mode": "Static", "numSpeculativeTokens": 3}


def tuned(**spec: Any) -> World:
    """A world that serves, whose tuning is granted its canaries."""
    speculation = spec.pop("speculation", {})
    tuning = {"mode": "Auto", **speculation.get("tuning", {})}
    return serving(**spec, speculation={**speculation, "tuning": tuning})


def edit(world: World, **speculation: Any) -> None:
    """The user writes another spec.speculation, in mode Auto."""
    tuning = {"mode": "Auto", **speculation.pop("tuning", {})}
    world.edit(speculation={**speculation, "tuning": tuning})


def advise(
    world: World,
    setting: SpeculationSetting | None = None,
    action: RecommendedAction = "Change",
    reason: str = "K=5 is +8.0 % better.",
) -> None:
    """What the tuner says now of the stable pods."""
    found = Static(5) if setting is None else setting
    revision = world.status["stable"]["revision"]
    world.recommendation = Recommendation(revision, world.now.timestamp(), action, found, (0.02, 0.08, 0.15), reason)


def speculation(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.status["speculation"]
    return found


def look(world: World) -> None:
    """One pass, and what the cluster makes of it."""
    world.step()
    world.check()
    world.schedule()
    world.ready()


def until(world: World, phase: str, slower: float = 0.0, looks: int = 200) -> None:
    """Looks until the phase; blocks close with the canary so much slower."""
    for _ in range(looks):
        look(world)
        if world.status["phase"] == phase:
            return
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, step=False)
        else:
            world.now += 5 * MINUTE
    raise AssertionError(f"{world.status['phase']} instead of {phase}: {world.message('Progressing')}")


def tried(world: World, slower: float) -> None:
    """A trial from its advice to the end of all that follows from it."""
    advise(world)
    world.step()
    until(world, "Analyzing")
    for _ in range(200):
        until(world, "Ready", slower)
        if "trial" not in speculation(world):
            return
    raise AssertionError("the trial does not end")


# ---------------------------------------------------------------------------------------------------------------- no advice
def test_without_an_advice_nothing_is_said_of_tuning() -> None:
    world = tuned()
    assert speculation(world) == {"current": K3}
    assert "SpeculationTuned" not in {one["type"] for one in world.status["conditions"]}


def test_what_lacks_is_said_and_stays_after_a_restart_of_the_operator() -> None:
    world = tuned()
    advise(world, None, "Insufficient", "4 of 6 blocks of five minutes are there.")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "InsufficientData")
    assert speculation(world)["message"] == world.message("SpeculationTuned") == "4 of 6 blocks of five minutes are there."
    before = copy.deepcopy(world.status)
    world.recommendation = None
    world.step()
    assert world.status == before


def test_figures_of_an_advice_that_move_a_little_are_not_written() -> None:
    world = tuned(speculation={"tuning": {"mode": "Recommend"}})
    advise(world, reason="K=5 is +8.0 % better.")
    world.step()
    before = copy.deepcopy(world.status)
    advise(world, reason="K=5 is +8.3 % better.")
    world.step()
    assert world.status == before
    advise(world, Static(4), reason="K=4 is +8.3 % better.")
    world.step()
    assert speculation(world)["recommended"] == {"mode": "Static", "numSpeculativeTokens": 4}


# ------------------------------------------------------------------------------------------------------------------ a trial
def test_a_trial_is_written_before_anything_is_made_for_it() -> None:
    world = tuned()
    advise(world)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.requeue_after) == ((), (), timedelta(0))
    world.step()
    trial = speculation(world)["trial"]
    assert (trial["setting"], trial["purpose"], trial["predicted"]["estimate"]) == (K5, "Improve", 0.08)
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    assert world.status["phase"] == "Ready"
    world.recommendation = None  # an operator that has just begun
    world.step()
    assert world.status["phase"] == "Preflight"
    record = world.objects["ConfigMap", f"chat-{trial['revision']}-preflight"]["data"]["resource.json"]
    assert '"numSpeculativeTokens": 5' in record, "preflight looks at the setting on trial"


def test_a_faster_setting_is_kept_and_the_spec_stays_as_it_is() -> None:
    world = tuned(rollout={"analysis": {"minDuration": "2h"}})
    old = world.desired_revision
    tried(world, -0.1)
    world.settle()
    said = speculation(world)
    new = world.status["stable"]["revision"]
    assert world.document["spec"]["speculation"] == {"tuning": {"mode": "Auto"}}
    assert said["current"] == said["applied"]["setting"] == world.status["stable"]["setting"] == K5
    assert (said["applied"]["specRevision"], said["applied"]["revision"]) == (old, new)
    (change,) = said["trials"]
    assert (change["fromSetting"], change["toSetting"], change["result"], change["purpose"]) == (K3, K5, "Promoted", "Improve")
    assert 0.08 < change["measured"]["lower"] < change["measured"]["estimate"] < change["measured"]["upper"] < 0.15
    assert world.replicas() == {f"chat-{new}": 2}
    assert world.status["rolloutHistory"][0]["change"] == "K=5"
    assert "time per output token" in world.status["rolloutHistory"][0]["message"].lower()
    assert said["savings"]["currentRate"] == change["measured"]["estimate"]
    assert said["savings"]["net"] <= 0, "so far it has only cost"
    world.now += timedelta(hours=100)
    plan = world.plan()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ())
    assert plan.status.to_dict() == world.status, "nothing follows the clock"


@pytest.mark.parametrize(("slower", "result", "pause"), [(0.1, "RolledBack", 24), (0.0, "Inconclusive", 6)])
def test_a_setting_that_is_not_certainly_faster_is_taken_back_and_nobody_is_asked(slower: float, result: str, pause: int) -> None:
    world = tuned(rollout={"analysis": {"maxDuration": "1h"}})
    old = world.desired_revision
    advise(world)
    seen = set()
    for _ in range(120):
        look(world)
        seen.add(world.status["phase"])
        if speculation(world).get("trials") and world.status["phase"] == "Ready":
            break
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, dispersion=0.03, step=False)
        else:
            world.now += MINUTE
    assert not seen & {"Held", "RolledBack", "Ramping"}
    assert speculation(world)["trials"][0]["result"] == result
    assert ("lastRollbackTime" in speculation(world)) == (result == "RolledBack")
    last = speculation(world)["trials"][0]
    hours = (datetime.fromisoformat(last["completionTime"]) - datetime.fromisoformat(last["startTime"])) / timedelta(hours=1)
    assert (2 <= hours < 2.2) if result == "Inconclusive" else hours < 1, "twice the deadline"
    assert (speculation(world)["current"], speculation(world).get("applied")) == (K3, None)
    assert "rejectedRevision" not in world.status
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    ended = world.now
    for hours, reason in ((1, "Cooldown"), (pause - 1, "Cooldown"), (pause + 1, "Trial")):
        world.now = ended + timedelta(hours=hours)
        advise(world)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason), "six hours, and four times that"
        if reason == "Cooldown":  # or the tuner, which knows of the pause, says so itself
            advise(world, action="Hold", reason="K=5 is +8.0 % better. But a change was taken back 1.0 h ago.")
            world.step()
            assert world.condition("SpeculationTuned") == ("False", "Cooldown")


def test_a_canary_that_explores_is_measured_and_given_up() -> None:
    world = tuned(replicas=3)
    advise(world, Static(7), "Explore", "A canary with K=7 would teach what is worth 3.6 %.")
    until(world, "Analyzing")
    began = world.now
    until(world, "RollingBack", -0.2)
    assert timedelta(minutes=28) <= world.now - began <= timedelta(minutes=34)
    assert world.status["rolloutHistory"][0]["result"] == "Explored"
    assert speculation(world)["trials"][0]["result"] == "Explored"
    assert "lastRollbackTime" not in speculation(world)
    until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == K3
    advise(world, Static(7), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial"), "what it taught may be acted on at once"


def test_a_canary_that_explores_is_kept_on_the_tuners_word() -> None:
    world = tuned(replicas=3, rollout={"analysis": {"minDuration": "20m"}})
    advise(world, Static(7), "Explore", "A canary with K=7 would teach what is worth 3.6 %.")
    until(world, "Analyzing")
    advise(world, Static(5))
    world.measure_time(6, -0.2)
    assert speculation(world)["trial"]["purpose"] == "Explore", "another setting is no word on this one"
    advise(world, Static(7))
    world.step()
    kept = speculation(world)["trial"]
    assert (kept["purpose"], kept["predicted"]["estimate"]) == ("Improve", 0.08)
    blocks = world.status["analysis"]["comparisons"][0]["sampleCount"]
    assert blocks >= 6, "what was counted counts"
    until(world, "Monitoring", -0.2)
    assert speculation(world)["trials"][0]["result"] == "Promoted"
    assert speculation(world)["current"] == {"mode": "Static", "numSpeculativeTokens": 7}


def test_a_canary_that_was_kept_and_does_not_prove_itself_is_rolled_back() -> None:
    world = tuned(replicas=3)
    advise(world, Static(7), "Explore")
    until(world, "Analyzing")
    advise(world, Static(7))
    until(world, "RollingBack", 0.1)
    (change,) = speculation(world)["trials"]
    assert (change["purpose"], change["result"]) == ("Improve", "RolledBack")
    assert "lastRollbackTime" in speculation(world)


def test_an_advice_from_before_its_canary_was_ready_keeps_nothing() -> None:
    world = tuned(replicas=3)
    advise(world, Static(7), "Explore")
    until(world, "WarmingUp")
    advise(world, Static(7))
    assert world.recommendation is not None
    world.recommendation = replace(world.recommendation, decision_time=world.recommendation.decision_time - 3600)
    until(world, "Analyzing")
    world.measure_time(3, -0.2)
    assert speculation(world)["trial"]["purpose"] == "Explore"


@pytest.mark.parametrize("slower", [0.1, 0.0])
def test_a_pause_after_a_trial_that_failed_ends_where_traffic_has_changed_since_that_began(slower: float) -> None:
    world = tuned(rollout={"analysis": {"maxDuration": "1h"}})
    tried(world, slower)
    world.settle()
    world.now += timedelta(hours=1)
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    advise(world)
    assert world.recommendation is not None
    trial = speculation(world)["trials"][0]
    began, ended = (datetime.fromisoformat(trial[name]).timestamp() for name in ("startTime", "completionTime"))
    for since, reason in ((began - 1, "Cooldown"), ((began + ended) / 2, "Trial")):
        world.recommendation = replace(world.recommendation, traffic_changed_at=since)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason)


def test_a_slow_explorer_that_users_would_notice_is_rolled_back() -> None:
    world = tuned(replicas=3, speculation={"tuning": {"decisionInterval": "3h"}})
    advise(world, Static(7), "Explore")
    until(world, "Analyzing")
    until(world, "RollingBack", 1.0)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"


def test_preflight_may_refuse_a_trial() -> None:
    world = tuned()
    advise(world)
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


def test_a_trial_whose_preflight_says_nothing_is_given_up_in_time() -> None:
    world = tuned()
    advise(world)
    world.step()
    plan = world.step()
    assert plan.requeue_after is not None
    assert plan.requeue_after <= timedelta(minutes=30)
    world.now += timedelta(minutes=31)
    world.step()
    assert "spec.rollout.progressDeadline (30m)" in world.status["rolloutHistory"][0]["message"]
    assert "trial" not in speculation(world)


@pytest.mark.parametrize("parts", range(12))
def test_a_crash_anywhere_on_the_way_loses_nothing(parts: int) -> None:
    world = tuned()
    advise(world)
    world.step(parts)
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    for _ in range(40):
        world.step(parts % 5)
        look(world)
        if world.status["phase"] == "Analyzing":
            break
        world.now += MINUTE
    until(world, "Monitoring", -0.1)
    assert speculation(world)["current"] == K5


# ------------------------------------------------------------------------------------------------------------ what a user does
@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_no_trial_in_other_modes(mode: str, messages: Messages) -> None:
    world = tuned(speculation={"tuning": {"mode": mode}})
    advise(world)
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
    world = tuned()
    advise(world)
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
    until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_in_mode_off_the_spec_stands_and_a_choice_is_taken_back_by_a_canary() -> None:
    world = tuned()
    tried(world, -0.1)
    world.edit(speculation={"tuning": {"mode": "Recommend"}})
    world.settle()
    assert speculation(world)["current"] == K5, "what is in force stays"
    world.edit(speculation={"tuning": {"mode": "Off"}})
    world.step()
    assert world.status["phase"] == "Preflight"
    until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(promote=world.desired_revision)
    until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)
    assert speculation(world)["savings"]["currentRate"] == 0


@pytest.mark.parametrize("at", ["Preflight", "Analyzing", "afterwards"])
def test_a_spec_of_the_user_wins(at: str) -> None:
    world = tuned()
    advise(world)
    world.step()
    if at == "afterwards":
        tried(world, -0.1)
    elif at == "Analyzing":
        until(world, "Analyzing")
    edit(world, numSpeculativeTokens=2)
    world.step()
    assert "trial" not in speculation(world)
    until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    assert world.status["canary"]["change"] == "K=2"
    world.annotate(promote=world.desired_revision)
    until(world, "Ready")
    world.settle()
    assert speculation(world)["current"] == {"mode": "Static", "numSpeculativeTokens": 2}
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_a_user_who_writes_what_is_on_trial_makes_it_the_spec() -> None:
    world = tuned()
    advise(world)
    until(world, "Analyzing")
    edit(world, numSpeculativeTokens=5)
    world.step()
    assert "trial" not in speculation(world)
    assert world.status["phase"] == "Analyzing", "the same pods go on"
    until(world, "Ready", -0.1)
    world.settle()
    assert "applied" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 2}


def test_a_promotion_that_is_taken_back_brings_back_the_setting_before() -> None:
    world = tuned()
    old = world.desired_revision
    advise(world)
    until(world, "Monitoring", -0.1)
    assert speculation(world)["applied"]["setting"] == K5
    world.annotate(rollback=world.status["stable"]["revision"])
    world.step()
    assert world.status["stable"]["revision"] == old
    assert "applied" not in speculation(world)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"
    assert "lastRollbackTime" in speculation(world)
    until(world, "Ready")
    world.settle()
    assert world.replicas() == {f"chat-{old}": 2}
    world.now += timedelta(hours=30)
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected"), "a person has rolled it back"


def test_a_person_may_roll_a_trial_back_or_promote_it() -> None:
    for word, end in (("rollback", "RolledBack"), ("promote", "Promoted")):
        world = tuned()
        advise(world)
        until(world, "Analyzing")
        world.annotate(**{word: speculation(world)["trial"]["revision"]})
        until(world, "Ready", 0.0)
        assert speculation(world)["trials"][0]["result"] == end


def test_without_pods_nothing_is_tried() -> None:
    world = tuned()
    advise(world)
    world.step()
    world.edit(replicas=0)
    world.settle()
    assert "trial" not in speculation(world)
    assert world.replicas() == {f"chat-{world.desired_revision}": 0}


# ------------------------------------------------------------------------------------------------------- what holds a trial up
def test_no_trial_begins_on_an_advice_of_other_pods_or_of_another_time() -> None:
    world = tuned()
    advise(world)
    assert world.recommendation is not None
    for other in (
        Recommendation("another", *_rest(world.recommendation)),
        Recommendation(
            world.recommendation.revision, world.recommendation.decision_time - 3601, *_rest(world.recommendation)[1:]
        ),
    ):
        world.recommendation = other
        world.settle()
        assert "trial" not in speculation(world)


def _rest(advice: Recommendation) -> tuple[Any, ...]:
    return advice.decision_time, advice.action, advice.setting, advice.predicted_gain, advice.reason


def test_a_setting_that_the_engine_cannot_run_is_not_tried_and_says_why(messages: Messages) -> None:
    world = tuned(engine={"image": "vllm/vllm-openai:v0.33.0", "args": ["--data-parallel-size=2"]})
    advise(world, Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 64, 3)), 5))
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "SettingRejected")
    assert "data parallel size 2" in world.message("SpeculationTuned")
    advise(world, Static(9))
    world.step()
    messages.check("beyond maxSpeculativeTokens", world.message("SpeculationTuned"))


def test_a_trial_waits_for_rollouts_and_for_pods(messages: Messages) -> None:
    world = tuned()
    world.ready(value="False")
    advise(world)
    world.step()
    messages.check("pods not ready", world.message("SpeculationTuned"))
    world.ready()
    world.drafter("eagle31")
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "RolloutInProgress")
    assert "trial" not in speculation(world)


# ----------------------------------------------------------------------------------------------------------------- round trips
def settings_() -> st.SearchStrategy[SpeculationSetting]:
    most = st.integers(1, 15)
    schedules = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 7)), min_size=1, max_size=4).map(_schedule)
    return st.one_of(st.just(Off()), most.map(Static), most.map(Adaptive), schedules)


def _schedule(steps: list[tuple[int, int]]) -> Schedule:
    tiers, first = [], 1
    for width, tokens in steps:
        tiers.append(ScheduleTier(first, first + width, tokens))
        first += width + 1
    tiers[0] = ScheduleTier(tiers[0].first, tiers[0].last, max(1, tiers[0].tokens))
    return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))


@given(settings_())
def test_a_setting_comes_back_from_the_status_and_from_an_advice(setting: SpeculationSetting) -> None:
    assert read_status_setting(build_status_setting(setting)) == setting
    advice = Recommendation("r1", 1.5, "Change", setting, (0.1, 0.2, 0.3), "It is better.")
    assert Recommendation.from_dict(advice.to_dict()) == advice


def test_what_is_no_advice_is_refused() -> None:
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


def test_the_setting_is_part_of_the_revision_and_of_the_pods() -> None:
    world = tuned()
    resource = world.observed().resource
    found = [
        resolve_desired_revision(resource, setting=one)
        for one in (Static(3), Static(5), Off(), Schedule((ScheduleTier(1, 8, 3),), 3))
    ]
    assert found[0].revision == world.desired_revision
    assert len({one.revision for one in found}) == 4
    arguments = [one.pod_template["spec"]["containers"][0]["args"] for one in found if one.pod_template]
    assert ["--speculative-config" in each for each in arguments] == [True, True, False, True]
    assert found[3].arm.setting is not None
    assert found[3].arm.setting.to_dict()["schedule"] == [{"minBatchSize": 1, "maxBatchSize": 8, "numSpeculativeTokens": 3}]


# -------------------------------------------------------------------------------------------- what a user writes binds at once
def test_who_writes_nothing_about_tuning_grants_no_canary() -> None:
    world = serving()
    advise(world)
    world.settle()
    assert "trial" not in speculation(world)
    assert speculation(world)["recommended"] == K5


def test_without_tokens_no_draft_is_tried_unless_the_spec_says_so() -> None:
    world = tuned(speculation={"numSpeculativeTokens": 0})
    advise(world, Static(3), "Explore")
    world.settle()
    assert "trial" not in speculation(world)
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    assert "whenZero: Try" in world.message("SpeculationTuned")
    edit(world, numSpeculativeTokens=0, tuning={"whenZero": "Try"})
    advise(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    edit(world, numSpeculativeTokens=0)
    world.step()
    assert "trial" not in speculation(world), "and taken back at once"


def test_without_tokens_and_drafter_the_message_names_the_drafter(messages: Messages) -> None:
    world = tuned(drafter=None, speculation={"numSpeculativeTokens": 0, "tuning": {"whenZero": "Try"}})
    advise(world, Static(3), "Explore")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "NoDrafts")
    messages.check("no drafter", world.message("SpeculationTuned"))


@pytest.mark.parametrize(
    ("bound", "name"),
    [({"maxSpeculativeTokens": 4}, "maxSpeculativeTokens"), ({"slo": {"timePerOutputToken": "20ms"}}, "slo")],
)
def test_a_choice_beyond_a_new_bound_is_void_at_once(bound: dict[str, Any], name: str, messages: Messages) -> None:
    world = tuned(rollout={"analysis": {"minDuration": "0s"}})
    tried(world, -0.1)
    world.settle()
    assert speculation(world)["current"] == K5
    edit(world, tuning=bound)
    world.step()
    assert world.status["phase"] == "Preflight"
    assert world.condition("SpeculationTuned") == ("False", "SettingVoid")
    messages.check(f"applied setting beyond {name}", world.message("SpeculationTuned"))
    until(world, "Analyzing")
    assert world.status["canary"]["revision"] == world.desired_revision
    world.annotate(promote=world.desired_revision)
    until(world, "Ready")
    assert speculation(world)["current"] == K3
    assert "applied" not in speculation(world)


def test_a_looser_objective_voids_nothing_and_a_stricter_one_ends_a_trial() -> None:
    world = tuned(speculation={"tuning": {"slo": {"timePerOutputToken": "20ms"}}})
    advise(world)
    world.step()
    edit(world, tuning={"slo": {"timePerOutputToken": "30ms"}})
    world.step()
    assert speculation(world)["trial"]["setting"] == K5
    edit(world, tuning={"slo": {"timePerOutputToken": "30ms", "timeToFirstToken": "1s"}})
    world.step()
    assert "trial" not in speculation(world)


# ------------------------------------------------------------------------------------------------------- trials that fail
def crashed(world: World) -> None:
    """A trial whose engines crash, from its advice to its end."""
    advise(world)
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


def test_the_pause_after_a_setting_that_cannot_start_doubles_whatever_traffic_does() -> None:
    world = tuned()
    for times, hours in ((1, 24), (2, 48), (3, 96)):
        crashed(world)
        (failure,) = speculation(world)["failures"]
        assert (failure["setting"], failure["reason"], failure["failureCount"]) == (K5, "Failed", times)
        ended = world.now
        world.now = ended + timedelta(hours=hours - 1)
        advise(world)
        assert world.recommendation is not None
        world.recommendation = replace(world.recommendation, traffic_changed_at=world.now.timestamp() - 1)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "Cooldown"), "other traffic does not make it start"
        world.now = ended + timedelta(hours=hours, minutes=1)


def test_another_spec_or_a_person_forgets_what_has_failed() -> None:
    for change in ("spec", "word"):
        world = tuned()
        crashed(world)
        if change == "spec":
            edit(world, numSpeculativeTokens=2)
            until(world, "Analyzing")
            world.annotate(promote=world.desired_revision)
            until(world, "Ready")
        else:
            world.annotate(retry="now")
            world.step()
        assert "failures" not in speculation(world)
        assert "consecutiveFailures" not in speculation(world)


def roomless(world: World) -> None:
    """A trial in a cluster that has room for the replicas alone."""
    advise(world)
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


def test_without_room_nothing_is_tried_until_there_is_some_and_the_ways_out_are_named(messages: Messages) -> None:
    world = tuned()
    roomless(world)
    assert speculation(world)["failures"][0]["reason"] == "InsufficientCapacity"
    assert speculation(world)["savings"]["spent"] == 0, "a pod without a node costs nothing"
    world.now += timedelta(days=30)
    for setting in (Static(5), Static(7)):
        advise(world, setting)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "InsufficientCapacity")
    for words in ("2 ", "capacity: Reuse", "quota", "aerie.dev/retry"):
        assert words in world.message("SpeculationTuned")
    messages.check("no capacity for a trial", masked(world.message("SpeculationTuned")))
    for change in ("fewer pods", "a rollout found room", "a person's word"):
        other = copy.deepcopy(world)
        if change == "fewer pods":
            other.edit(replicas=3, rollout={"canary": {"capacity": "Reuse"}})
        elif change == "a rollout found room":
            other.edit(replicas=4)
        else:
            other.annotate(retry="there are more nodes now")
        other.settle()
        advise(other)
        other.step()
        assert other.condition("SpeculationTuned") == ("False", "Trial"), change


def test_without_room_the_pods_that_are_named_are_those_of_a_trial_of_now(messages: Messages) -> None:
    """An autoscaler has asked for more since, and not all of these serve."""
    world = tuned()
    roomless(world)
    world.edit(replicas=8)
    world.now += timedelta(days=1)
    said = Status.from_dict(world.status).speculation
    assert said is not None
    obstacle = find_capacity_obstacle(said, world.observed(), said.failures[0].spec_revision)
    messages.check("no capacity for a trial", masked(obstacle))


def test_a_moment_of_a_leader_whose_clock_was_ahead_counts_from_now() -> None:
    world = tuned()
    ahead = (world.now + timedelta(days=7)).isoformat()
    world.document["status"]["speculation"]["lastChangeTime"] = ahead
    world.step()
    assert datetime.fromisoformat(speculation(world)["lastChangeTime"]) == world.now
    world.now += timedelta(hours=7)
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")


def test_a_tuner_that_cannot_go_on_by_itself_is_not_called_optimal() -> None:
    world = tuned()
    advise(world, Off(), "Hold", "no canary could ask for acceptance again.")
    assert world.recommendation is not None
    world.recommendation = replace(world.recommendation, blocked_reason="CannotProbe")
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "CannotProbe")


# ------------------------------------------------------------------------------------------------------------- the account
@pytest.mark.parametrize(("capacity", "hours"), [("Surge", 4.0), ("Reuse", 0.0)])
def test_the_balance_counts_each_pod_beyond_the_replicas_for_as_long_as_it_is_there(capacity: str, hours: float) -> None:
    world = tuned(replicas=4, rollout={"analysis": {"maxDuration": "1h"}, "canary": {"capacity": capacity}})
    advise(world)
    world.step()
    for _ in range(120):
        look(world)
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


def test_pods_that_are_kept_after_a_promotion_are_counted_when_they_go() -> None:
    world = tuned(rollout={"canary": {"scaleDownDelay": "10h"}})
    advise(world)
    until(world, "Monitoring", -0.1)
    before = speculation(world)["savings"]["spent"]
    world.now += timedelta(hours=10)
    world.settle()
    assert world.status["phase"] == "Ready"
    assert 19 < speculation(world)["savings"]["spent"] - before < 21
