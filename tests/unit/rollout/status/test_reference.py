"""The reference of the stable arm: where it comes from, how long it stays, and what is never compared with it."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.reference import has_regressed
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import Arm, InPlaceRollout, Status
from aerie.controller.scraping.sliding_window import SlidingWindow
from aerie.engine.speculation import Static
from aerie.manifests import naming
from aerie.rollout.facts.arm_metrics import ArmMetrics, awaits_reference, debounce_metrics
from aerie.rollout.in_place.trial import resume_trial
from aerie.rollout.plan import ReconcilePlan
from tests.golden import Messages
from tests.nightly import use_each_nth
from tests.unit.controller.scraping.test_sliding_window import engine_sample
from tests.unit.rollout.in_place.fleet import EFFECTS, Counts, Fleet, serving_fleet
from tests.unit.rollout.in_place.test_evaluation import PROMPTS
from tests.unit.rollout.in_place_world import build_in_place_rollout
from tests.unit.rollout.tuned_world import run_trial, run_until, tuned_world
from tests.unit.rollout.world import World, masked, monitored_world, serving_world, world_in_phase

MINUTE = timedelta(minutes=1)


def serve(world: World, length: float | None, reference: float | None = None, standard_error: float = 0.0) -> None:
    """Reconcile with this acceptance length of the stable pods, and that of those that are warm, if they have counted enough."""
    deployment = naming.deployment_name("chat", world.status["stable"]["revision"], control=False)
    world.metrics = {deployment: ArmMetrics(length, reference_acceptance_length=reference, standard_error=standard_error)}
    world.step()


def reference(world: World) -> float | None:
    length: float | None = world.status["stable"].get("referenceAcceptanceLength")
    return length


# ------------------------------------------------------------------------------------------------------- without a comparison
def test_first_revision_is_compared_with_its_own_first_traffic(messages: Messages) -> None:
    world = serving_world()
    serve(world, None)
    serve(world, 2.2)
    assert reference(world) is None, "too little is counted, or it is of the warm-up"
    serve(world, 2.5, 2.52)
    assert reference(world) == 2.52
    assert world.condition("Degraded")[0] == "False"
    serve(world, 2.1, 2.1)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")
    messages.check("drop of a first revision", masked(world.message("Degraded"), NEW=world.desired_revision))
    serve(world, 1.0, 1.0)
    assert world.condition("Degraded") == ("True", "DraftsRejected")
    messages.check("no acceptance after a first revision", masked(world.message("Degraded"), NEW=world.desired_revision))
    assert reference(world) == 2.52


def test_without_requests_nothing_is_reported() -> None:
    world = serving_world()
    for _ in range(100):
        world.now += 60 * MINUTE
        serve(world, None)
    assert reference(world) is None
    assert world.condition("Degraded")[0] == "False"
    assert world.plan().status.to_dict() == world.status


def test_slow_decrease_is_not_followed() -> None:
    world, length = serving_world(), 2.5
    serve(world, length, length)
    while length > 2.0:
        assert world.condition("Degraded")[0] == "False" or length < 0.85 * 2.5
        length -= 0.02
        serve(world, length, length)
    assert (reference(world), world.condition("Degraded")[1]) == (2.5, "AcceptanceRegression")


@given(st.lists(st.tuples(st.floats(1.0, 4.0), st.none() | st.floats(1.01, 4.0)), max_size=8))
def test_the_first_measured_reference_stays_and_outlives_the_operator(windows: list[tuple[float, float | None]]) -> None:
    """A world has no memory beside the status, so each reconcile is one of an operator that has just started."""
    world, first = serving_world(), None
    for length, measured in windows:
        serve(world, length, measured)
        first = first if first is not None else measured
        assert reference(world) == first


@pytest.mark.parametrize(
    ("mode", "awaits"), [("Off", False), ("Static", True), ("Schedule", False), ("Adaptive", False), (None, False)]
)
def test_only_a_fixed_number_of_draft_tokens_is_followed(mode: str | None, awaits: bool) -> None:
    """Else the load decides how much is drafted, and the acceptance length follows it."""
    setting = None if mode is None else {"mode": mode, "numSpeculativeTokens": 3}
    arm = Arm.model_validate({"revision": "r1", "setting": setting})
    assert awaits_reference(arm, None) is awaits
    assert not awaits_reference(arm.model_copy(update={"reference_acceptance_length": 2.5}), None)
    assert not awaits_reference(arm, build_in_place_rollout())
    assert not awaits_reference(None, None)


# ------------------------------------------------------------------------------------------------------------------- few requests
def test_few_requests_neither_begin_nor_end_a_regression() -> None:
    world = serving_world()
    serve(world, 2.5, 2.5)
    serve(world, 1.6, standard_error=math.inf)
    assert world.condition("Degraded") == ("False", "AsExpected")
    serve(world, 2.1, standard_error=0.02)
    assert world.condition("Degraded") == ("False", "AsExpected"), "within the margin and three standard errors"
    serve(world, 1.6, standard_error=0.02)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")
    message = world.message("Degraded")
    serve(world, 2.5, standard_error=math.inf)
    assert (world.condition("Degraded")[1], world.message("Degraded")) == ("AcceptanceRegression", message)
    world.metrics = {}
    world.step()
    assert world.message("Degraded") == message, "an operator that has just started"
    serve(world, 2.5, standard_error=0.02)
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_another_revision_does_not_inherit_a_regression() -> None:
    world, old = monitored_world()
    serve(world, 1.6)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")
    world.document["status"]["previous"] |= {"referenceAcceptanceLength": 2.2, "acceptanceLength": 2.2}
    world.annotate(rollback=world.desired_revision)
    world.metrics = {}
    world.step()
    assert (world.status["stable"]["revision"], world.condition("Degraded")[0]) == (old, "False")


def watch(requests_per_hour: float, days: float, *, falls_by: float = 0.0) -> list[float]:
    """Return the hours at which one pod begins to report a regression. At half of the time, acceptance falls by that share.

    An answer has 100 drafts. Requests differ by 15 % of their acceptance length, and drafts by 50 %.
    """
    rng, window, counts = random.Random(7), SlidingWindow(), Counts()  # noqa: S311 - has to be the same each time
    next_request, interval = rng.expovariate(requests_per_hour), 1 / 12
    shown, begins, regressed = ArmMetrics(), [], False
    for step in range(int(days * 24 / interval)):
        hour = step * interval
        while next_request < hour:
            mean = 2.5 * (1 - falls_by) if next_request > days * 12 else 2.5
            length = max(1.0, mean * (1 + 0.15 * rng.gauss() + 0.05 * rng.gauss()))
            counts = Counts(counts.tokens + 100 * length, counts.steps + 100, counts.requests + 1)
            next_request += rng.expovariate(requests_per_hour)
        window.add("c1", engine_sample(counts), 3600 * hour, 3600.0)
        sums = window.sums(3600 * hour, 3600.0, 300.0)
        if sums is None:
            continue
        shown = debounce_metrics(shown, sums.arm_metrics)
        before, regressed = (
            regressed,
            has_regressed(shown.acceptance_length, 2.5, sums.arm_metrics.standard_error, before=regressed),
        )
        begins += [hour] if regressed > before else []
    return begins


@pytest.mark.slow
@pytest.mark.parametrize("requests_per_hour", use_each_nth(4, [1, 10, 36, 100, 720]))
def test_noise_is_no_regression(requests_per_hour: float) -> None:
    assert watch(requests_per_hour, 40) == []


@pytest.mark.parametrize(("requests_per_hour", "minutes"), [(36, 90), (100, 60), (720, 45)])
def test_fall_by_30_percent_is_reported(requests_per_hour: float, minutes: float) -> None:
    (begin,) = watch(requests_per_hour, 0.5, falls_by=0.3)
    assert 0 < 60 * (begin - 6) <= minutes


# --------------------------------------------------------------------------------------------------------- canaries and tuning
def test_a_comparison_gives_the_reference_and_later_traffic_does_not_change_it() -> None:
    world, _ = monitored_world()
    promoted = reference(world)
    assert promoted is not None
    serve(world, 2.7, 2.7)
    assert reference(world) == promoted


def test_a_manually_promoted_canary_is_compared_with_its_own_first_traffic() -> None:
    world, _ = world_in_phase("Analyzing")
    serve(world, 2.5, 2.5)
    world.annotate(promote=world.desired_revision)
    run_until(world, "Ready")
    assert world.status["stable"]["revision"] == world.desired_revision
    assert reference(world) is None, "the reference of another revision"
    serve(world, 2.9, 2.9)
    assert reference(world) == 2.9


def test_a_reverted_promotion_returns_to_the_reference_of_its_revision() -> None:
    world, old = monitored_world()
    world.document["status"]["previous"] |= {"referenceAcceptanceLength": 2.2, "acceptanceLength": 2.2}
    world.annotate(rollback=world.desired_revision)
    world.step()
    assert (world.status["stable"]["revision"], reference(world)) == (old, 2.2)
    assert world.condition("Degraded")[0] == "False"


def test_fewer_draft_tokens_are_not_compared_with_more_of_them() -> None:
    """Tuning compares times alone, so no comparison gives the reference of a setting."""
    world = tuned_world(speculation={"numSpeculativeTokens": 5}, rollout={"analysis": {"minDuration": "2h"}})
    serve(world, 3.4, 3.4)
    assert reference(world) == 3.4
    run_trial(world, -0.1, Static(2))
    world.settle()
    assert world.status["stable"]["setting"] == {"mode": "Static", "numSpeculativeTokens": 2}
    assert reference(world) is None
    serve(world, 2.3)
    assert world.condition("Degraded")[0] == "False"
    serve(world, 2.3, 2.3)
    assert (reference(world), world.condition("Degraded")[0]) == (2.3, "False")
    serve(world, 1.9, 1.9)
    assert world.condition("Degraded") == ("True", "AcceptanceRegression")


# -------------------------------------------------------------------------------------------------------------------- in place
def begin(name: str, **arguments: Any) -> Fleet:
    fleet = serving_fleet(**arguments)
    fleet.run(2 * MINUTE)
    fleet.drafter(name)
    fleet.wake()
    return fleet


def test_a_promotion_in_place_gives_the_acceptance_length_of_the_drafter() -> None:
    fleet = begin("better", replicas=3)
    fleet.run_until_phase("Ready")
    assert reference(fleet) == pytest.approx(2.5 * (1 + EFFECTS["better"]), rel=0.02)
    before = reference(fleet)
    fleet.run(60 * MINUTE)
    assert reference(fleet) == before
    fleet.drafter("eagle3")
    fleet.wake()
    fleet.run_until_phase("Analyzing")
    assert reference(fleet) == before
    fleet.annotate(rollback=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("RolledBack")
    assert reference(fleet) == before, "the drafter is the same as before"


def test_windows_of_two_drafters_are_no_drop_after_a_promotion_in_place() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Promoting")
    deployment = naming.deployment_name("chat", fleet.status["stable"]["revision"], control=False)
    fleet.metrics = {deployment: ArmMetrics(1.5, reference_acceptance_length=1.5)}
    promoted: list[Status] = []

    def start_windows_over(plan: ReconcilePlan) -> None:
        """Do what the scraper does with the status that the promotion has written."""
        if plan.status.in_place_rollout is None:
            promoted.append(plan.status)
            fleet.metrics = {}

    fleet.on_reconcile = start_windows_over
    fleet.run_until_phase("Ready")
    stable, conditions = promoted[0].stable, {item.type: item.status for item in promoted[0].conditions}
    assert stable is not None
    assert (stable.acceptance_length, conditions["Degraded"]) == (None, "False")
    assert stable.reference_acceptance_length is not None
    serve(fleet, 2.7)
    assert fleet.condition("Degraded")[0] == "False"


def test_a_drafter_promoted_without_requests_is_compared_with_its_own_first_traffic() -> None:
    fleet = begin("better", requests_per_second=0.0)
    serve(fleet, 2.5, 2.5)
    fleet.run_until_phase("Analyzing")
    promote_manually(fleet)
    assert reference(fleet) is None
    serve(fleet, 2.7, 2.7)
    assert reference(fleet) == 2.7


def test_a_shadow_evaluation_gives_no_reference() -> None:
    """One pod answered other requests than those of users, or copies of them."""
    fleet = begin("better", replicas=4, rollout={"analysis": {"shadow": PROMPTS}})
    fleet.run_until_phase("Evaluating")
    for _ in range(60):
        fleet.run(timedelta(seconds=5))
        rollout = InPlaceRollout.from_dict(fleet.status["inPlaceRollout"])
        trial = resume_trial(rollout, AnalysisSpec())
        if trial is not None and trial.state.canary_acceptance.reference_length is not None:
            break
    assert fleet.phase == "Evaluating", "else it has ended before enough was counted"
    promote_manually(fleet)
    assert reference(fleet) is None


def promote_manually(fleet: Fleet) -> None:
    fleet.metrics = {}
    fleet.annotate(promote=fleet.desired_revision)
    fleet.wake()
    fleet.run_until_phase("Ready")
    assert fleet.status["rolloutHistory"][0]["message"].startswith("Promoted manually.")


def test_no_reference_where_the_load_decides_how_much_is_drafted_in_place() -> None:
    fleet = begin("better")
    fleet.run_until_phase("Promoting")
    fleet.document["status"]["stable"]["setting"] |= {"mode": "Adaptive"}
    fleet.run_until_phase("Ready")
    assert reference(fleet) is None
