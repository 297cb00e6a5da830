"""Batches of a promotion, and which pods count as failed or late."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from aerie.api.status import DrafterLocation
from aerie.engine.drafter_endpoint.calls import DrafterFiles, DrafterSource, LoadDrafter, PrepareDrafter
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import ChangeInProgress, DrafterLease, PreparedDrafter, Problem
from aerie.rollout.facts.drafters import CallResult
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.promotion import PromotionProgress, check_promotion
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of, drafter_files, folder_of

BEGAN = reports.START + timedelta(seconds=1)
LOAD = LoadDrafter(DrafterFiles(drafter_files("better"), folder_of("better")), None, digest_of("eagle3"))
DEADLINE = timedelta(minutes=30)


COMMIT = "0123456789" * 4
HUB_SOURCE = DrafterSource(repository="owner/better", revision=COMMIT)
HUB_CANDIDATE = reports.CANDIDATE.model_copy(update={"location": DrafterLocation(repository="owner/better", commit=COMMIT)})


def check(pods: list[EnginePod], seconds: float = 10.0) -> PromotionProgress:
    return check_promotion(pods, reports.CANDIDATE, BEGAN, DEADLINE, BEGAN + timedelta(seconds=seconds))


def waiting(name: str, **observation: Any) -> EnginePod:
    return reports.pod(name, reports.state(), **observation)


def failed(name: str, status: int | None, attempts: int = 1, ended_at: datetime = BEGAN) -> EnginePod:
    result = CallResult(LOAD, EndpointProblem("WrongShape", "it has another shape.", status), ended_at, attempts)
    return waiting(name, result=result)


@pytest.mark.parametrize(("pod_count", "batch"), [(1, 1), (10, 10), (40, 10), (200, 20), (1000, 100)])
def test_batch(pod_count: int, batch: int) -> None:
    pods = [waiting(f"{number:04}") for number in range(pod_count)]
    progress = check(pods)
    assert progress.calls == {f"{number:04}": LOAD for number in range(batch)}
    assert not progress.is_complete


@pytest.mark.parametrize(
    ("placed_seconds", "is_failure"), [(None, False), (5.0, False), (-60.0, True)], ids=["no node", "node since", "node before"]
)
def test_pod_that_waited_for_its_node_has_not_failed(placed_seconds: float | None, is_failure: bool) -> None:
    """It was created before the promotion, and its kubelet reports it as not ready after."""
    pod = reports.pod("a")
    conditions = [{"type": "PodScheduled", "status": "False"}]
    if placed_seconds is not None:
        placed, reported = ((BEGAN + timedelta(seconds=seconds)).isoformat() for seconds in (placed_seconds, 7.0))
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": placed},
            {"type": "Ready", "status": "False", "lastTransitionTime": reported},
        ]
    metadata = pod.document["metadata"] | {"creationTimestamp": (BEGAN - timedelta(hours=1)).isoformat()}
    pod = replace(pod, document={**pod.document, "metadata": metadata, "status": {"phase": "Pending", "conditions": conditions}})
    assert bool(check([pod]).failures) == is_failure


def test_pod_with_the_drafter_on_trial_makes_it_its_own() -> None:
    lease = DrafterLease(digest_of("better"), 50.0)
    progress = check([reports.pod("a", reports.state(loaded="better", lease=lease))])
    assert progress.calls == {"a": replace(LOAD, expected_digest=digest_of("better"))}


BEGAN = reports.START + timedelta(seconds=1)
CHANGING, PREPARING = ChangeInProgress("Staging", 1.0), PreparedDrafter(HUB_SOURCE, "Running", 1.0, None, "", None, None)


@pytest.mark.parametrize(
    "pod",
    [
        reports.pod("a", reports.state(change=CHANGING), state_read_at=BEGAN + timedelta(seconds=1)),
        reports.pod("a", reports.state(prepared=PREPARING), state_read_at=BEGAN + timedelta(seconds=1)),
        waiting("a", call=LOAD, call_started_at=BEGAN),
    ],
)
def test_pod_that_is_slow_keeps_no_place_in_the_batch(pod: EnginePod) -> None:
    """A change, a preparation and a call that lasts, none of which ends."""
    slow, others = [replace(pod, name=f"a{number}") for number in range(10)], [waiting(f"c{number}") for number in range(20)]

    def check_at(seconds: float) -> PromotionProgress:
        return check_promotion([*slow, *others], HUB_CANDIDATE, BEGAN, DEADLINE, BEGAN + timedelta(seconds=seconds))

    before = check_at(29.0)
    assert before.next_slow_at == BEGAN + timedelta(seconds=30)
    assert sum(name.startswith("c") for name in before.calls) == 0
    after = check_at(30.0)
    assert sum(name.startswith("c") for name in after.calls) == 10
    assert after.next_slow_at == BEGAN + timedelta(seconds=60)


def test_hanging_pods_keep_no_place_in_the_batch() -> None:
    hanging = [waiting(f"b{number}", failed_reads=1) for number in range(10)]
    progress = check([*hanging, *(waiting(f"c{number}") for number in range(20))])
    assert sum(name.startswith("c") for name in progress.calls) == 10


def test_thousand_pods_fetch_from_the_hub_within_the_deadline() -> None:
    """Each fetches for four minutes, whatever others do."""
    begun: dict[str, datetime] = {}
    changed: set[str] = set()
    now = BEGAN

    def report(name: str) -> EnginePod:
        seconds = (now - begun.get(name, now)).total_seconds()
        preparation = PreparedDrafter(HUB_SOURCE, "Running", seconds, None, "", None, None) if name in begun else None
        prepared = reports.prepared(source=HUB_SOURCE) if seconds >= 240 else preparation
        return reports.pod(name, reports.state("better" if name in changed else "eagle3", prepared=prepared), state_read_at=now)

    while True:
        pods = [report(f"{number:04}") for number in range(1000)]
        progress = check_promotion(pods, HUB_CANDIDATE, BEGAN, DEADLINE, now)
        if progress.is_complete or progress.is_due:
            break
        for name, call in progress.calls.items():
            if isinstance(call, PrepareDrafter):
                begun[name] = now
            else:
                changed.add(name)
        now += timedelta(seconds=10)
    assert progress.is_complete
    assert now - BEGAN < timedelta(minutes=12)


@pytest.mark.parametrize(("status", "attempts", "counts"), [(422, 1, True), (409, 2, False), (409, 3, True), (None, 2, False)])
def test_failed_loads(status: int | None, attempts: int, counts: bool) -> None:
    progress = check([failed("a", status, attempts)])
    assert progress.has_failed is counts
    assert progress.calls == {"a": LOAD}


def test_rejection_of_an_earlier_attempt_does_not_count() -> None:
    progress = check([failed("a", 422, ended_at=reports.START)])
    assert (progress.has_failed, progress.waiting, progress.calls) == (False, ("a",), {"a": LOAD})


@pytest.mark.parametrize(("age", "counts"), [(timedelta(days=1), False), (timedelta(0), True)])
def test_failed_preparation_counts_from_the_start_of_the_promotion(age: timedelta, counts: bool) -> None:
    preparation = PreparedDrafter(HUB_SOURCE, "Failed", 1.0, None, "", None, Problem("NoSpace", "the disk is full."))
    result = CallResult(PrepareDrafter(HUB_SOURCE), ChangeDurations(0, 0, 0), BEGAN - age, 1)
    pod = reports.pod("a", reports.state(prepared=preparation), result=result)
    progress = check_promotion([pod], HUB_CANDIDATE, BEGAN, DEADLINE, BEGAN)
    assert progress.has_failed is counts
    assert progress.calls == ({} if counts else {"a": PrepareDrafter(HUB_SOURCE)})


def test_few_failures_are_tolerated() -> None:
    done = [reports.pod(f"c{number}", reports.state(own="better")) for number in range(39)]
    assert check([failed("a", 422), *done]).is_complete
    assert check([failed("a", 422), failed("b", 422), *done]).is_complete
    assert check([*(failed(name, 422) for name in "abd"), *done]).has_failed


def test_pods_that_are_late_end_the_wait() -> None:
    done = [reports.pod(f"c{number}", reports.state(own="better")) for number in range(39)]
    late = waiting("a", failed_reads=5)
    assert not check([late, *done]).is_complete
    assert not check([late, *done], seconds=1799).is_over
    assert check([late, *done], seconds=1800).is_over
    assert check([late], seconds=1800).has_failed


def tried(name: str, **observation: Any) -> EnginePod:
    result = CallResult(LOAD, EndpointProblem("Busy", "another change is in progress.", 409), BEGAN, 1)
    return waiting(name, result=result, **observation)


@pytest.mark.parametrize(
    ("pod", "is_late"),
    [
        (tried("a"), True),
        (waiting("a", failed_reads=1), True),
        (reports.pod("a", failed_reads=1), True),
        (reports.pod("a"), False),  # it has not been read yet
        (waiting("a"), False),  # it has not been called yet
        (failed("a", 409, ended_at=reports.START), False),  # nor since the promotion began
        (waiting("a", result=CallResult(PrepareDrafter(HUB_SOURCE), ChangeDurations(0, 0, 0), BEGAN, 1)), False),
        (reports.pod("a", replace(reports.state(), loaded=None)), True),  # it cannot be called
    ],
)
def test_operator_that_was_away_tries_pods_before_they_are_late(pod: EnginePod, is_late: bool) -> None:
    assert check([pod], seconds=1800).has_failed is is_late
    assert check([pod], seconds=3600).has_failed


def test_pod_that_is_no_longer_ready_has_failed_and_a_new_one_has_not() -> None:
    unready = reports.pod("a", ready=False)
    condition = {"type": "Ready", "status": "False", "lastTransitionTime": (reports.START + timedelta(seconds=5)).isoformat()}
    since = {**unready.document, "status": {"phase": "Running", "conditions": [condition]}}
    assert check([EnginePod("a", since, unready.observation)]).has_failed
    created = (reports.START + timedelta(seconds=4)).isoformat()
    young = {**since, "metadata": {**since["metadata"], "creationTimestamp": created}}
    assert check([EnginePod("a", young, unready.observation)]).is_complete


def test_unfit_pod_has_failed() -> None:
    unfit = reports.state(unfit=Problem("Pipeline", "pipeline stages."))
    assert "pipeline stages" in check([reports.pod("a", unfit)]).failures[0]


def test_pod_fetches_from_the_hub_before_it_loads() -> None:
    pods = [
        reports.pod("a", reports.state()),
        reports.pod("b", reports.state(prepared=reports.prepared(source=HUB_SOURCE))),
        reports.pod("c", reports.state(prepared=reports.prepared("worse", HUB_SOURCE))),
    ]
    progress = check_promotion(pods, HUB_CANDIDATE, reports.START, DEADLINE, reports.START)
    assert progress.calls["a"] == PrepareDrafter(HUB_SOURCE)
    assert progress.calls["b"] == LOAD
    assert progress.failures == ("pod c has other files of the drafter",)
