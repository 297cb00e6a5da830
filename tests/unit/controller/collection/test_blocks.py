"""Blocks from rounds over the pods of an analysis: pods by arm, new samples, and restarted comparisons."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from aerie.api.rollout import AnalysisSpec
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm, SettingStatus, Status
from aerie.controller.collection.blocks import BlockCollector, ComparisonConfig, build_comparison_config
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, Gauges, Sample, SpeculationCounters
from aerie.rollout.canary.analysis_run.run import AnalysisRun, start_analysis

NOW = datetime(2026, 11, 1, tzinfo=UTC)
T0 = NOW.timestamp()
SETTING = SettingStatus(mode="Static", num_speculative_tokens=3)
INTERVAL = 15.0


def status(phase: str, *, control: bool = True, evidence: AnalysisRun | None = None) -> Status:
    stable, canary_arm = Arm(revision="old", setting=SETTING), Arm(revision="new", setting=SETTING)
    analysis_run = evidence or start_analysis(AnalysisSpec(), (canary_arm, stable), (1, 1), None, 0, None, NOW)
    canary = CanaryArm.model_validate(
        {"revision": "new", "setting": SETTING, "change": "drafter", "phase": phase, "startTime": NOW, "readyTime": NOW}
    )
    if control:
        canary = canary.model_copy(update={"control": Arm(revision="old")})
    return Status(
        stable=stable,
        canary=canary,
        analysis=AnalysisStatus(parameters=AnalysisSpec(), verdict="Continue", state=analysis_run.pack()),
    )


def build_config(phase: str = "Analyzing", *, control: bool = True) -> ComparisonConfig:
    config = build_comparison_config("chat", status(phase, control=control), INTERVAL)
    assert config is not None
    return config


def sample(drafts: float, accepted: float, requests: float) -> Sample:
    histogram = Histogram((0.1, math.inf), (requests, requests), 0.01 * requests)
    counters = Counters(
        generation_tokens=drafts + accepted + requests,
        prompt_tokens=0.0,
        computed_prompt_tokens=0.0,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
        preemptions=0.0,
        finished={"stop": requests},
        request_steps=drafts,
        step_seconds=drafts / 100,
        iterations=0.0,
        queued_requests=0.0,
        queue_seconds=0.0,
        time_to_first_token=histogram,
        time_per_output_token=histogram,
        speculation=SpeculationCounters(drafts, 3 * drafts, accepted, (accepted, 0.0, 0.0)),
    )
    return Sample(
        counters, Gauges(running_requests=2.0, waiting_requests=0.0, kv_cache_usage=None, kv_tokens=None), frozenset({"0"}), 7.0
    )


def test_no_comparison_before_the_analysis_and_after_its_end() -> None:
    assert build_comparison_config("chat", Status(), INTERVAL) is None
    for phase in ("Starting", "WarmingUp", "RollingBack"):
        assert build_comparison_config("chat", status(phase), INTERVAL) is None
    unreadable = status("Analyzing")
    assert unreadable.analysis is not None
    other_analysis = unreadable.analysis.model_copy(update={"state": "of another release"})
    assert build_comparison_config("chat", unreadable.model_copy(update={"analysis": other_analysis}), INTERVAL) is None


def test_canary_is_compared_with_control_and_later_with_stable_pods() -> None:
    assert build_config().arms == {"chat-new": "canary", "chat-old-control": "control", "chat-old": "stable"}
    assert build_config(control=False).arms == {"chat-new": "canary", "chat-old": "control"}
    assert build_config("Ramping").arms == {"chat-new": "canary", "chat-old": "control"}


def test_promoted_pods_are_compared_with_previous_pods_in_verifying() -> None:
    analysis_run = start_analysis(
        AnalysisSpec(), (Arm(revision="new"), Arm(revision="old")), (1, 1), None, 0, None, NOW
    ).reset_guard(NOW)
    promoted = status("Promoting", evidence=analysis_run).model_copy(update={"stable": Arm(revision="new"), "canary": None})

    def arms(phase: str) -> dict[str, str]:
        previous = {"revision": "old", "phase": phase, "phaseStartTime": NOW, "change": "drafter", "startTime": NOW}
        monitored_status = promoted.model_copy(update={"previous": PreviousArm.model_validate(previous)})
        config = build_comparison_config("chat", monitored_status, INTERVAL)
        assert config is not None
        return dict(config.arms)

    assert arms("Monitoring") == {"chat-new": "canary"}
    assert arms("Verifying") == {"chat-new": "canary", "chat-old": "control"}
    assert build_comparison_config("chat", promoted, INTERVAL) is None


def test_restarted_evidence_is_another_comparison() -> None:
    first = start_analysis(AnalysisSpec(), (Arm(revision="new"), Arm(revision="old")), (1, 1), None, 0, None, NOW)
    restarted = first.reset_guard(datetime(2026, 11, 1, 1, tzinfo=UTC))
    assert build_comparison_config("chat", status("Held", evidence=first), INTERVAL) != build_comparison_config(
        "chat", status("Held", evidence=restarted), INTERVAL
    )
    assert build_config() == build_config("Held")


def test_block_has_the_counts_of_the_pods_of_both_arms() -> None:
    comparison = BlockCollector(build_config())
    closed = 0
    for n in range(18):
        now = T0 + INTERVAL * n
        assert comparison.is_due(now)
        pods = [
            ("a", "chat-new", now - 1, sample(300.0 * n, 600.0 * n, 5.0 * n)),
            ("b", "chat-old-control", now - 9, sample(300.0 * n, 450.0 * n, 5.0 * n)),
            ("c", "chat-old", now - 3, sample(900.0 * n, 0.0, 5.0 * n)),
        ]
        closed += comparison.collect(now, pods)
        assert not comparison.is_due(now + INTERVAL / 2)
    assert closed == len(comparison.blocks) == 2
    first, second = comparison.blocks
    assert (first.start_time, first.end_time, second.start_time) == (T0, T0 + 120, T0 + 120)
    assert first.canary is not None
    assert first.control is not None
    assert (first.canary.counts.drafts, first.canary.counts.accepted_tokens) == (2400, 4800)
    assert (first.control.counts.drafts, first.control.counts.accepted_tokens) == (2400, 3600)
    assert (first.canary.mean_load, first.excluded_pods) == (2.0, {})


def test_missing_samples_are_not_counted_again() -> None:
    comparison = BlockCollector(build_config())
    for n in range(40):
        now = T0 + INTERVAL * n
        last_sample_time = min(now, T0 + 5 * INTERVAL)
        m = min(n, 5)
        pods = [
            ("a", "chat-new", last_sample_time - 1, sample(300.0 * m, 600.0 * m, 5.0 * m)),
            ("b", "chat-old-control", now - 1, sample(300.0 * n, 450.0 * n, 5.0 * n)),
        ]
        comparison.collect(now, pods)
    assert comparison.blocks
    assert [block.canary for block in comparison.blocks] == [None] * len(comparison.blocks)
    assert all(sum(block.excluded_pods.values()) == 1 for block in comparison.blocks)


def test_late_rounds_are_not_repeated() -> None:
    comparison = BlockCollector(build_config())
    comparison.collect(T0, [])
    comparison.collect(T0 + 500, [])
    assert not comparison.is_due(T0 + 505)
    assert comparison.is_due(T0 + 516)
