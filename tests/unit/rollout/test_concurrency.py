"""Simultaneous rollouts: which wait for a slot, in which order they start, and which need no slot."""

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
from tests.unit.rollout.test_effective_setting import MINUTE, recommend, run_until, tuned_world
from tests.unit.rollout.world import World, masked, serving_world, world_in_phase

NOT_PERMITTED = StartPermission(frozenset())
NO_SLOT = StartPermission(frozenset(), "3 rollouts are in progress")


def waiting_claim(minute: int, purpose: Any = "Rollout") -> SlotClaim:
    return SlotClaim(purpose, f"2026-01-01T00:{minute:02}:00Z", holds_slot=False)


HOLDING_CLAIM = SlotClaim("Rollout", "2026-01-01T00:00:00Z", holds_slot=True)


def names(granted: frozenset[ResourceName]) -> set[str]:
    return {"/".join(name) for name in granted}


# -------------------------------------------------------------------------------------------------------------------- allocation
def test_unlimited_rollouts_all_start() -> None:
    permission = allocate_slots({("a", "x"): HOLDING_CLAIM}, ConcurrencyLimits()).permission_for(("a", "y"), None)
    assert permission.allowed_purposes == {"Rollout", "Trial"}


def test_longest_waiting_claim_starts_first() -> None:
    claims = {
        ("a", "late"): waiting_claim(9),
        ("a", "early"): waiting_claim(1),
        ("a", "middle"): waiting_claim(5),
        ("a", "going"): HOLDING_CLAIM,
    }
    assert names(allocate_slots(claims, ConcurrencyLimits(max_rollouts=3)).granted_resources) == {"a/early", "a/middle"}


def test_busy_namespace_does_not_delay_another() -> None:
    claims = {("many", f"{number:03}"): waiting_claim(1) for number in range(500)} | {("few", "only"): waiting_claim(59)}
    granted = allocate_slots(claims, ConcurrencyLimits(max_rollouts=2)).granted_resources
    assert names(granted) == {"many/000", "few/only"}


def test_namespace_limit_applies(messages: Messages) -> None:
    claims = {("a", str(number)): waiting_claim(number) for number in range(9)} | {("b", "0"): waiting_claim(50)}
    allotment = allocate_slots(claims, ConcurrencyLimits(max_rollouts=6, max_rollouts_per_namespace=2))
    assert names(allotment.granted_resources) == {"a/0", "a/1", "b/0"}
    messages.check("limit of the namespace", allotment.permission_for(("a", "5"), waiting_claim(5)).wait_reason)


def test_trials_and_rollouts_have_separate_slots(messages: Messages) -> None:
    claims = {
        ("a", "0"): HOLDING_CLAIM,
        ("a", "1"): waiting_claim(1),
        ("a", "2"): waiting_claim(2, "Trial"),
        ("a", "3"): waiting_claim(3, "Trial"),
    }
    allotment = allocate_slots(claims, ConcurrencyLimits(max_rollouts=1, max_trials=1))
    assert names(allotment.granted_resources) == {"a/2"}
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
LIMITS = st.none() | st.integers(min_value=0, max_value=8)


@given(CLAIMS, st.builds(ConcurrencyLimits, LIMITS, LIMITS, LIMITS))
def test_slots_are_filled_within_limits(claims: dict[ResourceName, SlotClaim], limits: ConcurrencyLimits) -> None:
    granted = allocate_slots(claims, limits).granted_resources
    assert all(not claims[name].holds_slot for name in granted)
    for purpose, limit, namespace_limit in (
        ("Rollout", limits.max_rollouts, limits.max_rollouts_per_namespace),
        ("Trial", limits.max_trials, None),
    ):
        purpose_claims = {name: claim for name, claim in claims.items() if claim.purpose == purpose}
        used = Counter(name[0] for name, claim in purpose_claims.items() if claim.holds_slot or name in granted)
        held = Counter(name[0] for name, claim in purpose_claims.items() if claim.holds_slot)
        assert limit is None or sum(used.values()) <= max(limit, sum(held.values()))
        assert namespace_limit is None or all(count <= max(namespace_limit, held[name]) for name, count in used.items())
        waiting = [name for name, claim in purpose_claims.items() if not claim.holds_slot and name not in granted]
        if limit is None or sum(used.values()) < limit:
            assert all(namespace_limit is not None and used[namespace] >= namespace_limit for namespace, _ in waiting)
        for namespace, _ in granted & set(purpose_claims):
            earlier = [purpose_claims[name].since for name in granted & set(purpose_claims) if name[0] == namespace]
            assert all(purpose_claims[name].since >= max(earlier) for name in waiting if name[0] == namespace)


# ------------------------------------------------------------------------------------------------------------------------ claims
def test_canary_holds_slot_until_it_waits_for_user_or_ends() -> None:
    world, _ = world_in_phase("Analyzing")
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
    world.start_permission = NOT_PERMITTED
    world.settle_until("Starting")
    assert read_slot_claim(world.document) is None


def test_change_waits_for_its_slot(messages: Messages) -> None:
    world = serving_world()
    world.start_permission = NOT_PERMITTED
    world.drafter("eagle31")
    world.settle()
    since = world.status["queue"]["queuedTime"]
    assert world.status["queue"] == {"purpose": "Rollout", "queuedTime": since}
    assert (world.status["phase"], world.condition("Progressing")) == ("Preflight", ("True", "Preflight"))
    assert read_slot_claim(world.document) == SlotClaim("Rollout", since, holds_slot=False)
    world.start_permission = NO_SLOT
    world.now += timedelta(minutes=5)
    plan = world.step()
    assert (world.status["phase"], world.condition("Progressing")) == ("Queued", ("True", "Queued"))
    messages.check("a queued change", masked(world.message("Progressing"), NEW=world.desired_revision))
    assert [event.reason for event in plan.events] == ["Queued"]
    assert world.condition("Ready") == ("True", "AllPodsReady")
    world.now += timedelta(days=3)
    assert not world.step().objects_to_apply
    assert world.status["queue"]["queuedTime"] == since, "it keeps its place"
    assert len(world.deployments()) == 1, "no pod is requested meanwhile"
    world.start_permission = StartPermission(frozenset({"Rollout"}))
    world.step()
    assert (world.status["phase"], world.status.get("queue")) == ("Starting", None)


def test_other_spec_or_pause_releases_the_claim() -> None:
    world = serving_world()
    world.start_permission = NO_SLOT
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
    world, old = world_in_phase("Analyzing")
    world.start_permission = NO_SLOT
    world.drafter("eagle3")
    world.settle()
    assert (world.status["phase"], world.status["stable"]["revision"]) == ("Ready", old)


def test_running_canary_continues_beyond_the_limit() -> None:
    world, _ = world_in_phase("Starting")
    world.start_permission = NO_SLOT
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"


def test_manual_promotion_needs_no_slot() -> None:
    world = serving_world()
    world.start_permission = NO_SLOT
    world.drafter("eagle31")
    world.settle()
    world.annotate(**{PROMOTE_ANNOTATION.removeprefix("aerie.dev/"): world.desired_revision})
    world.step()
    assert world.status["phase"] == "Starting"


def test_replacement_of_unready_revision_needs_no_slot() -> None:
    world = serving_world()
    world.start_permission = NO_SLOT
    world.ready(value="False")
    world.drafter("eagle31")
    for _ in range(4):
        world.step()
        world.check()
    assert "queue" not in world.status
    assert world.status["canary"]["revision"] == world.desired_revision


def test_trial_waits_for_slot_and_canary_holds_it(messages: Messages) -> None:
    world = tuned_world()
    world.start_permission = StartPermission(frozenset({"Rollout"}))
    recommend(world)
    world.step()
    assert world.status["queue"]["purpose"] == "Trial"
    assert read_slot_claim(world.document) == SlotClaim("Trial", world.status["queue"]["queuedTime"], holds_slot=False)
    world.start_permission = StartPermission(frozenset(), "1 trial is in progress")
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Queued")
    messages.check("a queued trial", world.message("SpeculationTuned"))
    world.start_permission = StartPermission(frozenset({"Trial"}))
    recommend(world)
    world.step()
    claim = read_slot_claim(world.document)
    assert claim is not None
    assert (claim.purpose, claim.holds_slot, world.status.get("queue")) == ("Trial", True, None)
    world.start_permission = NOT_PERMITTED  # for rollouts
    run_until(world, "Analyzing")
    assert world.status["canary"]["setting"]["numSpeculativeTokens"] == Static(5).tokens


def test_forty_simultaneous_changes_take_turns() -> None:
    """Slots are allocated from the statuses alone, as by a new leader."""
    limits = ConcurrencyLimits(max_rollouts=4, max_rollouts_per_namespace=3)
    rollout = {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}}
    first = serving_world(replicas=1, rollout=rollout)
    worlds = {(f"team-{number % 3}", f"chat-{number}"): copy.deepcopy(first) for number in range(40)}
    for world in worlds.values():
        world.drafter("eagle31")
        world.start_permission = NOT_PERMITTED
        world.settle()
    began: Counter[ResourceName] = Counter()
    max_holding = 0
    for _ in range(200):
        claims = {name: claim for name, world in worlds.items() if (claim := read_slot_claim(world.document))}
        allotment = allocate_slots(claims, limits)
        for name, claim in claims.items():
            world = worlds[name]
            world.start_permission = allotment.permission_for(name, claim)
            if claim.holds_slot or "Rollout" in world.start_permission.allowed_purposes:
                began[name] += not claim.holds_slot
                if world.status["phase"] == "Analyzing":
                    world.annotate(promote=world.desired_revision)
                world.step()
                world.schedule()
                world.ready()
        for world in worlds.values():
            world.now += 5 * MINUTE
        holding = Counter(
            name[0] for name, world in worlds.items() if (claim := read_slot_claim(world.document)) and claim.holds_slot
        )
        max_holding = max(max_holding, sum(holding.values()))
        assert sum(holding.values()) <= 4
        assert max(holding.values(), default=0) <= 3
    assert {world.status["phase"] for world in worlds.values()} == {"Ready"}
    assert all(world.status["stable"]["revision"] == world.desired_revision for world in worlds.values())
    assert (max_holding, began) == (4, Counter(dict.fromkeys(worlds, 1)))
