"""Extension of an inconclusive analysis: promote tests over all blocks, the guardrails of phase Held, and the user's request."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.verdict import evaluate_extension
from aerie.api.rollout import AnalysisSpec
from aerie.api.status import Arm, SettingStatus, Status
from aerie.controller.probes.equivalence import build_probe_request
from aerie.rollout.canary.analysis_run.run import AnalysisRun, start_analysis
from aerie.rollout.canary.extension_request import read_extension_request
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.status.notifications import build_notifications
from tests.golden import Messages
from tests.unit.rollout.world import START, World, masked, side, world_in_phase

MINUTE = timedelta(minutes=1)
T0 = START.timestamp()
DEADLINE = AnalysisSpec().max_duration


def held_world(better: float | None = None, **spec: Any) -> World:
    """Return a world whose canary is Held. `better`: that of the blocks before the deadline; None without blocks."""
    world, _ = world_in_phase("Analyzing", **spec)
    deadline = world.now + DEADLINE
    if better is not None:
        world.measure(4, better)
    world.now = deadline
    world.step()
    assert world.status["phase"] == "Held"
    return world


def extend(world: World, minutes: float, revision: str | None = None) -> None:
    end = world.now + minutes * MINUTE
    world.annotate(extend=f"{revision or world.desired_revision}/{end.isoformat()}")
    world.step()


def event_ids(world: World, event_type: str) -> list[str]:
    resource, _ = read_resource(world.document, ())
    notifications = build_notifications(resource, resource.status or Status())
    return [notification.id for notification in notifications if notification.event_type == event_type]


# ------------------------------------------------------------------------------------------------------------ the evidence
def new_run(seconds: float = 1200.0) -> AnalysisRun:
    setting = SettingStatus.model_validate({"mode": "Static", "numSpeculativeTokens": 3})
    arm = Arm(revision="r", target="acme/big@00000000", drafter="acme/drafter@11111111", setting=setting)
    run = start_analysis(AnalysisSpec(), (arm, arm), (1, 1), None, 0, None, START)
    return replace(run, plan=replace(run.plan, max_duration_seconds=seconds, min_duration_seconds=seconds))


def block(number: int, better: float = 0.0) -> ClosedBlock:
    return ClosedBlock(T0 + 120 * number, T0 + 120 * (number + 1), side(2.5 * (1 + better) + number % 3 / 100), side(2.5))


def run_to_extension(held_blocks: int, better: float = 0.0) -> AnalysisRun:
    """Return an inconclusive run of ten blocks, extended after some blocks in phase Held."""
    held_since = START + 20 * MINUTE
    run, verdict = new_run().with_blocks([block(number, better) for number in range(10)]).evaluate(held_since, ())
    assert verdict.outcome == "Inconclusive"
    run = run.reset_guard(held_since)
    for number in range(10, 10 + held_blocks):
        run, _ = run.with_blocks([block(number, better)]).check_guardrails(START + 2 * (number + 1) * MINUTE, ())
    return run.begin_extension(held_since, held_since + 2 * held_blocks * MINUTE)


@given(held_blocks=st.integers(0, 8), blocks=st.integers(0, 30), better=st.sampled_from([-0.2, -0.05, 0.0]))
def test_blocks_count_for_the_promotion_unless_the_canary_was_held_and_the_guardrails_are_those_of_held(
    held_blocks: int, blocks: int, better: float
) -> None:
    run = run_to_extension(held_blocks, better)
    unextended = run.end_extension()
    end = START + timedelta(hours=9)
    for number in range(10 + held_blocks, 10 + held_blocks + blocks):
        now = START + 2 * (number + 1) * MINUTE
        run, verdict = run.with_blocks([block(number, better)]).evaluate_extension(now, end, ())
        run = AnalysisRun.unpack(run.pack()) or run
        unextended, guard_verdict = unextended.with_blocks([block(number, better)]).check_guardrails(now, ())
        assert (verdict.outcome == "Rollback") == (guard_verdict.outcome == "Rollback")
    assert run.guard_state == unextended.guard_state
    assert (run.state.block_count, unextended.state.block_count) == (10 + blocks, 10)
    assert run.state.elapsed_seconds(T0 + 120 * (10 + held_blocks + blocks)) == 120 * (10 + blocks)


def test_a_block_that_began_before_the_extension_counts_for_the_guardrails_alone() -> None:
    run = run_to_extension(0)
    late = replace(run, extended_since=T0 + 1230.0).with_blocks([block(10), block(11)])
    assert late.guard_state is not None
    assert (late.state.block_count, late.guard_state.block_count) == (11, 2)


def test_a_restart_while_held_counts_against_the_promotion() -> None:
    run = run_to_extension(3).with_restarts({"canary-0": 1}, {})
    assert (run.state.crashes.canary_crashes, run.end_extension().extended_since) == (1, None)
    run, verdict = run.with_blocks([block(13, 0.2)]).evaluate_extension(START + 40 * MINUTE, START + 60 * MINUTE, ())
    assert "may crash more often" in verdict.message


def test_evidence_that_is_too_late_for_a_rollback_prevents_the_promotion(messages: Messages) -> None:
    plan = new_run().plan
    state = new_run().with_blocks([block(number, 0.2) for number in range(30)]).state
    assert evaluate_extension(state, plan, T0 + 3600, T0 + 7200)[1].outcome == "Promote"
    contrary = replace(state, zero_acceptance_streak=2)
    assert evaluate_extension(contrary, plan, T0 + 3600, T0 + 7200)[1].outcome == "Continue"
    ended, verdict = evaluate_extension(contrary, plan, T0 + 7200, T0 + 7200)
    assert verdict.outcome == "Inconclusive"
    messages.check("contrary evidence", verdict.message)
    assert evaluate_extension(ended, plan, T0 + 9000, T0 + 9999)[1].outcome == "Inconclusive", "a verdict is final"


def test_a_status_of_an_earlier_release_can_be_extended() -> None:
    document = codec.unpack(run_to_extension(1).end_extension().pack())
    del document["extended_since"], document["state"]["paused_seconds"], document["guard_state"]["paused_seconds"]
    run = AnalysisRun.unpack(codec.pack(document))
    assert run is not None
    assert (run.extended_since, run.state.paused_seconds) == (None, 0.0)


# ------------------------------------------------------------------------------------------------------- the user's request
def test_extended_analysis_is_promoted_by_old_and_new_blocks(messages: Messages) -> None:
    world = held_world(+0.2)
    revision = world.desired_revision
    messages.check("held", masked(world.message("Progressing"), NEW=revision))
    before = world.status["analysis"]["comparisons"][0]["sampleCount"]
    world.now += 20 * MINUTE
    extend(world, 30)
    assert (world.status["phase"], world.condition("Progressing")) == ("Analyzing", ("True", "Analyzing"))
    assert world.status["analysis"]["verdict"] == "Continue"
    messages.check("extended", masked(world.message("Progressing"), NEW=revision))
    world.measure(1, +0.2)
    assert (before, world.status["analysis"]["comparisons"][0]["sampleCount"]) == (4, 5)
    for _ in range(12):
        world.measure(1, +0.2)
        if world.status["phase"] != "Analyzing":
            break
    assert world.status["phase"] == "Ramping"
    assert world.status["analysis"]["verdict"] == "Promote"
    messages.check("promoted", world.status["analysis"]["message"])


def test_extension_without_a_decision_is_held_again_and_may_be_extended_again(messages: Messages) -> None:
    world = held_world()
    (first,) = event_ids(world, "inconclusive")
    extend(world, 30)
    assert build_probe_request(world.observed(), world.observed().resource.status or Status()) is None
    assert event_ids(world, "inconclusive") == []
    assert world.plan().requeue_after == 30 * MINUTE
    world.now += 30 * MINUTE
    world.step()
    assert world.status["phase"] == "Held"
    assert world.status["analysis"]["verdict"] == "Inconclusive"
    messages.check("held again", world.status["analysis"]["message"])
    assert world.condition("Progressing") == ("False", "InconclusiveAnalysis")
    assert event_ids(world, "inconclusive")[0].startswith(f"{first}/"), "it is another notification"
    world.step()
    assert world.status["phase"] == "Held", "the annotation is still there"
    world.now += 60 * MINUTE
    extend(world, 60)
    assert world.status["phase"] == "Analyzing"
    world.now += 60 * MINUTE
    world.step()
    assert world.status["phase"] == "Held"
    messages.check("held for the third time", world.status["analysis"]["message"])


def test_a_worse_canary_is_rolled_back_in_its_extension_as_while_held() -> None:
    extended, held = held_world(), held_world()
    extend(extended, 600)
    minutes = []
    for world in (extended, held):
        start = world.now
        while world.status["phase"] in ("Analyzing", "Held"):
            world.measure(1, -0.2)
            assert world.now < start + timedelta(hours=5)
        assert world.status["phase"] == "RollingBack"
        minutes.append((world.now - start, world.status["rolloutHistory"][0]["message"]))
    assert minutes[0] == minutes[1]


def test_decisions_of_a_user_end_an_extension() -> None:
    for action, phase in (("promote", "Ramping"), ("rollback", "RollingBack")):
        world = held_world()
        extend(world, 30)
        world.annotate(**{action: world.desired_revision})
        world.step()
        assert world.status["phase"] == phase


def test_approval_is_still_needed() -> None:
    world = held_world(rollout={"canary": {"approval": "Manual"}})
    extend(world, 300)
    world.measure(20, +0.2)
    assert world.status["phase"] == "AwaitingApproval"


def test_an_extension_ends_after_24_hours() -> None:
    world = held_world()
    extend(world, 60 * 24 * 365)
    end = datetime.fromisoformat(world.status["canary"]["extensionEndTime"])
    assert end == world.now + timedelta(hours=24)
    world.now = end
    world.step()
    assert world.status["phase"] == "Held"
    world.step()
    assert world.status["phase"] == "Analyzing", "the requested end is still to come"


def test_zero_replicas_do_not_begin_a_new_analysis() -> None:
    world = held_world()
    extend(world, 30)
    world.edit(replicas=0)
    world.step()
    assert world.status["phase"] == "Analyzing"
    world.now += 30 * MINUTE
    world.step()
    assert world.status["phase"] == "Held"


def test_counts_of_another_release_end_the_extension() -> None:
    world = held_world()
    extend(world, 30)
    world.document["status"]["analysis"]["state"] = "unreadable"
    world.step()
    assert world.status["phase"] == "Held"
    world.step()
    assert world.status["phase"] == "Held", "there is nothing to continue from"


@pytest.mark.parametrize(
    "value",
    ["another/2099-01-01T00:00:00Z", "REVISION/2001-01-01T00:00:00Z", "REVISION/2099-01-01T00:00:00", "REVISION/", "30m", "/"],
)
def test_a_request_without_effect_changes_no_phase(value: str, messages: Messages) -> None:
    world = held_world()
    plain = world.message("Progressing")
    world.annotate(extend=value.replace("REVISION", world.desired_revision))
    world.step()
    assert world.status["phase"] == "Held"
    is_explained = world.message("Progressing") != plain
    assert is_explained == (value in ("REVISION/2099-01-01T00:00:00", "REVISION/", "30m"))
    if is_explained:
        messages.check("invalid annotation", masked(world.message("Progressing"), NEW=world.desired_revision))


@given(
    st.text(max_size=60)
    | st.text(max_size=40).map(lambda text: f"0123456789/{text}")
    | st.just("0123456789/9999-12-31T23:59-14:00")
)
def test_no_value_fails(value: str) -> None:
    world = World()
    world.annotate(extend=value)
    resource, _ = read_resource(world.document, ())
    request = read_extension_request(resource, "0123456789")
    assert not (request.problem and request.requested_end)
    end = request.end_at(START)
    assert end is None or START < end <= START + timedelta(hours=24)


def test_an_extension_names_its_user_while_it_lasts_and_no_outcome_does() -> None:
    world = held_world()
    content = {"action": "extend", "user": "alice", "time": f"{world.now:%Y-%m-%dT%H:%M:%SZ}", "reason": "more traffic at ten"}
    world.annotate(**{"requested-by": json.dumps(content)})
    extend(world, 60)
    assert world.message("Progressing").endswith("Extended by alice: more traffic at ten.")
    world.measure(1, +0.2)
    assert world.message("Progressing").endswith("Extended by alice: more traffic at ten.")
    world.now += 60 * MINUTE
    world.step()
    assert world.status["phase"] == "Held"
    assert "alice" not in world.message("Progressing")
    world.annotate(rollback=world.desired_revision)
    world.step()
    assert "requestedBy" not in world.status["rolloutHistory"][0]
    assert "alice" not in world.status["rolloutHistory"][0]["message"]


def test_tokens_per_step_are_compared_over_all_blocks() -> None:
    run = run_to_extension(5)
    assert run.state.paired_moments[TOKENS_PER_STEP].count == 10
    run = run.with_blocks([block(number) for number in range(15, 18)])
    assert run.state.paired_moments[TOKENS_PER_STEP].count == 13
