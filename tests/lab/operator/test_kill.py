"""The operator is killed at every write of a rollout, and another one completes the rollout.

    reference      a first revision, and its change by a manually promoted canary, through an endpoint that records every call
    interrupted    for each of these writes, in a namespace of its own: an operator that is killed after the write has had its
                   effect and before the operator gets the response; and once before the first write
    completed      one more operator, for all of these namespaces

A kill before a write, or at a read, equals the kill after the previous write: nothing has changed in between.

In each namespace the end state has to equal the reference, except for names and times: objects and pods, no more and no fewer,
the resource's status and its history. Calls are distinguished by verb, object and count, so that a lease renewal in between
shifts none; a rollout that makes a call less often than the reference runs to its end, and is compared, too.

Every kill is a real SIGKILL of a real process. The pods run nothing and the preflight Job passes immediately: the subject is the
order of the operator's calls.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web

from aerie.rollout.canary.state_machine import MANUAL_PROMOTION_MESSAGE
from aerie_lab.cluster import Lab
from aerie_lab.errors import LabError
from aerie_lab.kube.client import core_path, resource_path
from aerie_lab.testing import wait_until
from aerie_lab.testing.proxy import ApiCall, ApiServerProxy, ForwardCall, build_error_response

ResourceFactory = Callable[..., dict[str, Any]]
State = dict[str, Any]
States = Callable[..., dict[str, State]]
WaitUntilSettled = Callable[..., State]
OLD, NEW = "eagle3", "eagle31"
STEPS = ("create", "change")
SIDE_RESOURCES = ("events", "leases")
PARALLEL_OPERATORS = 4
"""Number of simultaneous operators: their rollouts mostly wait for the cluster."""
EXTRA_WAIT_SECONDS = 8.0
"""Time after the end of a rollout in which a missing call may still come."""


@dataclass(frozen=True)
class CallPoint:
    """A call of a rollout before or after which the operator is killed."""

    step: str
    verb: str
    resource: str
    name: str
    count: int
    side: Literal["before", "after"]

    def __str__(self) -> str:
        return f"{self.step}: {self.side} {self.verb} {self.resource} {self.name} #{self.count}"


def call_key(call: ApiCall) -> tuple[str, str, str]:
    """Return a key that identifies a rollout's write in every namespace. All leases have the same key."""
    return call.verb, call.resource, call.name if call.resource not in SIDE_RESOURCES else ""


@dataclass
class CallRecorder:
    """An endpoint that records the calls."""

    calls: list[ApiCall] = field(default_factory=list)

    async def __call__(self, call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        self.calls.append(call)
        return await forward()

    def points(self, step: str) -> Iterator[CallPoint]:
        """Yield the points of kills: after each write, and before the first one. Events and leases do not affect a rollout."""
        counts = collections.Counter(call_key(call) for call in self.calls if call.is_write)
        yield CallPoint(step, *next(key for key in counts if key[1] not in SIDE_RESOURCES), 1, "before")
        for (verb, resource, name), count in counts.items():
            is_side_resource = resource in SIDE_RESOURCES
            if is_side_resource and step == STEPS[0]:
                continue
            for number in range(1, 2 if is_side_resource else count + 1):
                yield CallPoint(step, verb, resource, name, number, "after")


@dataclass
class KillPoint:
    """An endpoint that kills the operator at a call."""

    point: CallPoint
    operator: Any = None
    is_reached: bool = False
    count: int = 0

    async def __call__(self, call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        while self.operator is None:
            await asyncio.sleep(0.005)
        if self.is_reached:
            return build_error_response(503, "ServiceUnavailable", "the caller is dead")
        if call_key(call) != (self.point.verb, self.point.resource, self.point.name):
            return await forward()
        self.count += 1
        if self.count < self.point.count:
            return await forward()
        self.is_reached = True
        if self.point.side == "before":
            self.operator.kill()
            return build_error_response(503, "ServiceUnavailable", "the caller is dead")
        answer = await forward()
        self.operator.kill()
        return answer


def difference(state: State, expected: State) -> str:
    """Return the differences, as text."""
    keys = sorted(key for key in {*state, *expected} if state.get(key) != expected.get(key))
    return "\n".join(f"{key}:\n  is        {state.get(key)}\n  should be {expected.get(key)}" for key in keys)


def wait_until_equal(
    states: States, expected: dict[str, State], description: str, names: dict[str, str] | None = None, timeout: float = 300
) -> None:
    """Wait until the namespaces have the expected state."""

    def all_equal() -> bool:
        found_states = states()
        differences = {
            name: difference(found_states[name], state) for name, state in expected.items() if found_states[name] != state
        }
        if differences:
            name, text = next(iter(differences.items()))
            raise LabError(f"{len(differences)} are not, such as {(names or {}).get(name, name)}\n{text}")
        return True

    wait_until(all_equal, description, timeout_seconds=timeout, interval_seconds=2.0)


class Namespaces:
    """Creates namespaces, and deletes them at the end."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.names = lab, []  # type: tuple[Lab, list[str]]
        self._mark = os.urandom(2).hex()

    def make(self, count: int) -> list[str]:
        names = [f"kill-{self._mark}-{len(self.names) + number}" for number in range(count)]
        self.names += names
        self.lab.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names))
        wait_until(lambda: set(names) <= self._with_accounts(), "the namespaces have their service accounts", timeout_seconds=120)
        return names

    async def delete(self) -> None:
        """Delete all of them, with their objects."""
        async with self.lab.client() as client:
            for name in self.names:
                await client.delete(resource_path("aerie.dev/v1alpha1", "speculativedeployments", name, "chat"))
            for name in self.names:
                await client.delete(core_path("namespaces", None, name))

    def _with_accounts(self) -> set[str]:
        column = "jsonpath={.items[*].metadata.namespace}"
        return set(self.lab.kubectl("get", "serviceaccounts", "-A", "-o", column).split())

    def apply(self, names: Iterable[str], document: dict[str, Any]) -> None:
        self.lab.apply(*({**document, "metadata": {**document["metadata"], "namespace": name}} for name in names))


@pytest.fixture
def namespaces(lab: Lab) -> Iterator[Namespaces]:
    namespaces = Namespaces(lab)
    yield namespaces
    asyncio.run(namespaces.delete())


@pytest.mark.timeout(900)
def test_kill_at_any_call_does_not_change_the_end_state(
    launcher: Any,
    proxy: ApiServerProxy,
    namespaces: Namespaces,
    processless_resource: ResourceFactory,
    states: States,
    wait_until_settled: WaitUntilSettled,
    tmp_path: Path,
) -> None:
    (reference,) = namespaces.make(1)
    expected: dict[str, State] = {}
    points: list[CallPoint] = []
    for step, drafter in zip(STEPS, (OLD, NEW), strict=True):
        namespaces.apply([reference], processless_resource(drafter, replicas=1))
        recorder = CallRecorder()
        kubeconfig = proxy.open_endpoint(recorder).write_kubeconfig(tmp_path / step)
        with launcher.keep_running(reference, lease=step, kubeconfig=kubeconfig):
            wait_until_settled(reference, drafter, replicas=1)
        expected[step] = states()[reference]
        points += recorder.points(step)
    controls = {point.verb for point in points if point.resource == "deployments" and point.name.endswith("-control")}
    assert controls == {"patch", "delete"}, "the change is made by a canary with control"
    (last, _) = expected["change"]["speculativedeployments chat"]["status"]["rolloutHistory"]
    assert (last["result"], last["message"]) == ("Promoted", MANUAL_PROMOTION_MESSAGE)

    cases = dict(zip(namespaces.make(len(points)), points, strict=True))
    changed = [name for name, point in cases.items() if point.step == "change"]
    namespaces.apply(changed, processless_resource(OLD, replicas=1))
    with launcher.keep_running(reference, everywhere=True, lease="before"):
        wait_until_equal(states, dict.fromkeys(changed, expected["create"]), "all serve the old drafter")
    namespaces.apply(changed, processless_resource(NEW, replicas=1))
    namespaces.apply([name for name in cases if name not in changed], processless_resource(OLD, replicas=1))

    def cut_short(name: str, point: CallPoint) -> bool:
        kill_point = KillPoint(point)
        kubeconfig = proxy.open_endpoint(kill_point).write_kubeconfig(tmp_path / name)
        completed_at: float | None = None
        checks = itertools.count()

        def is_finished() -> bool:
            nonlocal completed_at
            if kill_point.is_reached:
                return True
            if kill_point.operator is None or not kill_point.operator.alive():  # it may lose its lease on a slow machine
                kill_point.operator = launcher.start(name, kubeconfig=kubeconfig)
            if completed_at is None and next(checks) % 20 == 19 and states(name)[name] == expected[point.step]:
                completed_at = time.monotonic()
            return completed_at is not None and time.monotonic() > completed_at + EXTRA_WAIT_SECONDS

        wait_until(is_finished, f"the operator is killed, or the rollout is over: {point}", timeout_seconds=240)
        kill_point.operator.kill()
        return kill_point.is_reached

    with ThreadPoolExecutor(PARALLEL_OPERATORS) as pool:
        reached = dict(zip(points, pool.map(cut_short, cases, points), strict=True))
    first_calls = [point for point in points if point.count == 1]
    assert [str(point) for point in first_calls if not reached[point]] == []

    expected_by_namespace = {name: expected[point.step] for name, point in cases.items()}
    descriptions = {name: str(point) for name, point in cases.items()}
    with launcher.keep_running(reference, everywhere=True, lease="after"):
        wait_until_equal(states, expected_by_namespace, "the end state is the same everywhere", descriptions)
    wait_until_equal(states, expected_by_namespace, "it has come to rest", descriptions, timeout=30)
