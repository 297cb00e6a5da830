"""Blocks from rounds over the pods of an analysis: who is in which arm, what is new, and when a comparison is another one."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from aerie.api.rollout import Analysis
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm, Setting, Status
from aerie.controller.compare import Comparison, Subject, subject
from aerie.engine.histogram import Histogram
from aerie.engine.samples import Counters, Gauges, Sample, Speculation
from aerie.rollout.evidence import Evidence, begun

NOW = datetime(2026, 11, 1, tzinfo=UTC)
T0 = NOW.timestamp()
SETTING = Setting(mode="Static", tokens=3)
INTERVAL = 15.0


def status(phase: str, *, control: bool = True, evidence: Evidence | None = None) -> Status:
    stable, new = Arm(revision="old", setting=SETTING), Arm(revision="new", setting=SETTING)
    found = evidence or begun(Analysis(), (new, stable), (1, 1), None, 0, None, NOW)
    canary = CanaryArm.model_validate(
        {"revision": "new", "setting": SETTING, "change": "drafter", "phase": phase, "startedAt": NOW, "readyAt": NOW}
    )
    if control:
        canary = canary.model_copy(update={"control": Arm(revision="old")})
    return Status(
        stable=stable,
        canary=canary,
        analysis=AnalysisStatus(parameters=Analysis(), verdict="Continue", state=found.pack()),
    )


def compared(phase: str = "Analyzing", *, control: bool = True) -> Subject:
    found = subject("chat", status(phase, control=control), INTERVAL)
    assert found is not None
    return found


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
        speculation=Speculation(drafts, 3 * drafts, accepted, (accepted, 0.0, 0.0)),
    )
    return Sample(counters, Gauges(running=2.0, waiting=0.0, kv_cache_usage=None, kv_tokens=None), frozenset({"0"}), 7.0)


def test_nothing_is_compared_before_the_analysis_and_after_the_end() -> None:
    assert subject("chat", Status(), INTERVAL) is None
    for phase in ("Starting", "WarmingUp", "RollingBack"):
        assert subject("chat", status(phase), INTERVAL) is None
    unreadable = status("Analyzing")
    assert unreadable.analysis is not None
    other = unreadable.analysis.model_copy(update={"state": "of another release"})
    assert subject("chat", unreadable.model_copy(update={"analysis": other}), INTERVAL) is None


def test_the_canary_is_compared_with_its_control_and_later_with_the_stable_pods() -> None:
    assert compared().arms == {"chat-new": "canary", "chat-old-control": "control"}
    assert compared(control=False).arms == {"chat-new": "canary", "chat-old": "control"}
    assert compared("Ramping").arms == {"chat-new": "canary", "chat-old": "control"}


def test_after_a_promotion_the_stable_pods_are_followed_and_in_a_recheck_compared_with_those_before() -> None:
    found = begun(Analysis(), (Arm(revision="new"), Arm(revision="old")), (1, 1), None, 0, None, NOW).renewed(NOW)
    promoted = status("Promoting", evidence=found).model_copy(update={"stable": Arm(revision="new"), "canary": None})

    def arms(phase: str) -> dict[str, str]:
        previous = {"revision": "old", "phase": phase, "since": NOW, "change": "drafter", "startedAt": NOW}
        kept = promoted.model_copy(update={"previous": PreviousArm.model_validate(previous)})
        compared = subject("chat", kept, INTERVAL)
        assert compared is not None
        return dict(compared.arms)

    assert arms("Watching") == {"chat-new": "canary"}
    assert arms("Rechecking") == {"chat-new": "canary", "chat-old": "control"}
    assert subject("chat", promoted, INTERVAL) is None


def test_evidence_that_begins_anew_is_another_comparison_and_a_block_more_is_not() -> None:
    first = begun(Analysis(), (Arm(revision="new"), Arm(revision="old")), (1, 1), None, 0, None, NOW)
    again = first.renewed(datetime(2026, 11, 1, 1, tzinfo=UTC))
    assert subject("chat", status("Held", evidence=first), INTERVAL) != subject("chat", status("Held", evidence=again), INTERVAL)
    assert compared() == compared("Held")


def test_a_block_closes_from_what_the_pods_of_both_arms_counted() -> None:
    comparison = Comparison(compared())
    closed = 0
    for n in range(18):
        now = T0 + INTERVAL * n
        assert comparison.wants(now)
        pods = [
            ("a", "chat-new", now - 1, sample(300.0 * n, 600.0 * n, 5.0 * n)),
            ("b", "chat-old-control", now - 9, sample(300.0 * n, 450.0 * n, 5.0 * n)),
            ("c", "chat-old", now - 3, sample(900.0 * n, 0.0, 5.0 * n)),
        ]
        closed += comparison.round(now, pods)
        assert not comparison.wants(now + INTERVAL / 2)
    assert closed == len(comparison.blocks) == 2
    first, second = comparison.blocks
    assert (first.began, first.ended, second.began) == (T0, T0 + 120, T0 + 120)
    assert first.canary is not None
    assert first.control is not None
    assert (first.canary.counts.drafts, first.canary.counts.accepted) == (2400, 4800)
    assert (first.control.counts.drafts, first.control.counts.accepted) == (2400, 3600)
    assert (first.canary.load, first.dropped) == (2.0, {})


def test_a_page_that_does_not_come_any_more_is_not_counted_again() -> None:
    comparison = Comparison(compared())
    for n in range(40):
        now = T0 + INTERVAL * n
        stopped = min(now, T0 + 5 * INTERVAL)
        m = min(n, 5)
        pods = [
            ("a", "chat-new", stopped - 1, sample(300.0 * m, 600.0 * m, 5.0 * m)),
            ("b", "chat-old-control", now - 1, sample(300.0 * n, 450.0 * n, 5.0 * n)),
        ]
        comparison.round(now, pods)
    assert comparison.blocks
    assert [block.canary for block in comparison.blocks] == [None] * len(comparison.blocks)
    assert all(sum(block.dropped.values()) == 1 for block in comparison.blocks)


def test_rounds_that_were_late_are_not_made_up_for() -> None:
    comparison = Comparison(compared())
    comparison.round(T0, [])
    comparison.round(T0 + 500, [])
    assert not comparison.wants(T0 + 505)
    assert comparison.wants(T0 + 516)
