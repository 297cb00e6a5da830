"""The call by which a pod comes to the drafter that it should serve with."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import DrafterLocation, InPlaceDrafter
from aerie.engine.drafter_endpoint.calls import DrafterFiles, DrafterSource, LoadDrafter, PrepareDrafter, ReturnToOwn
from aerie.engine.drafter_endpoint.response import ChangeDurations
from aerie.engine.drafter_endpoint.state import ChangeInProgress, DrafterLease, Problem
from aerie.rollout.facts.drafters import CallResult
from aerie.rollout.in_place.return_pods import (
    PREPARATION_RETRY_DELAY,
    find_unreturned_pods,
    plan_return,
    plan_returns,
)
from tests.unit.rollout.in_place import reports
from tests.unit.rollout.in_place.fleet import digest_of, drafter_files, folder_of

LEASE = DrafterLease(digest_of("better"), 30.0)
LOAD_STABLE = LoadDrafter(DrafterFiles(drafter_files("eagle3"), folder_of("eagle3")), None, digest_of("better"))


@pytest.mark.parametrize(
    ("pod", "served", "call"),
    [
        (reports.pod(report=None), reports.STABLE, None),
        (reports.pod(report=reports.state()), reports.STABLE, None),
        (reports.pod(report=reports.state()), None, None),
        (reports.pod(report=reports.state(loaded="better", lease=LEASE)), None, ReturnToOwn()),
        (reports.pod(report=reports.state(loaded="better", lease=LEASE)), reports.STABLE, ReturnToOwn()),
        (reports.pod(report=reports.state(change=ChangeInProgress("Staging", 3.0))), None, ReturnToOwn()),
        (reports.pod(report=reports.state(), call=replace(LOAD_STABLE, lease_seconds=60.0)), None, ReturnToOwn()),
        (reports.pod(report=reports.state(own="better")), reports.STABLE, LOAD_STABLE),
        (reports.pod(report=reports.state(own="better"), ready=False), reports.STABLE, None),
        (reports.pod(report=reports.state(own="better")), None, None),
        (reports.pod(report=reports.state(own="worse", loaded="better", lease=LEASE)), reports.STABLE, LOAD_STABLE),
    ],
)
def test_return(pod: Any, served: InPlaceDrafter | None, call: object) -> None:
    assert plan_return(pod, served, reports.START) == call
    assert plan_returns([pod], served, reports.START)[0][0].call == call


def test_broken_pod_gets_no_call() -> None:
    state = replace(reports.state(own="better"), loaded=None, problem=Problem("Broken", "it is broken"))
    assert plan_return(reports.pod(report=state), reports.STABLE, reports.START) is None


def test_preparation_that_failed_is_repeated_after_a_while() -> None:
    commit = "0123456789" * 4
    source = DrafterSource(repository="owner/x", revision=commit)
    served = reports.STABLE.model_copy(update={"location": DrafterLocation(repository="owner/x", commit=commit)})
    failed = replace(reports.prepared(source=source), phase="Failed", drafter=None, problem=Problem("NoAccess", "no access"))
    result = CallResult(PrepareDrafter(source), ChangeDurations(0, 0, 0), reports.START, 1)
    pod = reports.pod(report=reports.state(own="better", prepared=failed), result=result)
    plans, delay = plan_returns([pod], served, reports.START + timedelta(seconds=10))
    assert (plans[0].call, delay) == (None, PREPARATION_RETRY_DELAY)
    assert plan_return(pod, served, reports.START + PREPARATION_RETRY_DELAY) == PrepareDrafter(source)


def test_pods_that_a_rollback_waits_for() -> None:
    pods = [
        reports.pod("returned", reports.state()),
        reports.pod("unread", None),
        reports.pod("on-trial", reports.state(loaded="better", lease=LEASE)),
        reports.pod("promoted", reports.state(own="better")),
        reports.pod("not-ready", None, ready=False),
    ]
    assert [pod.name for pod in find_unreturned_pods(pods, reports.STABLE)] == ["unread", "on-trial", "promoted"]
    assert [pod.name for pod in find_unreturned_pods(pods, None)] == ["unread", "on-trial"]
