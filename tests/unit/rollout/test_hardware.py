"""Arms on different GPUs: node labels show it, times are omitted with a message, acceptance is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from aerie.manifests import naming
from aerie.rollout.canary.analysis_run import AnalysisRun
from aerie.rollout.facts.hardware import MAX_COMPARED_PODS, LabelsByNode, _sample, hardware_difference_message
from aerie.rollout.trials.failures import COOLDOWNS_AFTER_ROLLBACK
from aerie.tuning.decision.policy import backoff_factor
from tests.golden import Messages
from tests.unit.rollout.test_effective_setting import K5, MINUTE, recommend, reconcile, speculation, tuned_world
from tests.unit.rollout.world import World, monitored_world, serving_world, world_in_phase

A100, H100 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"
PRODUCT, INSTANCE = "nvidia.com/gpu.product", "node.kubernetes.io/instance-type"


def pods(*nodes: str | None) -> list[dict[str, Any]]:
    return [{"metadata": {"name": f"p{index}"}, "spec": {"nodeName": node} if node else {}} for index, node in enumerate(nodes)]


NODES: LabelsByNode = {
    "a1": {PRODUCT: A100, INSTANCE: "p4d.24xlarge"},
    "a2": {PRODUCT: A100, INSTANCE: "p4de.24xlarge"},
    "h1": {PRODUCT: H100, INSTANCE: "p5.48xlarge"},
    "h2": {INSTANCE: "p5.48xlarge"},
    "h3": {INSTANCE: "p5.48xlarge"},
    "bare": {},
}


@pytest.mark.parametrize(
    ("canary", "control"),
    [
        (["a1"], ["a2"]),
        (["a1", None], ["a1", "a2"]),
        (["a1", "h1"], ["a2", "a2", "h1", "h1"]),
        (["h1"], ["h2"]),
        (["h2", "h1"], ["h3"]),
    ],
)
def test_hardware_is_compared_by_first_common_label(canary: list[str | None], control: list[str | None]) -> None:
    """A node that does not have the GPU's own label yet counts as equal hardware."""
    assert hardware_difference_message(pods(*canary), pods(*control), NODES) == ""


def test_mixed_hardware_message_has_product_counts(messages: Messages) -> None:
    messages.check("GPU products", hardware_difference_message(pods("a1", "a2"), pods("a1", "h1"), NODES) or "")
    messages.check("instance types", hardware_difference_message(pods("a1"), pods("h2"), NODES) or "")


@pytest.mark.parametrize(
    ("canary", "control"), [([], ["a1"]), (["a1"], []), ([None], ["a1"]), (["a1"], ["bare"]), (["a1"], ["h1", "gone"])]
)
def test_hardware_without_labels_is_unknown(canary: list[str | None], control: list[str | None]) -> None:
    assert hardware_difference_message(pods(*canary), pods(*control), NODES) is None


@pytest.mark.parametrize(
    "is_newer", [lambda index: index < 500, lambda index: index % 2 == 0], ids=["the later half", "every second pod"]
)
def test_hardware_sample_is_independent_of_pod_order(is_newer: Callable[[int], bool]) -> None:
    nodes: LabelsByNode = {f"n{index}": {PRODUCT: A100 if is_newer(index) else H100} for index in range(1000)}
    message = hardware_difference_message(pods("n0"), pods(*nodes), nodes)
    assert message is not None
    counts = [int(count) for count in re.findall(r"\((\d+) pods\)", message)]
    assert sum(counts) == MAX_COMPARED_PODS
    assert min(counts) > MAX_COMPARED_PODS // 4
    assert f"{MAX_COMPARED_PODS} of its 1000 pods" in message


def test_new_pod_changes_at_most_one_of_sample() -> None:
    arm = pods(*(f"n{index}" for index in range(1000)))
    assert len({pod["metadata"]["name"] for pod in _sample(arm)} - {pod["metadata"]["name"] for pod in _sample(arm[1:])}) <= 1


# ------------------------------------------------------------------------------------------------------------------ rollouts
def place_pods(world: World, canary_product: str, other_product: str) -> None:
    """Place the canary's pods on a node of one GPU product, all others on a node of another."""
    world.nodes = {"one": {PRODUCT: canary_product}, "other": {PRODUCT: other_product}}
    canary_revision = (world.status.get("canary") or {}).get("revision")
    for pod in world.pods:
        pod["spec"] = {"nodeName": "one" if pod["metadata"]["labels"][naming.REVISION_LABEL] == canary_revision else "other"}


def analysis_run(world: World) -> AnalysisRun:
    run = AnalysisRun.unpack(world.status["analysis"]["state"])
    assert run is not None
    return run


def test_plan_names_its_nodes() -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, H100)
    assert world.step().hardware_nodes == ("one", "other")
    ready = serving_world()
    place_pods(ready, A100, A100)
    assert ready.step().hardware_nodes == (), "no rollout"


def test_canary_on_slower_gpu_is_decided_by_acceptance(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, H100)
    world.measure_time(6, 4.0)
    assert world.status["phase"] == "Analyzing"
    difference = world.status["analysis"]["hardwareMismatch"]
    assert difference in world.message("Progressing")
    messages.check("other hardware", difference)
    metrics = {comparison["metric"] for comparison in world.status["analysis"]["comparisons"]}
    requests = {"FailedRequests", "AbandonedRequests", "OutputLength", "TruncatedRequests"}
    assert metrics == {"TokensPerStep", "AcceptanceLength", *requests}
    for _ in range(40):
        world.measure(1, +0.2)
        if world.status["phase"] != "Analyzing":
            break
    assert world.status["phase"] in ("Ramping", "Promoting")
    reason = world.status["analysis"]["message"]
    assert "time per output token" not in reason
    assert difference in reason


def test_equal_hardware_compares_times() -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, A100)
    world.measure_time(2, 4.0)
    assert world.status["phase"] == "RollingBack"
    assert "hardwareMismatch" not in world.status["analysis"]


def test_rollback_message_names_omitted_criteria(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, H100)
    for _ in range(40):
        world.measure(1, -0.2)
        if world.status["phase"] != "Analyzing":
            break
    assert world.status["phase"] == "RollingBack"
    assert world.status["analysis"]["hardwareMismatch"] in world.status["rolloutHistory"][0]["message"]
    messages.check("rolled back on other hardware", world.status["rolloutHistory"][0]["message"])


def test_times_of_different_hardware_are_not_reused() -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, H100)
    world.measure_time(4, 4.0)
    place_pods(world, H100, H100)
    minute = timedelta(seconds=60)
    world.now += minute
    world.step()  # in the middle of a block that began on different hardware
    world.now -= minute
    world.measure_time(1, 4.0)
    world.measure_time(3, 0.0)
    state = analysis_run(world).state
    assert world.status["phase"] == "Analyzing"
    assert state.slow_output_streak == 0
    assert state.paired_moments["TimePerOutputToken"].count == 3
    assert state.paired_moments["TimePerOutputToken"].canary_mean == pytest.approx(0.01, rel=0.1)
    assert "hardwareMismatch" not in world.status["analysis"]


def test_times_from_unknown_hardware_are_dropped() -> None:
    world, _ = world_in_phase("Analyzing")
    world.measure_time(1, 4.0)
    assert analysis_run(world).state.slow_output_streak == 1
    place_pods(world, A100, H100)
    world.measure_time(1, 4.0)
    state = analysis_run(world).state
    assert (state.slow_output_streak, "TimePerOutputToken" in state.paired_moments) == (0, False)


def test_hardware_stays_different_while_unknown() -> None:
    world, _ = world_in_phase("Analyzing")
    place_pods(world, A100, H100)
    world.step()
    world.nodes = {}
    world.measure_time(6, 4.0)
    assert world.status["analysis"]["hardwareMismatch"] in world.message("Progressing")


def test_without_acceptance_and_time_promotion_is_manual(messages: Messages) -> None:
    """First drafter: drafts are not compared, and the remaining criteria (failed requests) are no reason to promote."""
    world, _ = world_in_phase("Analyzing", speculation={"numSpeculativeTokens": 0})
    assert analysis_run(world).plan.drafts_not_comparable_reason
    place_pods(world, A100, H100)
    for _ in range(130):
        world.measure(1, 0.0)
        if world.status["phase"] != "Analyzing":
            break
    assert (world.status["phase"], world.status["analysis"]["verdict"]) == ("Held", "Inconclusive")
    reason = world.status["analysis"]["message"]
    assert "spec.engine.podTemplate" in reason
    messages.check("nothing that may promote", reason)


def test_guardrails_after_analysis_omit_time() -> None:
    world, _ = world_in_phase("Ramping", rollout={"canary": {"stepDuration": "4h"}})
    world.schedule()
    world.ready()
    place_pods(world, A100, H100)
    world.measure_time(8, 4.0)
    assert world.status["phase"] == "Ramping"


def test_verifying_omits_time() -> None:
    world, old = monitored_world(rollout={"canary": {"scaleDownDelay": "3h"}})
    for _ in range(30):
        world.measure_alone(1, 1.5)
        if world.status["phase"] == "Verifying":
            break
    assert world.status["phase"] == "Verifying"
    world.nodes = {"one": {PRODUCT: A100}, "other": {PRODUCT: H100}}
    for pod in world.pods:
        pod["spec"] = {"nodeName": "other" if pod["metadata"]["labels"][naming.REVISION_LABEL] == old else "one"}
    assert world.plan().hardware_nodes == ("one", "other")
    world.measure_time(8, 4.0)
    assert world.status["phase"] == "Verifying"


# ------------------------------------------------------------------------------------------------------------------- trials
@pytest.mark.parametrize("action", ["Change", "Explore"])
def test_trial_on_different_hardware_is_inconclusive(action: Any) -> None:
    world = tuned_world()
    recommend(world, action=action)
    world.step()
    for _ in range(60):
        reconcile(world)
        place_pods(world, A100, H100)
        world.now += MINUTE
        if "trial" not in speculation(world):
            break
    trial, failure = speculation(world)["trials"][0], speculation(world)["failures"][0]
    assert (trial["toSetting"], trial["result"]) == (K5, "Inconclusive")
    assert (failure["reason"], failure["failureCount"]) == ("Failed", 1)
    assert A100 in failure["message"]
    for _ in range(60):
        reconcile(world)
        world.now += MINUTE
        if world.status["phase"] == "Ready":
            break
    recommend(world, action=action)
    reconcile(world)
    assert "trial" not in speculation(world)
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    ended = datetime.fromisoformat(failure["lastCompletionTime"])
    tuning = world.observed().resource.spec.speculation.tuning
    world.now = (
        ended + COOLDOWNS_AFTER_ROLLBACK * backoff_factor(1) * max(tuning.cooldown_duration, tuning.decision_interval) + MINUTE
    )
    recommend(world, action=action)
    reconcile(world)
    assert speculation(world)["trial"]["setting"] == K5, "the cooldown is over"
