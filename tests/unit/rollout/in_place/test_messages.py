"""The condition Progressing in each phase, as users read it."""

from __future__ import annotations

import re
from datetime import timedelta

from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.rollout.in_place.messages import build_promotion_condition, build_promotion_failure_message, build_return_condition
from aerie.rollout.in_place.promotion import PromotionProgress
from tests.golden import Messages
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import Fleet, serving_fleet
from tests.unit.rollout.world import masked


def text(fleet: Fleet) -> str:
    return re.sub(r"REVISION-\d+", "POD", masked(fleet.message("Progressing")))


def test_messages_of_the_phases(messages: Messages) -> None:
    fleet = serving_fleet(2, requests_per_second=0.0, rollout={"inPlace": {"mode": "Auto", "pods": 2}})
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.run(timedelta(seconds=1))
    messages.check("Staging", text(fleet))
    fleet.run_until_phase("Analyzing")
    messages.check("Analyzing, before the first pair", text(fleet))
    fleet.run(timedelta(minutes=10))
    messages.check("Analyzing", text(fleet))
    fleet.run_until_phase("Held", minutes=250)
    messages.check("Held", text(fleet))
    fleet.scale(0)
    fleet.drafter("equal")
    fleet.run(timedelta(seconds=5))
    fleet.run(timedelta(seconds=30))
    messages.check("a new spec at zero replicas", text(fleet))


def test_messages_of_pods_that_wait(messages: Messages) -> None:
    fleet = serving_fleet(1, rollout={"progressDeadline": "5m"})
    next(iter(fleet.engines.values())).hangs = True
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.run(timedelta(seconds=30))
    messages.check("Staging, a pod does not answer", text(fleet))
    fleet.run_until_phase("Starting", minutes=6)
    messages.check("by pods", text(fleet))


def test_messages_of_promotion_and_return(messages: Messages) -> None:
    failures = tuple(f"pod {name} does not load the drafter: fc.weight has another shape." for name in "abcdefg")
    progress = PromotionProgress(40, 12, ("h", "i"), failures, {}, is_due=True)
    rollout = reports.rollout(phase="Promoting")
    messages.check("Promoting, new pods first", build_promotion_condition(rollout, None).message)
    messages.check("Promoting", build_promotion_condition(rollout, progress).message)
    messages.check("promotion failed", build_promotion_failure_message(progress))
    problem = EndpointProblem("Timeout", "no answer.")
    pods = [reports.pod(name, problem=problem) for name in "abcdefg"]
    messages.check("RollingBack", build_return_condition(rollout, pods).message)
