"""Explorations: they are measured and end automatically, and a recommendation of their setting keeps them as trials."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from aerie.engine.speculation import Static
from tests.unit.rollout.tuned_world import K3, recommend, run_until, speculation, tuned_world


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


def test_exploration_that_breaks_objective_is_rolled_back() -> None:
    world = tuned_world(replicas=3, speculation={"tuning": {"decisionInterval": "3h"}})
    recommend(world, Static(7), "Explore")
    run_until(world, "Analyzing")
    run_until(world, "RollingBack", 1.0)
    assert speculation(world)["trials"][0]["result"] == "RolledBack"
