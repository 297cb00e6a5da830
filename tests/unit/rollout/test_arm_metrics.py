"""When the metrics of an arm are written, and when the status stays unchanged."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, Status
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import CounterReset, diff_samples
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.arm_metrics import ArmMetrics, MetricSums, compute_arm_metrics, debounce_metrics, with_arm_metrics
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.revision.desired import resolve_desired_revision
from tests.snapshots import build_snapshot

DATA = Path(__file__).parents[1] / "engine" / "data"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
METRICS = ArmMetrics(2.4, 0.012, 0.3)


def test_arm_metrics_match_engine_counters() -> None:
    before, after = (parse_exposition((DATA / f"vllm-0.32.0-ngram-{number}.prom").read_bytes()) for number in (1, 2))
    window = diff_samples(before, after)
    assert not isinstance(window, CounterReset)
    assert window.speculation is not None
    assert window.speculation.accepted / window.speculation.drafts == pytest.approx(1.27, abs=0.005)
    # 1.824 s in 303 request-steps that gave 528 - 16 tokens; 0.378 s for 16 first tokens
    assert compute_arm_metrics(window) == ArmMetrics(2.27, 0.00356, 0.0237)
    assert compute_arm_metrics(window + window) == compute_arm_metrics(window)


def test_arm_metrics_without_drafter_or_traffic_are_none() -> None:
    before, after = (parse_exposition((DATA / f"vllm-0.32.0-two-api-servers-{number}.prom").read_bytes()) for number in (0, 2))
    idle = diff_samples(before, before)
    assert not isinstance(idle, CounterReset)
    assert compute_arm_metrics(idle) == ArmMetrics()
    plain = after.counters.__class__(
        **{name: getattr(after.counters, name) for name in after.counters.__slots__ if name != "speculation"}
    )
    metrics = compute_arm_metrics(plain)
    assert metrics.acceptance_length is None
    assert metrics.time_per_output_token is not None


@pytest.mark.parametrize(
    ("observed", "shown"),
    [
        (ArmMetrics(2.4, 0.012, 0.3), METRICS),
        (ArmMetrics(2.46, 0.0131, 0.35), METRICS),  # each inside its tolerance
        (ArmMetrics(2.34, 0.0109, 0.25), METRICS),
        (ArmMetrics(), METRICS),  # nothing measured
        (ArmMetrics(2.48, 0.0121, 0.31), ArmMetrics(2.48, 0.0121, 0.31)),  # one has changed: all are new
        (ArmMetrics(2.41, 0.0134, 0.31), ArmMetrics(2.41, 0.0134, 0.31)),
        (ArmMetrics(2.41, 0.0121, 0.37), ArmMetrics(2.41, 0.0121, 0.37)),
        (ArmMetrics(None, 0.02, None), ArmMetrics(2.4, 0.02, 0.3)),  # a missing metric stays
    ],
)
def test_metrics_change_only_beyond_a_tolerance(observed: ArmMetrics, shown: ArmMetrics) -> None:
    assert debounce_metrics(METRICS, observed) == shown


def test_first_metrics_are_shown_immediately() -> None:
    assert debounce_metrics(ArmMetrics(), METRICS) == METRICS
    assert debounce_metrics(ArmMetrics(None, 0.012, 0.3), METRICS) == METRICS


def test_acceptance_drop_to_1_is_always_shown() -> None:
    assert debounce_metrics(ArmMetrics(1.02), ArmMetrics(1.0)) == ArmMetrics(1.0)
    assert debounce_metrics(ArmMetrics(1.0), ArmMetrics(1.0)) == ArmMetrics(1.0)
    assert debounce_metrics(ArmMetrics(1.0), ArmMetrics(1.02)) == ArmMetrics(1.0)
    assert debounce_metrics(ArmMetrics(1.0), ArmMetrics(1.04)) == ArmMetrics(1.04)


def test_few_drafts_give_no_acceptance_length() -> None:
    def length(drafts: float, accepted: float) -> float | None:
        return MetricSums(3, drafts, accepted, 0.0, 0.0, 0.0, 0.0).arm_metrics.acceptance_length

    assert (length(49, 0), length(50, 0), length(3, 1)) == (None, 1.0, 1.33)


def test_steady_traffic_changes_no_metrics() -> None:
    """1,000 disjoint windows, means of at least 500 requests, with the dispersion that the tolerances are made for."""
    rng = random.Random(1)  # noqa: S311 - has to be the same each time

    def mean(value: float, spread: float) -> float:
        return value * (1 + rng.gauss(0, spread / 500**0.5))

    windows = [ArmMetrics(mean(2.4, 0.15), mean(0.012, 0.5), mean(0.3, 1.0)) for _ in range(1000)]
    shown, writes = ArmMetrics(2.4, 0.012, 0.3), 0
    for observed in windows:
        writes += (after := debounce_metrics(shown, observed)) != shown
        shown = after
    assert writes <= 2  # four standard errors are one in 16,000


def test_another_revision_starts_without_metrics() -> None:
    previous = Arm(revision="r1", acceptance_length=2.4)
    assert with_arm_metrics(Arm(revision="r2"), previous, None).acceptance_length is None
    assert with_arm_metrics(Arm(revision="r1"), previous, None).acceptance_length == 2.4
    assert with_arm_metrics(Arm(revision="r2"), previous, ArmMetrics(3.0)).acceptance_length == 3.0


def test_changed_status_shows_latest_metrics() -> None:
    """Otherwise two arms, each within its tolerance, could contradict their comparison."""
    arm = Arm(revision="r1", acceptance_length=2.4, time_per_output_token=0.04)
    assert with_arm_metrics(arm, arm, ArmMetrics(2.41)).acceptance_length == 2.4
    latest = with_arm_metrics(arm, arm, ArmMetrics(2.41), status_changes=True)
    assert (latest.acceptance_length, latest.time_per_output_token) == (2.41, 0.04)


# ---------------------------------------------------------------------------------------------------------- through reconcile
def resource(**status: Any) -> SpeculativeDeployment:
    source = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "a"}}}
    engine = {"image": "vllm/vllm-openai:v0.33.0"}
    return SpeculativeDeployment.from_dict(
        {
            "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
            "spec": {"replicas": 1, "model": source, "drafter": source, "engine": engine},
            **({"status": status} if status else {}),
        }
    )


def reconciled_status(status: dict[str, Any], metrics: ArmMetrics | None, after: float) -> Status:
    """Return the status that a reconcile writes over this one."""
    deployment = resource(**status)
    stable = deployment.status.stable.revision if deployment.status and deployment.status.stable else ""
    metrics_by_deployment = {} if metrics is None else {f"chat-{stable}": metrics}
    return build_reconcile_plan(
        build_snapshot(deployment, metrics_by_deployment=metrics_by_deployment),
        PreflightJobConfig("image"),
        NOW + timedelta(seconds=after),
    ).status


def test_status_is_rewritten_only_when_metrics_change() -> None:
    revision = resolve_desired_revision(resource()).revision
    status = reconciled_status({"stable": {"revision": revision}}, None, 0).to_dict()
    assert "acceptanceLength" not in status["stable"]
    status = reconciled_status(status, METRICS, 15).to_dict()
    assert status["stable"]["acceptanceLength"] == 2.4
    assert status["stable"]["timePerOutputToken"] == 0.012
    assert status["stable"]["timeToFirstToken"] == 0.3
    for seconds, metrics in (
        (30, ArmMetrics(2.43, 0.0125, 0.33)),
        (45, ArmMetrics(2.37, 0.0115, 0.28)),
        (60, None),
        (75, ArmMetrics()),
    ):
        assert reconciled_status(status, metrics, seconds).to_dict() == status
    assert reconciled_status(status, ArmMetrics(2.6, 0.012, 0.3), 90).to_dict() != status


def test_each_arm_shows_metrics_of_its_own_revision() -> None:
    revision = resolve_desired_revision(resource()).revision
    canary = {"revision": revision, "change": "drafter", "startTime": "2026-01-01T00:00:00Z", "phase": "Promoting"}
    status = {"stable": {"revision": "old", "acceptanceLength": 2.0}, "canary": canary}
    job = {
        "kind": "Job",
        "metadata": {"name": f"chat-{revision}-preflight"},
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }
    metrics_by_deployment = {"chat-old": ArmMetrics(2.01), f"chat-{revision}": ArmMetrics(2.9)}
    rolling = build_reconcile_plan(
        build_snapshot(resource(**status), (job,), metrics_by_deployment=metrics_by_deployment), PreflightJobConfig("image"), NOW
    ).status
    assert rolling.stable is not None
    assert rolling.canary is not None
    assert (rolling.stable.acceptance_length, rolling.canary.acceptance_length) == (2.0, 2.9)

    labels = {"aerie.dev/name": "chat", "aerie.dev/revision": revision, "aerie.dev/control": "false"}
    serving = {
        "metadata": {"name": "chat-0", "labels": labels},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    for available in (metrics_by_deployment, {}):
        promoted = build_reconcile_plan(
            build_snapshot(resource(**rolling.to_dict()), (job,), pods=(serving,), metrics_by_deployment=available),
            PreflightJobConfig("image"),
            NOW,
        ).status
        assert promoted.stable is not None
        assert (promoted.stable.revision, promoted.stable.acceptance_length) == (revision, 2.9), (
            "its own, not those of the previous revision"
        )
        assert promoted.canary is None
