"""Many rollouts at the same time: who waits, who comes first, and what waits for nobody."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.speculation import Static
from aerie.rollout.canary.messages import PROMOTE
from aerie.rollout.facts.concurrency import Claim, Limits, Place, Turn, allot, claim_of
from tests.unit.rollout.test_tuned import MINUTE, advise, tuned, until
from tests.unit.rollout.world import World, canarying, serving

NOT_YET = Turn(frozenset())
FULL = Turn(frozenset(), "as many rollouts are under way as --max-concurrent-rollouts allows (3)")


def waits(minute: int, purpose: Any = "Rollout") -> Claim:
    return Claim(purpose, f"2026-01-01T00:{minute:02}:00Z", holds=False)


HOLDS = Claim("Rollout", "2026-01-01T00:00:00Z", holds=True)


def names_of(granted: frozenset[Place]) -> set[str]:
    return {"/".join(place) for place in granted}


# --------------------------------------------------------------------------------------------------------------------- allotting
def test_without_a_limit_everybody_may_begin() -> None:
    turn = allot({("a", "x"): HOLDS}, Limits()).turn(("a", "y"), None)
    assert turn.may_begin == {"Rollout", "Trial"}


def test_what_has_waited_for_longest_comes_first() -> None:
    claims = {("a", "late"): waits(9), ("a", "early"): waits(1), ("a", "middle"): waits(5), ("a", "going"): HOLDS}
    assert names_of(allot(claims, Limits(rollouts=3)).granted) == {"a/early", "a/middle"}


def test_a_namespace_with_many_does_not_keep_another_one_waiting() -> None:
    claims = {("many", f"{number:03}"): waits(1) for number in range(500)} | {("few", "only"): waits(59)}
    granted = allot(claims, Limits(rollouts=2)).granted
    assert names_of(granted) == {"many/000", "few/only"}


def test_a_namespace_has_a_limit_of_its_own() -> None:
    claims = {("a", str(number)): waits(number) for number in range(9)} | {("b", "0"): waits(50)}
    allotment = allot(claims, Limits(rollouts=6, rollouts_per_namespace=2))
    assert names_of(allotment.granted) == {"a/0", "a/1", "b/0"}
    assert (
        "in namespace a as --max-concurrent-rollouts-per-namespace allows (2)" in allotment.turn(("a", "5"), waits(5)).waits_for
    )


def test_trials_and_rollouts_have_slots_apart() -> None:
    claims = {("a", "0"): HOLDS, ("a", "1"): waits(1), ("a", "2"): waits(2, "Trial"), ("a", "3"): waits(3, "Trial")}
    allotment = allot(claims, Limits(rollouts=1, trials=1))
    assert names_of(allotment.granted) == {"a/2"}
    assert allotment.turn(("a", "2"), claims["a", "2"]).may_begin == {"Trial"}
    assert "--max-concurrent-trials allows (1)" in allotment.turn(("a", "3"), claims["a", "3"]).waits_for
    assert "--max-concurrent-rollouts allows (1)" in allotment.turn(("a", "1"), claims["a", "1"]).waits_for


CLAIMS = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from([f"{number}" for number in range(20)])),
    st.builds(
        Claim, st.sampled_from(["Rollout", "Trial"]), st.sampled_from(["2026-01-01", "2026-01-02", "2026-01-03"]), st.booleans()
    ),
    max_size=40,
)
MOST = st.none() | st.integers(min_value=0, max_value=8)


@given(CLAIMS, st.builds(Limits, MOST, MOST, MOST))
def test_no_limit_is_passed_and_no_slot_stays_empty(claims: dict[Place, Claim], limits: Limits) -> None:
    granted = allot(claims, limits).granted
    assert all(not claims[place].holds for place in granted)
    for purpose, most, within in (("Rollout", limits.rollouts, limits.rollouts_per_namespace), ("Trial", limits.trials, None)):
        mine = {place: claim for place, claim in claims.items() if claim.purpose == purpose}
        busy = Counter(place[0] for place, claim in mine.items() if claim.holds or place in granted)
        held = Counter(place[0] for place, claim in mine.items() if claim.holds)
        assert most is None or sum(busy.values()) <= max(most, sum(held.values()))
        assert within is None or all(count <= max(within, held[name]) for name, count in busy.items())
        left = [place for place, claim in mine.items() if not claim.holds and place not in granted]
        if most is None or sum(busy.values()) < most:
            assert all(within is not None and busy[namespace] >= within for namespace, _ in left)
        for namespace, _ in granted & set(mine):
            earlier = [mine[place].since for place in granted & set(mine) if place[0] == namespace]
            assert all(mine[place].since >= max(earlier) for place in left if place[0] == namespace)


# --------------------------------------------------------------------------------------------------------------------- claiming
def test_a_canary_holds_a_slot_until_it_waits_for_a_person_or_goes() -> None:
    world, _ = canarying("Analyzing")
    assert claim_of(world.document) == Claim("Rollout", world.status["canary"]["startedAt"], holds=True)
    for phase in ("Held", "AwaitingApproval", "RollingBack"):
        world.document["status"]["canary"]["phase"] = phase
        assert claim_of(world.document) is None
    world.document["status"]["canary"]["phase"] = "Promoting"
    assert claim_of(world.document) is not None
    world.edit(rollout={"paused": True})
    assert claim_of(world.document) is None


def test_a_first_revision_neither_waits_nor_holds_a_slot() -> None:
    world = World()
    world.turn = NOT_YET
    world.settle_until("Starting")
    assert claim_of(world.document) is None


def test_a_change_claims_a_slot_and_begins_when_its_turn_comes() -> None:
    world = serving()
    world.turn = NOT_YET
    world.drafter("eagle31")
    world.settle()
    since = world.status["queued"]["since"]
    assert world.status["queued"] == {"purpose": "Rollout", "since": since}
    assert (world.status["phase"], world.condition("Progressing")) == ("Preflight", ("True", "Preflight"))
    assert claim_of(world.document) == Claim("Rollout", since, holds=False)
    world.turn = FULL
    world.now += timedelta(minutes=5)
    plan = world.step()
    assert (world.status["phase"], world.condition("Progressing")) == ("Queued", ("True", "Queued"))
    assert "waits for its turn: as many rollouts are under way as --max-concurrent-rollouts allows (3)" in world.message(
        "Progressing"
    )
    assert [event.reason for event in plan.events] == ["Queued"]
    assert world.condition("Ready") == ("True", "Serving")
    world.now += timedelta(days=3)
    assert not world.step().apply
    assert world.status["queued"]["since"] == since, "it keeps its place"
    assert len(world.deployments()) == 1, "no pod is asked for meanwhile"
    world.turn = Turn(frozenset({"Rollout"}))
    world.step()
    assert (world.status["phase"], world.status.get("queued")) == ("Starting", None)


def test_who_waits_gives_its_place_up_with_another_spec_or_a_pause() -> None:
    world = serving()
    world.turn = FULL
    world.drafter("eagle31")
    world.settle()
    world.edit(rollout={"paused": True})
    world.settle()
    assert "queued" not in world.status
    world.edit(rollout={})
    world.settle()
    assert "queued" in world.status
    world.drafter("eagle3")
    world.settle()
    assert (world.status["phase"], world.status.get("queued")) == ("Ready", None)


def test_a_rollback_and_a_return_to_the_stable_revision_wait_for_nobody() -> None:
    world, old = canarying("Analyzing")
    world.turn = FULL
    world.drafter("eagle3")
    world.settle()
    assert (world.status["phase"], world.status["stable"]["revision"]) == ("Ready", old)


def test_a_canary_under_way_goes_on_when_there_are_too_many() -> None:
    world, _ = canarying("Starting")
    world.turn = FULL
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"


def test_a_person_who_asks_for_the_promotion_does_not_wait() -> None:
    world = serving()
    world.turn = FULL
    world.drafter("eagle31")
    world.settle()
    world.annotate(**{PROMOTE.removeprefix("aerie.dev/"): world.wanted})
    world.step()
    assert world.status["phase"] == "Starting"


def test_what_is_to_replace_a_revision_that_serves_nobody_does_not_wait() -> None:
    world = serving()
    world.turn = FULL
    world.ready(value="False")
    world.drafter("eagle31")
    for _ in range(4):
        world.step()
        world.check()
    assert "queued" not in world.status
    assert world.status["canary"]["revision"] == world.wanted


def test_a_trial_waits_for_its_turn_and_its_canary_has_it_then() -> None:
    world = tuned()
    world.turn = Turn(frozenset({"Rollout"}))
    advise(world)
    world.step()
    assert world.status["queued"]["purpose"] == "Trial"
    assert claim_of(world.document) == Claim("Trial", world.status["queued"]["since"], holds=False)
    world.turn = Turn(frozenset(), "as many trials of settings are under way as --max-concurrent-trials allows (1)")
    advise(world)
    world.step()
    assert world.condition("Tuned") == ("False", "Queued")
    world.turn = Turn(frozenset({"Trial"}))
    advise(world)
    world.step()
    claim = claim_of(world.document)
    assert claim is not None
    assert (claim.purpose, claim.holds, world.status.get("queued")) == ("Trial", True, None)
    world.turn = NOT_YET  # of rollouts
    until(world, "Analyzing")
    assert world.status["canary"]["setting"]["tokens"] == Static(5).tokens


def test_forty_resources_that_change_at_once_go_by_turns() -> None:
    """What is allotted follows from the statuses alone, as it does for a leader that has just begun."""
    limits = Limits(rollouts=4, rollouts_per_namespace=3)
    rollout = {"canary": {"ramp": [], "scaleDownDelay": "0s"}}
    first = serving(replicas=1, rollout=rollout)
    worlds = {(f"team-{number % 3}", f"chat-{number}"): copy.deepcopy(first) for number in range(40)}
    for world in worlds.values():
        world.drafter("eagle31")
        world.turn = NOT_YET
        world.settle()
    began: Counter[Place] = Counter()
    most = 0
    for _ in range(200):
        claims = {place: claim for place, world in worlds.items() if (claim := claim_of(world.document))}
        allotment = allot(claims, limits)
        for place, claim in claims.items():
            world = worlds[place]
            world.turn = allotment.turn(place, claim)
            if claim.holds or "Rollout" in world.turn.may_begin:
                began[place] += not claim.holds
                if world.status["phase"] == "Analyzing":
                    world.annotate(promote=world.wanted)
                world.step()
                world.schedule()
                world.ready()
        for world in worlds.values():
            world.now += 5 * MINUTE
        holding = Counter(place[0] for place, world in worlds.items() if (claim := claim_of(world.document)) and claim.holds)
        most = max(most, sum(holding.values()))
        assert sum(holding.values()) <= 4
        assert max(holding.values(), default=0) <= 3
    assert {world.status["phase"] for world in worlds.values()} == {"Ready"}
    assert all(world.status["stable"]["revision"] == world.wanted for world in worlds.values())
    assert (most, began) == (4, Counter(dict.fromkeys(worlds, 1)))
