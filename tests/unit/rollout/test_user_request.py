"""Who requested a decision: it is named in history, condition and notification of that decision, and of no other."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aerie.api.status import Status, UserRequest
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.progression.user_request import REQUESTED_BY_ANNOTATION, describe_request, read_user_request
from aerie.rollout.status.notifications import build_notifications
from tests.unit.rollout.cluster_state import copied
from tests.unit.rollout.named_requests import NamedRequests
from tests.unit.rollout.world import START, World, monitored_world, world_in_phase


def request(world: World, action: str, value: str, user: str = "alice", reason: str | None = "AL loss is fine") -> None:
    """Annotate the resource as the command line does."""
    content = {"action": action, "user": user, "time": f"{world.now:%Y-%m-%dT%H:%M:%SZ}"} | ({"reason": reason} if reason else {})
    world.annotate(**{action: value, "requested-by": json.dumps(content)})


@lru_cache(maxsize=1)
def analyzing_world() -> World:
    return world_in_phase("Analyzing")[0]


def last_outcome(world: World) -> tuple[str, str, dict[str, Any] | None]:
    outcome = world.status["rolloutHistory"][0]
    return outcome["result"], outcome["message"], outcome.get("requestedBy")


def held_world() -> World:
    world, _ = world_in_phase("Analyzing")
    world.now += timedelta(hours=5)
    world.step()
    assert world.status["phase"] == "Held"
    return world


def finish(world: World) -> None:
    """Run the ramp and the promotion to their end."""
    for _ in range(30):
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=5)
        world.step()
        if not world.status.get("canary"):
            return
    raise AssertionError(f"it does not end: {world.message('Progressing')}")


# --------------------------------------------------------------------------------------------------------------- decisions
def test_a_promotion_names_its_user_in_condition_event_history_and_notification() -> None:
    world = held_world()
    request(world, "promote", world.desired_revision)
    (event,) = [event for event in world.step().events if event.reason == "Ramping"]
    assert event.message.endswith("Promotion requested by alice: AL loss is fine.")
    assert world.message("Progressing") == event.message
    finish(world)
    result, message, requested_by = last_outcome(world)
    assert (result, message) == ("Promoted", "Promoted manually. Promoted by alice: AL loss is fine.")
    assert requested_by is not None
    assert (requested_by["action"], requested_by["user"], requested_by["reason"]) == ("promote", "alice", "AL loss is fine")
    resource, _ = read_resource(world.document, ())
    notification = [each for each in build_notifications(resource, resource.status or Status()) if each.event_type == "promoted"]
    assert notification[-1].data["requestedBy"] == requested_by
    assert "Promoted by alice" in notification[-1].data["message"]


def test_an_approval_names_its_user_beside_the_evidence() -> None:
    world, _ = world_in_phase("Analyzing", rollout={"canary": {"approval": "Manual"}})
    world.measure(30, +0.2)
    assert world.status["phase"] == "AwaitingApproval"
    request(world, "promote", world.desired_revision, reason=None)
    world.step()
    finish(world)
    message = last_outcome(world)[1]
    assert message.startswith("Tokens per step")
    assert message.endswith(" Promoted by alice.")


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"])
def test_a_rollback_names_its_user(phase: str) -> None:
    world, _ = world_in_phase(phase)
    world.now += timedelta(seconds=5)
    request(world, "rollback", world.desired_revision, user="bob", reason="slow in EU.")
    plan = world.step()
    assert last_outcome(world)[:2] == ("RolledBack", "Rollback requested manually. Rolled back by bob: slow in EU.")
    assert "Rolled back by bob: slow in EU." in next(event.message for event in plan.events if event.reason == "RolledBack")
    world.settle()
    assert world.message("Progressing").count("by bob") == 1


def test_the_rollback_of_a_promotion_names_its_user_and_not_that_of_the_promotion() -> None:
    world, _ = monitored_world()
    request(world, "rollback", world.desired_revision, user="bob", reason=None)
    world.step()
    expected = "Rolled back after promotion. Rollback requested manually. Rolled back by bob."
    assert last_outcome(world)[:2] == ("RolledBack", expected)
    assert world.status["rolloutHistory"][1]["result"] == "Promoted"
    assert "requestedBy" not in world.status["rolloutHistory"][1]


def test_a_retry_is_named_from_its_start_to_its_end() -> None:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    assert world.status["phase"] == "RolledBack"
    world.now += timedelta(minutes=1)
    del world.document["metadata"]["annotations"]["aerie.dev/rollback"]
    request(world, "retry", "2", reason="nodes are fixed")
    world.step()
    world.now += timedelta(minutes=3)
    world.settle_until("Starting")
    assert world.message("Progressing").endswith(" Retried by alice: nodes are fixed.")
    world.settle()
    world.now += timedelta(minutes=5)
    world.step()
    world.measure(30, -0.2)
    result, message, requested_by = last_outcome(world)
    assert (result, (requested_by or {})["action"]) == ("RolledBack", "retry")
    assert message.endswith("Retried by alice: nodes are fixed.")
    # Another retry, by the annotation alone, is not hers.
    world.settle()
    world.now += timedelta(minutes=1)
    world.annotate(retry="3")
    world.settle_until("Starting")
    assert "alice" not in world.message("Progressing")


# ----------------------------------------------------------------------------------------------------- what belongs to another
def test_a_request_of_an_earlier_rollout_is_not_attributed_to_a_later_one() -> None:
    """The annotation stays. The next decision is by the plain annotation: nobody knows by whom."""
    world = held_world()
    request(world, "rollback", world.desired_revision)
    world.settle()
    assert last_outcome(world)[2] is not None
    world.drafter("eagle3")
    world.settle()
    world.drafter("eagle31")
    world.settle()  # the remaining rollback ends it immediately
    assert last_outcome(world)[0] == "RolledBack"
    assert last_outcome(world)[2] is None
    assert "alice" not in last_outcome(world)[1]


def test_a_clock_ahead_does_not_carry_a_request_into_the_next_rollout() -> None:
    """The user's clock is ten minutes ahead. When that time has come, another rollout is in progress."""
    world = held_world()
    world.now += timedelta(minutes=10)
    request(world, "rollback", world.desired_revision)
    world.now -= timedelta(minutes=10)
    world.settle()
    assert last_outcome(world)[::2] == ("RolledBack", None), "a time that is still to come"
    world.now += timedelta(minutes=9)
    world.drafter("eagle3")
    world.settle()
    world.document["metadata"]["annotations"].pop("aerie.dev/rollback")
    world.drafter("eagle31")
    world.settle_until("Starting")
    world.now += timedelta(minutes=2)
    world.step()
    world.annotate(rollback=world.desired_revision)
    world.step()
    assert last_outcome(world)[::2] == ("RolledBack", None)


def test_a_request_of_another_action_or_revision_is_not_attributed() -> None:
    world = held_world()
    request(world, "promote", "another")
    world.step()
    world.annotate(promote=world.desired_revision)
    world.step()
    finish(world)
    assert last_outcome(world)[1:] == ("Promoted manually.", None)


def test_evidence_rolls_back_in_nobodys_name() -> None:
    """A user promotes the canary, and the ramp finds it worse."""
    world, _ = world_in_phase("Analyzing")
    request(world, "promote", world.desired_revision)
    world.step()
    world.schedule()
    world.ready()
    world.measure(30, -0.3)
    result, message, requested_by = last_outcome(world)
    assert (result, requested_by) == ("RolledBack", None)
    assert "alice" not in message


def test_a_change_of_the_spec_ends_the_effect_of_a_retry() -> None:
    """The rejected revision is tried later because the spec requests it again, and not because of the retry."""
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    world.document["metadata"]["annotations"].clear()
    world.now += timedelta(minutes=1)
    request(world, "retry", "2")
    world.step()
    world.drafter("eagle3")
    world.settle()
    world.drafter("eagle31")
    world.settle_until("Starting")
    assert "alice" not in world.message("Progressing")


def take_step(world: World, requests: NamedRequests, step: str, *, is_named: bool) -> None:
    """Have a user request something, or events happen, and reconcile."""
    world.now += timedelta(minutes=1)
    if step in ("promote", "rollback", "retry"):
        revision = world.desired_revision
        naming = {"requested-by": requests.build(step, revision, world.now)} if is_named else {}
        world.annotate(**{step: str(world.now) if step == "retry" else revision, **naming})
        world.step()
    elif step == "annotations are removed":
        world.document["metadata"].pop("annotations", None)
    elif step == "blocks of a worse canary":
        world.measure(12, -0.3)
    elif step == "time":
        for _ in range(4):
            world.now += timedelta(minutes=6)
            world.schedule()
            world.ready()
            world.check()
            world.step()
    else:
        world.drafter(step)
        world.step()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["promote", "rollback", "retry", "time", "time", "eagle3", "eagle31"])
            | st.sampled_from(["annotations are removed", "blocks of a worse canary"]),
            st.booleans(),
        ),
        min_size=6,
        max_size=16,
    )
)
def test_no_outcome_names_a_user_who_did_not_decide_it(steps: list[tuple[str, bool]]) -> None:
    world, requests = copied(analyzing_world()), NamedRequests()
    for step, is_named in steps:
        take_step(world, requests, step, is_named=is_named)
        event(f"{requests.check(world)} outcomes name their user")


# ----------------------------------------------------------------------------------------------------------- invalid content
VALID = {"action": "promote", "user": "alice", "time": "2026-01-01T00:00:00Z", "reason": "fine"}
broken = st.one_of(
    st.text(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=20),
        lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=9), child, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
    st.fixed_dictionaries(
        {name: st.none() | st.integers() | st.text(max_size=400) | st.just(value) for name, value in VALID.items()}
    ).map(json.dumps),
    st.sampled_from(["[" * 4000, "{" * 5000, '{"action": "promote"}', "1" * 4000, json.dumps(VALID | {"time": "9999-12-31"})]),
)


def read(value: str) -> UserRequest | None:
    world = World()
    world.annotate(**{REQUESTED_BY_ANNOTATION.removeprefix("aerie.dev/"): value, "promote": "0123456789"})
    resource, _ = read_resource(world.document, ())
    return read_user_request(resource, "0123456789", START)


@given(broken)
def test_no_content_fails_and_what_is_read_is_one_bounded_line(value: str) -> None:
    requested_by = read(value)
    if requested_by is None:
        return
    text = describe_request(requested_by, is_done=True)
    assert text.isprintable()
    assert len(text) <= 128 + 256 + 20
    status = Status(last_request=requested_by)
    assert Status.model_validate(json.loads(json.dumps(status.to_dict()))).to_dict() == status.to_dict()


@given(broken)
def test_no_content_changes_a_decision(value: str) -> None:
    world = copied(analyzing_world())
    world.annotate(promote=world.desired_revision)
    plain = world.plan()
    world.annotate(**{"requested-by": value})
    assert world.plan().status.phase == plain.status.phase == "Ramping"
    assert world.plan().status.canary == plain.status.canary


def test_texts_are_cleaned() -> None:
    requested_by = read(json.dumps(VALID | {"user": " al\u202eice\n", "reason": "<b>\x1b[31m" + "x" * 500}))
    assert requested_by is not None
    assert requested_by.user == "al ice"
    assert requested_by.reason == "<b> [31m" + "x" * 248
    requested_by = read(json.dumps(VALID | {"reason": 7}))
    assert requested_by is not None
    assert (requested_by.user, requested_by.reason) == ("alice", None)
