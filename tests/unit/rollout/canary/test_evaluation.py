"""Shadow evaluations of canaries: what users reach, what decides, and what is counted once, in the simulated cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import CanaryArm
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run.run import AnalysisRun
from aerie.rollout.canary.evaluation import MAX_EVALUATOR_PROCESSES, read_counted_batches
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from tests.golden import Messages
from tests.unit.rollout.canary.test_transition import last_outcome, run_until, weights
from tests.unit.rollout.simulated_evaluator import CHANGED_ANSWERS
from tests.unit.rollout.world import World, masked, serving_world, world_in_phase

MINUTE = timedelta(minutes=1)
PROMPTS: dict[str, Any] = {"source": "Prompts", "prompts": {"configMap": "prompts"}}
GATEWAY: dict[str, Any] = {"traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}}
EVALUATOR = ("Deployment", "chat-evaluator")


def rollout(shadow: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {**fields, "analysis": {"shadow": PROMPTS if shadow is None else shadow, **fields.get("analysis", {})}}


def evaluating_world(gain: float = 0.0, **fields: Any) -> tuple[World, str]:
    """Return a world whose canary has this gain and is in phase Evaluating, and the stable revision."""
    spec = {name: fields.pop(name) for name in ("replicas", "engine") if name in fields}
    world, old = world_in_phase("Evaluating", rollout=rollout(**fields), **spec)
    world.evaluator.gain = gain
    return world, old


def evaluate_until(world: World, *phases: str, fetches: int = 80) -> None:
    for _ in range(fetches):
        if world.status["phase"] in phases:
            return
        world.evaluate()
    raise AssertionError(f"{world.status['phase']}: {world.message('Progressing')}")


def reached_revisions(world: World) -> set[tuple[str, str]]:
    """Return the revisions, and whether of control pods, that users reach through the Service with the resource's name."""
    selector = world.objects["Service", "chat"]["spec"]["selector"]
    labels = [pod["metadata"]["labels"] for pod in world.pods]
    return {(label[naming.REVISION_LABEL], label[naming.CONTROL_LABEL]) for label in labels if selector.items() <= label.items()}


def evaluation(world: World) -> dict[str, Any]:
    result: dict[str, Any] = world.status["canary"]["evaluation"]
    return result


def flags(world: World, revision: str, *, control: bool = False) -> list[str]:
    deployment = world.deployments(control=control)[revision]
    args: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return [arg for arg in args if "per-request" in arg]


# --------------------------------------------------------------------------------------------------------------- users and pods
@pytest.mark.parametrize("mode", [{}, GATEWAY])
def test_users_reach_neither_canary_nor_control_before_the_verdict(mode: dict[str, Any]) -> None:
    world, old = world_in_phase("Starting", rollout=rollout({**PROMPTS, "only": False}, **mode))
    new = world.desired_revision
    assert reached_revisions(world) == {(old, "false")}, "before its first pod is ready"
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "Evaluating"
    assert reached_revisions(world) == {(old, "false")}
    assert world.status["selector"].count("aerie.dev/control=false") == 1
    assert (world.status["replicas"], world.status["canary"]["weight"]) == (2, 0)
    if mode:
        assert weights(world) == {"stable": TOTAL_WEIGHT, "canary": 0, "control": 0}
    evaluate_until(world, "WarmingUp")
    assert reached_revisions(world) == {(old, "false"), (old, "true"), (new, "false")}
    assert world.status["replicas"] == 4


def test_stable_pods_that_end_are_stood_in_for_by_the_control_and_then_by_the_canary() -> None:
    world, old = evaluating_world()
    new = world.desired_revision
    for pod in world.pods:
        labels = pod["metadata"]["labels"]
        if labels[naming.REVISION_LABEL] == old and labels[naming.CONTROL_LABEL] == "false":
            pod["status"]["conditions"][0]["status"] = "False"
    world.step()
    assert (old, "true") in reached_revisions(world)
    assert (new, "false") not in reached_revisions(world)
    world.ready(old, "False")
    world.step()
    assert (new, "false") in reached_revisions(world)
    world.ready()
    world.step()
    assert reached_revisions(world) == {(old, "false")}


def test_evaluator_runs_during_the_evaluation_alone() -> None:
    world, old = world_in_phase("Starting", rollout=rollout(**GATEWAY, shadow={"source": "Mirror"}))
    new = world.desired_revision
    assert EVALUATOR not in world.objects
    world.schedule()
    world.ready()
    world.step()
    world.step()
    container = world.objects[EVALUATOR]["spec"]["template"]["spec"]["containers"][0]
    addresses = {
        (pod["metadata"]["labels"][naming.REVISION_LABEL], pod["metadata"]["labels"][naming.CONTROL_LABEL]): pod["status"][
            "podIP"
        ]
        for pod in world.pods
    }
    assert f"--canary=http://{addresses[new, 'false']}:8000" in container["args"]
    assert f"--control=http://{addresses[old, 'true']}:8000" in container["args"]
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    assert rule["filters"][0]["requestMirror"]["backendRef"]["name"] == "chat-evaluator"
    evaluate_until(world, "Ramping")
    world.step()
    assert not [key for key in world.objects if key[1] == "chat-evaluator"]
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    assert "filters" not in rule


def test_flags_are_added_to_new_pods_alone() -> None:
    world = serving_world()
    old = world.desired_revision
    before = world.deployments()[old]["spec"]
    world.edit(rollout=rollout())
    world.settle()
    assert world.deployments()[old]["spec"] == before, "shadow restarts no pod"
    world.drafter("eagle31")
    world.settle_until("Starting")
    new = world.desired_revision
    expected = ["--per-request-spec-decode-metrics=summary", "--enable-per-request-metrics"]
    assert (flags(world, new), flags(world, old, control=True), flags(world, old)) == (expected, expected, [])
    world.edit(rollout=rollout({"source": "None"}))
    world.step()
    assert (flags(world, new), flags(world, old, control=True)) == (expected, expected), "pods of a revision stay"
    assert evaluation(world)["result"] == "Skipped"


def test_without_shadow_there_is_no_evaluation() -> None:
    world, old = world_in_phase("Starting")
    assert "evaluation" not in world.status["canary"]
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"
    assert flags(world, old, control=True) == flags(world, world.desired_revision) == []


# --------------------------------------------------------------------------------------------------------------------- verdicts
@pytest.mark.parametrize("gain", [0.09, 0.0])
def test_good_canary_is_accepted_and_then_meets_users(gain: float, messages: Messages) -> None:
    world, _ = evaluating_world(gain)
    messages.check("no pairs yet", world.message("Progressing"))
    world.evaluate()
    analysis = world.status["analysis"]
    assert (analysis["design"], analysis["verdict"]) == ("EqualRequests", "Continue")
    messages.check(f"evaluating {gain:+.0%}", world.message("Progressing"))
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"
    assert evaluation(world)["state"] == "", "counts that are no longer needed"
    analysis = world.status["analysis"]
    assert (analysis["design"], analysis["verdict"]) == ("EqualRequests", "Promote")
    messages.check(f"ramp {gain:+.0%}", masked(world.message("Progressing")))
    run_until(world, "Ready", 60, minutes=6)
    outcome = last_outcome(world)
    assert (outcome["result"], outcome["comparisons"]) == ("Promoted", analysis["comparisons"])
    messages.check(f"promoted {gain:+.0%}", outcome["message"])


def test_accepted_canary_waits_for_approval_where_the_spec_says_so(messages: Messages) -> None:
    world, _ = evaluating_world(0.09, canary={"approval": "Manual"}, **GATEWAY)
    evaluate_until(world, "AwaitingApproval")
    messages.check("approval", masked(world.message("Progressing")))
    world.annotate(promote=world.desired_revision)
    world.step()
    assert world.status["phase"] == "Ramping"


def test_analysis_follows_an_acceptance_where_the_spec_says_so(messages: Messages) -> None:
    world, _ = evaluating_world(0.09, shadow={**PROMPTS, "only": False})
    evaluate_until(world, "WarmingUp")
    assert evaluation(world)["result"] == "Accepted"
    assert "analysis" not in world.status
    messages.check("warming up", masked(world.message("Progressing")))
    world.now += 5 * MINUTE
    world.step()
    assert world.status["analysis"].get("design", "BetweenPods") == "BetweenPods"
    for _ in range(30):
        world.measure(1, +0.2)
    run_until(world, "Ready", 60)
    assert last_outcome(world)["result"] == "Promoted"


def test_users_of_an_accepted_canary_may_still_take_it_back() -> None:
    world, _ = evaluating_world(0.09, replicas=4, canary={"stepDuration": "4h"})
    evaluate_until(world, "Ramping")
    world.schedule()
    world.ready()
    for _ in range(60):
        if world.status["phase"] != "Ramping":
            break
        world.measure(1, -0.3)
    outcome = last_outcome(world)
    assert outcome["result"] == "RolledBack"
    assert world.status["analysis"].get("design", "BetweenPods") == "BetweenPods"
    assert outcome["comparisons"][0]["estimate"] < -0.2


def test_evaluation_and_ramp_share_the_errors_that_are_allowed() -> None:
    world, _ = evaluating_world(0.09)
    evaluate_until(world, "Ramping")
    analysis_run = AnalysisRun.unpack(world.status["analysis"]["state"])
    assert analysis_run is not None
    assert analysis_run.plan.inconclusive_attempts == 1


def test_monitoring_compares_with_the_ramp_of_an_accepted_canary() -> None:
    world, _ = evaluating_world(0.09, replicas=4, canary={"stepDuration": "30m", "scaleDownDelay": "1h"})
    evaluate_until(world, "Ramping")
    for _ in range(60):
        if world.status["phase"] == "Monitoring":
            break
        world.schedule()
        world.ready()
        world.measure(1, +0.09)
    assert world.status["stable"]["referenceAcceptanceLength"] > 2
    for _ in range(20):
        if world.status["phase"] == "Verifying":
            break
        world.measure_alone(1, 1.8)
    assert world.status["phase"] == "Verifying"


def test_copies_of_requests_are_the_default_behind_a_gateway() -> None:
    world, _ = evaluating_world(0.09, shadow={}, **GATEWAY)
    world.step()
    (rule,) = world.objects["HTTPRoute", "chat"]["spec"]["rules"]
    assert rule["filters"][0]["requestMirror"]["backendRef"]["name"] == "chat-evaluator"


def test_without_a_gateway_there_is_no_evaluation_by_default() -> None:
    world, _ = world_in_phase("WarmingUp", rollout=rollout({}))
    assert "evaluation" not in world.status["canary"]


@pytest.mark.parametrize("mode", [{}, GATEWAY])
def test_worse_canary_is_rolled_back_before_a_user_meets_it(mode: dict[str, Any], messages: Messages) -> None:
    world, old = evaluating_world(-0.3, replicas=4, **mode)
    new = world.desired_revision
    evaluate_until(world, "RollingBack")
    for _ in range(6):
        assert (new, "false") not in reached_revisions(world)
        assert not mode or weights(world).get("canary", 0) == 0
        world.step()
        world.schedule()
        world.ready()
    run_until(world, "RolledBack")
    assert last_outcome(world)["result"] == "RolledBack"
    assert last_outcome(world)["comparisons"][0]["metric"] == "TokensPerStep"
    messages.check("rolled back", last_outcome(world)["message"])
    assert world.status["rejectedRevision"] == new
    world.settle()
    assert world.replicas() == {f"chat-{old}": 4}


def test_changed_answers_roll_back_with_their_reason(messages: Messages) -> None:
    world, _ = evaluating_world(0.2)
    world.evaluator.answers = CHANGED_ANSWERS
    world.evaluate()
    assert world.status["phase"] == "RollingBack"
    assert last_outcome(world)["message"].startswith("AnswersDiffer: ")
    assert "AnswersDiffer" in world.message("Progressing")
    messages.check("changed answers", last_outcome(world)["message"])


def test_answers_of_another_image_may_differ() -> None:
    world = serving_world(rollout=rollout())
    world.edit(engine={"image": "vllm/vllm-openai:v0.32.0"})
    run_until(world, "Evaluating")
    world.evaluator.answers = CHANGED_ANSWERS
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"


def test_another_number_of_draft_tokens_is_evaluated_by_time(messages: Messages) -> None:
    world = serving_world(rollout=rollout())
    world.edit(speculation={"numSpeculativeTokens": 5})
    run_until(world, "Evaluating")
    world.evaluator.gain = -0.3
    evaluate_until(world, "Ramping")
    messages.check("accepted by time", evaluation(world)["message"])


def test_no_verdict_in_time_is_inconclusive_and_the_rollout_continues(messages: Messages) -> None:
    world, _ = evaluating_world(shadow={**PROMPTS, "maxDuration": "3m"})
    world.evaluator.pairs_per_fetch = 1
    assert world.plan().requeue_after is not None
    for _ in range(17):
        world.evaluate()
        assert world.status["phase"] == "Evaluating"
    world.evaluate()
    world.step()
    assert (world.status["phase"], evaluation(world)["result"]) == ("WarmingUp", "Inconclusive")
    messages.check("inconclusive", masked(world.message("Progressing")))


def test_without_an_evaluator_the_rollout_continues_after_the_limit(messages: Messages) -> None:
    world, _ = evaluating_world(shadow={**PROMPTS, "maxDuration": "3m"})
    world.evaluator.problem = "The evaluator does not respond: check it."
    world.evaluate(3)
    assert world.plan().requeue_after == timedelta(seconds=150)
    before = world.document["status"]
    world.now += timedelta(seconds=149)
    world.read_pairs()
    world.step()
    assert world.document["status"] == before, "time alone writes nothing"
    world.evaluate()
    assert evaluation(world)["result"] == "Inconclusive"
    messages.check("no evaluator", evaluation(world)["message"])
    run_until(world, "Analyzing")


# ---------------------------------------------------------------------------------------------------------------------- skipped
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("old vLLM", {"image": "vllm/vllm-openai:v0.28.0"}),
        ("flag is off", {"image": "vllm/vllm-openai:v0.33.0", "args": ["--per-request-spec-decode-metrics", "none"]}),
        ("Rust", {"image": "vllm/vllm-openai:v0.33.0", "env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]}),
    ],
)
def test_impossible_evaluation_is_skipped_with_its_reason(name: str, engine: dict[str, Any], messages: Messages) -> None:
    world, old = world_in_phase("Starting", rollout=rollout(), engine=engine)
    new = world.desired_revision
    assert evaluation(world)["result"] == "Skipped"
    assert "--per-request-spec-decode-metrics=summary" not in flags(world, new) + flags(world, old, control=True)
    messages.check(name, masked(world.message("Progressing")))
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"


def key_from(secret: str) -> dict[str, Any]:
    variable = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": secret, "key": "key"}}}
    return {"image": "vllm/vllm-openai:v0.33.0", "env": [variable]}


def test_the_evaluator_has_the_api_key_that_both_engines_have() -> None:
    world, _ = evaluating_world(engine=key_from("keys"))
    pod = world.objects[EVALUATOR]["spec"]["template"]["spec"]
    assert {"name": "engine-key", "secret": {"secretName": "keys", "items": [{"key": "key", "path": "key"}]}} in pod["volumes"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("key is plain text", {**key_from("keys"), "args": ["--api-key", "secret"]}, None),
        ("keys differ", key_from("old"), key_from("new")),
        ("key is new", {"image": "vllm/vllm-openai:v0.33.0"}, key_from("new")),
    ],
)
def test_without_a_key_for_both_engines_it_is_skipped(
    name: str, before: dict[str, Any], after: dict[str, Any] | None, messages: Messages
) -> None:
    world = serving_world(rollout=rollout(), engine=before)
    if after is not None:
        world.edit(engine=after)
    world.drafter("eagle31")
    world.settle_until("Starting")
    assert evaluation(world)["result"] == "Skipped"
    messages.check(name, evaluation(world)["message"])


@pytest.mark.parametrize("value", ["summary", "detailed"])
def test_flag_of_the_user_stays(value: str) -> None:
    engine = {"image": "vllm/vllm-openai:v0.33.0", "args": [f"--per_request_spec_decode_metrics={value}"]}
    world, _ = evaluating_world(engine=engine)
    assert flags(world, world.desired_revision) == ["--enable-per-request-metrics"]


def test_control_that_cannot_count_is_left_as_it_is(messages: Messages) -> None:
    world = serving_world(rollout=rollout(), engine={"image": "vllm/vllm-openai:v0.28.0"})
    old = world.desired_revision
    world.edit(engine={"image": "vllm/vllm-openai:v0.33.0"})
    world.settle_until("Starting")
    assert flags(world, old, control=True) == []
    messages.check("old control", masked(world.message("Progressing")))


def test_stable_pods_are_the_control_where_the_spec_says_so() -> None:
    world, old = evaluating_world(0.09, canary={"control": "Stable"})
    args = world.objects[EVALUATOR]["spec"]["template"]["spec"]["containers"][0]["args"]
    address = min(
        (pod for pod in world.pods if pod["metadata"]["labels"][naming.REVISION_LABEL] == old),
        key=lambda pod: str(pod["metadata"]["name"]),
    )["status"]["podIP"]
    assert [arg for arg in args if arg.startswith("--control")] == [f"--control=http://{address}:8000"]
    world.evaluator.slowness = 0.5  # users load the stable pods, so times say nothing
    evaluate_until(world, "WarmingUp")
    assert "Times are not comparable" in evaluation(world)["message"]


def test_stable_pods_without_counts_are_no_control(messages: Messages) -> None:
    world = serving_world(rollout={"canary": {"control": "Stable"}})
    world.edit(rollout=rollout(canary={"control": "Stable"}))
    world.drafter("eagle31")
    world.settle_until("Starting")
    assert evaluation(world)["result"] == "Skipped"
    messages.check("stable pods without counts", masked(world.message("Progressing")))


def test_shadow_that_is_set_after_the_start_comes_with_the_next_rollout() -> None:
    world, _ = world_in_phase("Starting")
    world.edit(rollout=rollout())
    world.schedule()
    world.ready()
    world.step()
    assert world.status["phase"] == "WarmingUp"
    assert "evaluation" not in world.status["canary"]


def test_answers_without_counts_end_the_evaluation(messages: Messages) -> None:
    world, _ = evaluating_world()
    world.evaluator.pairs_per_fetch, world.evaluator.skipped = 0, {"without_metrics": 12}
    world.evaluate()
    assert world.status["phase"] == "Evaluating"
    world.evaluate()
    assert (world.status["phase"], evaluation(world)["result"]) == ("WarmingUp", "Skipped")
    messages.check("without counts", evaluation(world)["message"])


# ------------------------------------------------------------------------------------------------------------------ counted once
def counted_pairs(world: World) -> int:
    arm = CanaryArm.model_validate(world.status["canary"])
    assert arm.evaluation is not None
    return int(world.status["analysis"]["comparisons"][0]["sampleCount"]) if world.status.get("analysis") else 0


def test_no_batch_counts_twice_wherever_the_operator_ends() -> None:
    for parts in range(3):
        world, _ = evaluating_world(shadow={**PROMPTS, "maxDuration": "24h"})
        world.evaluator.pairs_per_fetch = 2
        for number in range(20):
            world.now += timedelta(seconds=10)
            world.read_pairs()
            world.step(parts if number % 3 else 1000)  # without the status, nothing is counted
            if number % 4 == 0:
                world.pairs = None  # a restarted operator has read nothing
        world.read_pairs()
        world.step()
        assert counted_pairs(world) == world.evaluator.delivered


def test_restarts_of_the_evaluator_count_nothing_twice() -> None:
    world, _ = evaluating_world(shadow={**PROMPTS, "maxDuration": "24h"})
    world.evaluator.pairs_per_fetch = 2
    for number in range(20):
        world.evaluate()
        if number % 5 == 4:
            world.evaluator.restart()
    world.step()
    world.step()
    assert counted_pairs(world) == world.evaluator.delivered == 40


def test_an_evaluator_that_always_restarts_ends_the_evaluation(messages: Messages) -> None:
    world, _ = evaluating_world(shadow={**PROMPTS, "maxDuration": "24h"})
    world.evaluator.pairs_per_fetch = 1
    for _ in range(MAX_EVALUATOR_PROCESSES):
        assert world.status["phase"] == "Evaluating"
        assert len(world.status["canary"]["evaluation"]["state"]) < 20_000
        world.evaluator.restart()
        world.evaluate()
    assert evaluation(world)["result"] == "Skipped"
    messages.check("restarts", evaluation(world)["message"])


def test_an_unreadable_state_restarts_the_counts() -> None:
    world, _ = evaluating_world(0.09)
    world.evaluate()
    world.document["status"]["canary"]["evaluation"]["state"] = "of another release"
    arm = CanaryArm.model_validate(world.status["canary"])
    assert arm.evaluation is not None
    assert read_counted_batches(arm.evaluation) == {}
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"


# --------------------------------------------------------------------------------------------------------------- ends, and pods
def test_a_user_promotes_during_the_evaluation() -> None:
    world, _ = evaluating_world(**GATEWAY)
    world.annotate(promote=world.desired_revision)
    world.step()
    assert world.status["phase"] == "Ramping"
    assert evaluation(world)["result"] == "Skipped"
    world.step()
    assert EVALUATOR not in world.objects
    run_until(world, "Ready", 60, minutes=6)
    assert last_outcome(world)["message"] == "Promoted manually."


@pytest.mark.parametrize("end", ["rollback", "spec", "stable spec", "crash"])
def test_every_end_removes_the_evaluator_and_leaves_users_alone(end: str) -> None:
    world, old = evaluating_world()
    new = world.desired_revision
    world.evaluate()
    if end == "rollback":
        world.annotate(rollback=new)
    elif end == "crash":
        world.crash(new, 3)
    else:
        world.drafter("eagle3" if end == "stable spec" else "equal")
    for _ in range(4):
        world.read_pairs()
        world.step()
        assert (new, "false") not in reached_revisions(world), "before its pods have ended"
    world.schedule()
    world.step()
    assert naming.CONTROL_LABEL not in world.objects["Service", "chat"]["spec"]["selector"] or end == "spec"
    assert EVALUATOR not in world.objects
    assert ("Service", "chat-evaluator") not in world.objects
    assert f"chat-{new}" not in world.replicas()
    assert world.status["stable"]["revision"] == old


def test_zero_replicas_restart_the_evaluation() -> None:
    world, _ = evaluating_world(0.09)
    world.evaluate()
    world.edit(replicas=0)
    world.evaluate(2)
    assert world.status["canary"]["phase"] == "Starting"
    assert not {"startTime", "result"} & evaluation(world).keys()
    assert EVALUATOR not in world.objects
    world.edit(replicas=2)
    run_until(world, "Evaluating")
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"


def test_a_pause_keeps_everything_and_counts_nothing() -> None:
    world, old = evaluating_world(0.09)
    world.evaluate()
    counted = counted_pairs(world)
    world.edit(rollout=rollout(paused=True))
    world.evaluate(20)
    assert (world.status["phase"], world.status["canary"]["phase"]) == ("Paused", "Evaluating")
    assert counted_pairs(world) == counted
    assert reached_revisions(world) == {(old, "false")}
    world.edit(rollout=rollout())
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"


def test_an_evicted_pod_is_no_failure_of_the_canary() -> None:
    world, _ = evaluating_world(0.09)
    new = world.desired_revision
    world.evaluator.pairs_per_fetch = 5
    world.evaluate()
    pod = next(pod for pod in world.pods if pod["metadata"]["labels"][naming.REVISION_LABEL] == new)
    world.pods.remove(pod)
    world.evaluator.skipped = {"canary_failed": 40}  # until the operator has removed the evaluator
    world.evaluate()
    world.evaluator.skipped = {}
    world.step()
    assert EVALUATOR not in world.objects, "no requests to an address that has ended"
    assert ("Service", "chat-evaluator") in world.objects
    world.schedule()
    world.ready()
    world.step()
    assert EVALUATOR in world.objects
    evaluate_until(world, "Ramping")
    assert evaluation(world)["result"] == "Accepted"


def test_a_canary_that_keeps_failing_requests_is_rolled_back(messages: Messages) -> None:
    world, _ = evaluating_world(0.09)
    world.evaluator.skipped, world.evaluator.pairs_per_fetch = {"canary_failed": 2}, 1
    evaluate_until(world, "RollingBack", fetches=20)
    messages.check("failed requests", last_outcome(world)["message"])


@pytest.mark.parametrize("mode", [{}, GATEWAY])
def test_a_canary_that_answers_nothing_is_rolled_back_before_a_user_meets_it(mode: dict[str, Any], messages: Messages) -> None:
    """It stays Ready."""
    world, _ = evaluating_world(0.09, replicas=4, **mode)
    new = world.desired_revision
    world.evaluator.skipped, world.evaluator.pairs_per_fetch = {"canary_failed": 4}, 0
    for seconds in (30.0, 60.0, 100.0):
        world.evaluator.outage_seconds = seconds
        world.evaluate()
        assert world.status["phase"] == "Evaluating"
    world.evaluator.outage_seconds = 130.0
    world.evaluate()
    assert world.status["phase"] == "RollingBack"
    messages.check("silent canary", last_outcome(world)["message"])
    for _ in range(4):
        assert (new, "false") not in reached_revisions(world)
        world.step()
        world.schedule()
        world.ready()
    run_until(world, "RolledBack")
    assert world.status["rejectedRevision"] == new


def test_a_canary_that_is_silent_at_the_deadline_meets_no_user() -> None:
    world, _ = evaluating_world(0.09, shadow={**PROMPTS, "maxDuration": "3m"})
    new = world.desired_revision
    world.evaluator.skipped, world.evaluator.pairs_per_fetch, world.evaluator.outage_seconds = {"canary_failed": 1}, 0, 60.0
    evaluate_until(world, "RollingBack")
    assert (new, "false") not in reached_revisions(world)


@pytest.mark.parametrize("reason", ["control_failed", "both_failed"])
def test_a_control_that_answers_nothing_neither_rolls_back_nor_accepts(reason: str, messages: Messages) -> None:
    world, _ = evaluating_world(0.09, shadow={**PROMPTS, "maxDuration": "3m"})
    world.evaluator.skipped, world.evaluator.pairs_per_fetch = {reason: 4}, 0
    evaluate_until(world, "WarmingUp")
    assert evaluation(world)["result"] == "Inconclusive"
    messages.check(reason, evaluation(world)["message"])


def test_other_hardware_leaves_tokens_per_step_to_decide() -> None:
    world, _ = evaluating_world(0.09)
    new = world.desired_revision
    for pod in world.pods:
        is_canary = pod["metadata"]["labels"][naming.REVISION_LABEL] == new
        pod["spec"]["nodeName"] = "a" if is_canary else "h"
    world.nodes = {"a": {"nvidia.com/gpu.product": "A100"}, "h": {"nvidia.com/gpu.product": "H100"}}
    world.evaluator.slowness = 1.0
    evaluate_until(world, "WarmingUp")  # users show how long a token takes
    assert evaluation(world)["result"] == "Accepted"


@pytest.mark.parametrize("replicas", [1, 40, pytest.param(900, marks=pytest.mark.slow)])
def test_fleet_of_any_size_has_small_status_and_two_addresses(replicas: int) -> None:
    world, old = evaluating_world(0.09, replicas=replicas)
    args = world.objects[EVALUATOR]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert sum(arg.startswith(("--canary", "--control")) for arg in args) == 2
    world.evaluate()
    assert len(evaluation(world)["state"]) < 10_000
    assert world.step().objects_to_apply == ()
    assert reached_revisions(world) == {(old, "false")}
