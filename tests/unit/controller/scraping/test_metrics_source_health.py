"""Failures of a metrics source are reported once they last, and when they change."""

from __future__ import annotations

from aerie.controller.scraping.prometheus import MIN_SOURCE_FAILURE_SECONDS, SourceHealth


def test_source_failure_is_reported_once_it_lasts_and_when_it_changes() -> None:
    health = SourceHealth()
    assert (health.message, health.record_success(), health.message) == (None, False, "")
    assert [
        health.record_failure("timeout", "slow", at) for at in (0, MIN_SOURCE_FAILURE_SECONDS, MIN_SOURCE_FAILURE_SECONDS + 1)
    ] == [False, False, True]
    assert health.message == "slow"
    assert [health.record_failure("timeout", "slower", MIN_SOURCE_FAILURE_SECONDS + n) for n in (2, 3, 4)] == [False] * 3
    assert [health.record_failure(reason, "401", MIN_SOURCE_FAILURE_SECONDS + 5) for reason in ("status", "timeout") * 5] == [
        False
    ] * 10  # alternating reasons
    assert [health.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 6) for _ in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert health.message == "401"
    assert health.record_success()
    assert health.message == ""
    assert not health.record_success()
    assert not health.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 7)


def test_failures_within_a_short_time_are_not_reported() -> None:
    health = SourceHealth()
    assert not any(health.record_failure("timeout", "slow", second) for second in range(int(MIN_SOURCE_FAILURE_SECONDS)))
    assert health.record_failure("timeout", "slow", MIN_SOURCE_FAILURE_SECONDS)
