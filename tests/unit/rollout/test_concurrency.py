"""Many rollouts at the same time: who waits, who comes first, and what waits for nobody."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.speculation import Static
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie.rollout.facts.concurrency import (
    ConcurrencyLimits,
    ResourceName,
    SlotClaim,
    StartPermission,
    allocate_slots,
    read_slot_claim,
)
from tests.golden import Messages
from tests.unit.rollout.test_effective_setting import MINUTE, advise, tuned, until
from tests.unit.rollout.world import World, canarying, masked, serving

NOT_YET = StartPermission(frozenset())
FULL = StartPermission(frozenset(), "3 rollouts are in progress")


def waits(minute: int, purpose: Any = "Rollout") -> SlotClaim:
    return SlotClaim(purpose, f"2026-01-01T00:{minute:02}:00Z", holds_slot=False)


HOLDS = SlotClaim("Rollout", "2026-01-01T00:00:00Z", holds_slot=True)


def names_of(granted: frozenset[ResourceName]) -> set[str]:
    return {"/".join(place) for place in granted}


# --------------------------------------------------------------------------------------------------------------------- allotting
def test_unlimited_rollouts_all_start() -> None:
    turn = allocate_slots({("a", "x"): HOLDS}, ConcurrencyLimits()).permission_for(("a", "y"), None)
    assert turn.allowed_purposes == {"Rollout", "Trial"}


def test_longest_waiting_claim_starts_first() -> None:
    claims = {("a", "late"): waits(9), ("a", "early"): waits(1), ("a", "middle"): waits(5), ("a", "going"): HOLDS}
    assert names_of(allocate_slots(claims, ConcurrencyLimits(max_rollouts=3)).granted_resources) == {"a/early", "a/middle"}


def test_busy_namespace_does_not_delay_another() -> None:
    claims = {("many", f"{number:03}"): waits(1) for number in range(500)} | {("few", "only"): waits(59)}
    granted = allocate_slots(claims, ConcurrencyLimits(max_rollouts=2)).granted_resources
    assert names_of(granted) == {"many/000", "few/only"}


def test_namespace_limit_applies(messages: Messages) -> None:
    claims = {("a", str(number)): waits(number) for number in range(9)} | {("b", "0"): waits(50)}
    allotment = allocate_slots(claims, ConcurrencyLimits(max_rollouts=6, max_rollouts_per_namespace=2))
    assert names_of(allotment.granted_resources) == {"a/0", "a/1", "b/0"}
    messages.check("limit of the namespace", allotment.permission_for(("a", "5"), waits(5)).wait_reason)


def test_trials_and_rollouts_have_separate_slots(messages: Messages) -> None:
    claims = {("a", "0"): HOLDS, ("a", "1"): waits(1), ("a", "2"): waits(2, "Trial"), ("a", "3"): waits(3, "Trial")}
    allotment = allocate_slots(claims, ConcurrencyLimits(max_rollouts=1, max_trials=1))
    assert names_of(allotment.granted_resources) == {"a/2"}
    assert allotment.permission_for(("a", "2"), claims["a", "2"]).allowed_purposes == {"Trial"}
    messages.check("limit of trials", allotment.permission_for(("a", "3"), claims["a", "3"]).wait_reason)
    messages.check("limit of rollouts", allotment.permission_for(("a", "1"), claims["a", "1"]).wait_reason)


CLAIMS = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from([f"{number}" for number in range(20)])),
    st.builds(
        SlotClaim,
        st.sampled_from(["Rollout", "Trial"]),
        st.sampled_from(["2026-01-01", "2026-01-02", "2026-01-03"]),
        st.booleans(),
    ),
    max_size=40,
)
MOST = st.none() | st.integers(min_value=0, max_value=8)


@given(CLAIMS, st.builds(ConcurrencyLimits, MOST, MOST, MOST))
def test_slots_are_filled_within_limits(claims: dict[ResourceName, SlotClaim], limits: ConcurrencyLimits) -> None:
    granted = allocate_slots(claims, limits).granted_resources
    assert all(not claims[place].holds_slot for place in granted)
    for purpose, most, within in (
        ("Rollout", limits.max_rollouts, limits.max_rollouts_per_namespace),
        ("Trial", limits.max_trials, None),
    ):
        mine = {place: claim for place, claim in claims.items() if claim.purpose == purpose}
        busy = Counter(place[0] for place, claim in mine.items() if claim.holds_slot or place in granted)
        held = Counter(place[0] for place, claim in mine.items() if claim.holds_slot)
        assert most is None or sum(busy.values()) <= max(most, sum(held.values()))
        assert within is None or all(count <= max(within, held[name]) for name, count in busy.items())
        left = [place for place, claim in mine.items() if not claim.holds_slot and place not in granted]
        if most is None or sum(busy.values()) < most:
            assert all(within is not None and busy[namespace] >= within for namespace, _ in left)
        for namespace, _ in granted & set(mine):
            earlier = [mine[place].since for place in granted & set(mine) if place[0] == namespace]
            assert all(mine[place].since >= max(earlier) for place in left if place[0] == namespace)


# --------------------------------------------------------------------------------------------------------------------- claiming
def test_canary_holds_slot_until_it_waits_for_user_or_ends() -> None:
    world, _ = canarying("Analyzing")
    assert read_slot_claim(world.document) == SlotClaim("Rollout", world.status["canary"]["startTime"], holds_slot=True)
    for phase in ("Held", "AwaitingApproval", "RollingBack"):
        world.document["status"]["canary"]["phase"] = phase
        assert read_slot_claim(world.document) is None
    world.document["status"]["canary"]["phase"] = "Promoting"
    assert read_slot_claim(world.document) is not None
    world.edit(rollout={"paused": True})
    assert read_slot_claim(world.document) is None


def test_first_revision_needs_no_slot() -> None:
    world = World()
    world.start_permission = NOT_YET
    world.settle_until("Starting")
    assert read_slot_claim(world.document) is None


def test_change_waits_for_its_slot(messages: Messages) -> None:
    world = serving()
    world.start_permission = NOT_YET
    world.drafter("eagle31")
    world.settle()
    since = world.status["queue"]["queuedTime"]
    assert world.status["queue"] == {"purpose": "Rollout", "queuedTime": since}
    assert (world.status["phase"], world.condition("Progressing")) == ("Preflight", ("True", "Preflight"))
    assert read_slot_claim(world.document) == SlotClaim("Rollout", since, holds_slot=False)
    world.start_permission = FULL
    world.now += timedelta(minutes=5)
    plan = world.step()
    assert (world.status["phase"], world.condition("Progressing")) == ("Queued", ("True", "Queued"))
    messages.check("a queued change", masked(world.message("Progressing"), NEW=world.desired_revision))
    assert [event.reason for event in plan.events] == ["Queued"]
    assert world.condition("Ready") == ("True", "AllPodsReady")
    world.now += timedelta(days=3)
    assert not world.step().objects_to_apply
    assert world.status["queue"]["queuedTime"] == since, "it keeps its place"
    assert len(world.deployments()) == 1, "no pod is asked for meanwhile"
    world.start_permission = StartPermission(frozenset({"Rollout"}))
    world.step()
    assert (world.status["phase"], world.status.get("queue")) == ("Starting", None)


def test_other_spec_or_pause_releases_the_claim() -> None:
    world = serving()
    world.start_permission = FULL
    world.drafter("eagle31")
    world.settle()
    world.edit(rollout={"paused": True})
    world.settle()
    assert "queue" not in world.status
    world.edit(rollout={})
    world.settle()
    assert "queue" in world.status
    world.drafter("eagle3")
    world.settle()
    assert (world.status["phase"], world.status.get("queue")) == ("Ready", None)


def test_rollback_and_revert_need_no_slot() -> None:
    world, old = canarying("Analyzing")
    world.start_permission = FULL
    world.drafter("eagle3")
    world.settle()
    assert (world.status["phase"], world.status["stable"]["revision"]) == ("Ready", old)


def test_running_canary_continues_beyond_the_limit() -> None:
    world, _ = canarying("Starting")
    world.start_permission = FULL
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"


def test_manual_promotion_needs_no_slot() -> None:
    world = serving()
    world.start_permission = FULL
    world.drafter("eagle31")
    world.settle()
    world.annotate(**{PROMOTE_ANNOTATION.removeprefix("aerie.dev/"): world.desired_revision})
    world.step()
    assert world.status["phase"] == "Starting"


def test_replacement_of_unready_revision_needs_no_slot() -> None:
    world = serving()
    world.start_permission = FULL
    world.ready(value="False")
    world.drafter("eagle31")
    for _ in range(4):
        world.step()
        world.check()
    assert "queue" not in world.status
    assert world.status["canary"]["revision"] == world.desired_revision


def test_trial_waits_for_slot_and_canary_holds_it(messages: Messages) -> None:
    world = tuned()
    world.start_permission = StartPermission(frozenset({"Rollout"}))
    advise(world)
    world.step()
    assert world.status["queue"]["purpose"] == "Trial"
    assert read_slot_claim(world.document) == SlotClaim("Trial", world.status["queue"]["queuedTime"], holds_slot=False)
    world.start_permission = StartPermission(frozenset(), "1 trial is in progress")
    advise(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Queued")
    messages.check("a queued trial", world.message("SpeculationTuned"))
    world.start_permission = StartPermission(frozenset({"Trial"}))
    advise(world)
    world.step()
    claim = read_slot_claim(world.document)
    assert claim is not None
    assert (claim.purpose, claim.holds_slot, world.status.get("queue")) == ("Trial", True, None)
    world.start_permission = NOT_YET  # of rollouts
    until(world, "Analyzing")
    assert world.status["canary"]["setting"]["numSpeculativeTokens"] == Static(5).tokens


def test_forty_simultaneous_changes_take_turns() -> None:
    """What is allotted follows from the statuses alone, as it does for a leader that has just begun."""
    limits = ConcurrencyLimits(max_rollouts=4, max_rollouts_per_namespace=3)
    rollout = {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}}
    first = serving(replicas=1, rollout=rollout)
    worlds = {(f"team-{number % 3}", f"chat-{number}"): copy.deepcopy(first) for number in range(40)}
    for world in worlds.values():
        world.drafter("eagle31")
        world.start_permission = NOT_YET
        world.settle()
    began: Counter[ResourceName] = Counter()
    most = 0
    for _ in range(200):
        claims = {place: claim for place, world in worlds.items() if (claim := read_slot_claim(world.document))}
        allotment = allocate_slots(claims, limits)
        for place, claim in claims.items():
            world = worlds[place]
            world.start_permission = allotment.permission_for(place, claim)
            if claim.holds_slot or "Rollout" in world.start_permission.allowed_purposes:
                began[place] += not claim.holds_slot
                if world.status["phase"] == "Analyzing":
                    world.annotate(promote=world.desired_revision)
                world.step()
                world.schedule()
                world.ready()
        for world in worlds.values():
            world.now += 5 * MINUTE
        holding = Counter(
            place[0] for place, world in worlds.items() if (claim := read_slot_claim(world.document)) and claim.holds_slot
        )
        most = max(most, sum(holding.values()))
        assert sum(holding.values()) <= 4
        assert max(holding.values(), default=0) <= 3
    assert {world.status["phase"] for world in worlds.values()} == {"Ready"}
    assert all(world.status["stable"]["revision"] == world.desired_revision for world in worlds.values())
    assert (most, began) == (4, Counter(dict.fromkeys(worlds, 1)))
