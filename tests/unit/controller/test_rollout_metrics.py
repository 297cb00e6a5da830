"""Export of the metrics of resources: they follow the status, end with the resource, and count each finished rollout once."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aerie.api.status import Status
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.rollout_metrics import RolloutMetrics
from aerie.controller.work_queue import NamespacedName
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, start_settled_operator
from tests.unit.rollout import tuned_world
from tests.unit.rollout.world import serving_world, world_in_phase

OTHER = NamespacedName("default", "other")
MAX_SCRAPE_CPU_SECONDS = 3.0
"""CPU time of a scrape of 1,000 resources in analyses: 0.5 s on an idle machine, in a thread beside the event loop."""


@pytest.fixture
def metrics() -> RolloutMetrics:
    return RolloutMetrics()


def registry(metrics: RolloutMetrics) -> CollectorRegistry:
    registered = CollectorRegistry()
    registered.register(metrics)
    return registered


def value(metrics: RolloutMetrics, name: str, key: NamespacedName = CHAT, **labels: str) -> float | None:
    sample: float | None = registry(metrics).get_sample_value(
        f"aerie_{name}", {"namespace": key.namespace, "name": key.name, **labels}
    )
    return sample


def series_of(metrics: RolloutMetrics, key: NamespacedName) -> set[str]:
    return {s.name for m in metrics.collect() for s in m.samples if s.labels.get("name") == key.name}


def test_samples_follow_the_status(metrics: RolloutMetrics) -> None:
    world, _ = world_in_phase("Starting")
    metrics.update(CHAT, Status.from_dict(world.status))
    assert value(metrics, "resource_phase", phase="Starting") == 1
    world, _ = world_in_phase("Analyzing")
    metrics.update(CHAT, Status.from_dict(world.status))
    assert value(metrics, "resource_phase", phase="Starting") is None
    assert value(metrics, "resource_phase", phase="Analyzing") == 1


def test_unchanged_resource_is_not_built_again(metrics: RolloutMetrics) -> None:
    status = Status.from_dict(serving_world().status)
    metrics.update(CHAT, status, "7")
    metrics.update(CHAT, status.model_copy(update={"phase": "Paused"}), "7")
    assert value(metrics, "resource_phase", phase="Ready") == 1
    metrics.update(CHAT, status.model_copy(update={"phase": "Paused"}), "8")
    assert value(metrics, "resource_phase", phase="Paused") == 1


def test_deleted_resource_has_no_series(metrics: RolloutMetrics) -> None:
    world, _ = world_in_phase("Analyzing")
    for key in (CHAT, OTHER):
        metrics.update(key, Status.from_dict(world.status))
    metrics.forget(CHAT)
    assert series_of(metrics, CHAT) == set()
    assert "aerie_rollouts_finished_total" in series_of(metrics, OTHER)
    metrics.forget(CHAT)


def test_resource_on_hold_has_only_its_reason(metrics: RolloutMetrics) -> None:
    metrics.update(CHAT, Status.from_dict(serving_world().status), "7")
    metrics.hold(CHAT, "VersionSkew")
    assert series_of(metrics, CHAT) == {"aerie_attention"}
    assert value(metrics, "attention", reason="VersionSkew") == 1
    metrics.update(CHAT, Status.from_dict(serving_world().status), "7")
    assert value(metrics, "attention", reason="VersionSkew") is None


def test_finished_rollout_is_counted_once_and_begins_at_zero(metrics: RolloutMetrics) -> None:
    world, _ = world_in_phase("Analyzing")
    metrics.update(CHAT, Status.from_dict(world.status))
    assert value(metrics, "rollouts_finished_total", result="RolledBack") == 0
    assert value(metrics, "rollouts_finished_total", result="Promoted") == 0, "an earlier rollout is not counted"
    world.annotate(rollback=world.desired_revision)
    for _ in range(20):
        world.now += timedelta(seconds=30)
        world.step()
        metrics.update(CHAT, Status.from_dict(world.status))
        world.check()
        world.schedule()
        world.ready()
    assert value(metrics, "rollouts_finished_total", result="RolledBack") == 1
    assert value(metrics, "rollouts_finished_total", result="Promoted") == 0
    outcome = Status.from_dict(world.status).rollout_history[0]
    seconds = registry(metrics).get_sample_value("aerie_rollout_duration_seconds_sum", {"result": "RolledBack"})
    assert seconds == (outcome.completion_time - outcome.start_time).total_seconds()


def test_restarted_operator_does_not_count_old_rollouts() -> None:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.desired_revision)
    world.settle()
    status = Status.from_dict(world.status)
    assert len(status.rollout_history) == 2
    metrics = RolloutMetrics()
    for _ in range(2):
        metrics.update(CHAT, status)
    assert value(metrics, "rollouts_finished_total", result="RolledBack") is None
    assert registry(metrics).get_sample_value("aerie_rollout_duration_seconds_count", {"result": "RolledBack"}) is None


def test_record_that_leaves_the_history_is_not_counted_again(metrics: RolloutMetrics) -> None:
    status = Status.from_dict(serving_world().status)
    (record,) = status.rollout_history
    history = [record.model_copy(update={"revision": f"r{number}"}) for number in range(25)]
    for end in range(26):
        metrics.update(CHAT, status.model_copy(update={"rollout_history": history[:end][::-1][:10]}))
    assert value(metrics, "rollouts_finished_total", result="Promoted") == 25


def test_trials_are_counted(metrics: RolloutMetrics) -> None:
    world = tuned_world.tuned_world()
    tuned_world.recommend(world)
    metrics.update(CHAT, Status.from_dict(world.status))
    world.step()
    metrics.update(CHAT, Status.from_dict(world.status))
    assert value(metrics, "tuning_trials_finished_total", result="Promoted") == 0
    tuned_world.run_trial(world, -0.1)
    metrics.update(CHAT, Status.from_dict(world.status))
    assert value(metrics, "tuning_trials_finished_total", result="Promoted") == 1


def test_reconciles_export_and_deletion_ends_it(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        metrics = operator.reconciler.rollout_metrics
        assert value(metrics, "resource_phase", phase="Ready") == 1
        assert value(metrics, "replicas", arm="stable", state="ready") == 2
        operator.server.remove("SpeculativeDeployment", "chat")
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert series_of(metrics, CHAT) == set()

    run(work())


def test_notification_outcomes_begin_at_zero() -> None:
    metrics = OperatorMetrics()
    metrics.initialize_notification_counts(["team"])
    for outcome in ("sent", "queue_full", "rejected", "expired", "error"):
        labels = {"receiver": "team", "outcome": outcome}
        assert metrics.registry.get_sample_value("aerie_notifications_total", labels) == 0


def test_scrape_of_a_thousand_resources_is_cheap_and_bounded(metrics: RolloutMetrics) -> None:
    world, _ = world_in_phase("Analyzing")
    world.measure(3, +0.1)
    status = Status.from_dict(world.status)
    for number in range(1000):
        metrics.update(NamespacedName("default", f"chat-{number}"), status)
    registered = registry(metrics)
    started = time.process_time()
    page = generate_latest(registered)
    assert time.process_time() - started < MAX_SCRAPE_CPU_SECONDS
    series = [line for line in page.splitlines() if not line.startswith(b"#")]
    assert len(series) / 1000 < 70
