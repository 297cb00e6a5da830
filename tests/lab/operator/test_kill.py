"""The operator is killed at every write that it makes in a rollout, and another one finishes the work.

    undisturbed    a first revision, and its change by a canary that a person has promoted, through a door that writes down every
                   call
    cut short      for every write of these, in a namespace of its own: an operator that is killed after the write has had its
                   effect and before the operator hears of it; and once before anything is written
    finished       one operator more, for all of these namespaces

A kill before a write, or at a read, is the kill after the write before it: nothing has been changed in between.

In each of them everything has to be as it is where nothing happened, but for names and times: objects and pods, no more and no
fewer, the resource's status and its history. Calls are told apart by verb, object and count, so that a lease renewed in between
shifts none; a rollout that makes a call less often than the first one did is let run to its end, and compared too.

Every kill is a real SIGKILL of a real process. The pods run nothing and the preflight Job ends well at once: what is looked at
is the order of the operator's calls.
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

Light = Callable[..., dict[str, Any]]
State = dict[str, Any]
States = Callable[..., dict[str, State]]
Settled = Callable[..., State]
OLD, NEW = "eagle3", "eagle31"
STAGES = ("create", "change")
ASIDE = ("events", "leases")
TOGETHER = 4
"""Operators at a time: their rollouts mostly wait for the cluster."""
NEVER_MET = 8.0
"""Seconds after the end of a rollout in which a call that it has not made yet may still come."""


@dataclass(frozen=True)
class Point:
    """A call of a rollout, and on which side of it the operator is killed."""

    stage: str
    verb: str
    resource: str
    name: str
    count: int
    side: Literal["before", "after"]

    def __str__(self) -> str:
        return f"{self.stage}: {self.side} {self.verb} {self.resource} {self.name} #{self.count}"


def subject(call: ApiCall) -> tuple[str, str, str]:
    """What tells the writes of a rollout apart, in whatever namespace it is. One lease is like the other."""
    return call.verb, call.resource, call.name if call.resource not in ASIDE else ""


@dataclass
class Recorder:
    """A door that writes down what is called."""

    calls: list[ApiCall] = field(default_factory=list)

    async def __call__(self, call: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
        self.calls.append(call)
        return await pass_on()

    def points(self, stage: str) -> Iterator[Point]:
        """Where to kill: after each write, and before the first one. Events and leases change nothing that a rollout goes by."""
        counts = collections.Counter(subject(call) for call in self.calls if call.is_write)
        yield Point(stage, *next(one for one in counts if one[1] not in ASIDE), 1, "before")
        for (verb, resource, name), count in counts.items():
            aside = resource in ASIDE
            if aside and stage == STAGES[0]:
                continue
            for number in range(1, 2 if aside else count + 1):
                yield Point(stage, verb, resource, name, number, "after")


@dataclass
class Trap:
    """A door at which the operator is killed."""

    point: Point
    operator: Any = None
    met: bool = False
    count: int = 0

    async def __call__(self, call: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
        while self.operator is None:
            await asyncio.sleep(0.005)
        if self.met:
            return build_error_response(503, "ServiceUnavailable", "whoever asks is dead")
        if subject(call) != (self.point.verb, self.point.resource, self.point.name):
            return await pass_on()
        self.count += 1
        if self.count < self.point.count:
            return await pass_on()
        self.met = True
        if self.point.side == "before":
            self.operator.kill()
            return build_error_response(503, "ServiceUnavailable", "whoever asks is dead")
        answer = await pass_on()
        self.operator.kill()
        return answer


def difference(state: State, wanted: State) -> str:
    """What is other than it should be."""
    keys = sorted(key for key in {*state, *wanted} if state.get(key) != wanted.get(key))
    return "\n".join(f"{key}:\n  is        {state.get(key)}\n  should be {wanted.get(key)}" for key in keys)


def alike(states: States, wanted: dict[str, State], what: str, names: dict[str, str] | None = None, within: float = 300) -> None:
    """Waits until these namespaces are as wanted."""

    def look() -> bool:
        found = states()
        told = {name: difference(found[name], state) for name, state in wanted.items() if found[name] != state}
        if told:
            name, text = next(iter(told.items()))
            raise LabError(f"{len(told)} are not, such as {(names or {}).get(name, name)}\n{text}")
        return True

    wait_until(look, what, timeout_seconds=within, interval_seconds=2.0)


class Namespaces:
    """As many as are asked for, and gone at the end."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.names = lab, []  # type: tuple[Lab, list[str]]
        self._mark = os.urandom(2).hex()

    def make(self, count: int) -> list[str]:
        made = [f"kill-{self._mark}-{len(self.names) + number}" for number in range(count)]
        self.names += made
        self.lab.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in made))
        wait_until(lambda: set(made) <= self._with_accounts(), "the namespaces have their service accounts", timeout_seconds=120)
        return made

    async def delete(self) -> None:
        """All of them, with what is in them."""
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
    found = Namespaces(lab)
    yield found
    asyncio.run(found.delete())


@pytest.mark.timeout(900)
def test_a_kill_at_any_call_changes_nothing(
    nursery: Any, proxy: ApiServerProxy, namespaces: Namespaces, light: Light, states: States, settled: Settled, tmp_path: Path
) -> None:
    (plain,) = namespaces.make(1)
    wanted: dict[str, State] = {}
    points: list[Point] = []
    for stage, drafter in zip(STAGES, (OLD, NEW), strict=True):
        namespaces.apply([plain], light(drafter, replicas=1))
        recorder = Recorder()
        kubeconfig = proxy.open_endpoint(recorder).write_kubeconfig(tmp_path / stage)
        with nursery.keep(plain, lease=stage, kubeconfig=kubeconfig):
            settled(plain, drafter, replicas=1)
        wanted[stage] = states()[plain]
        points += recorder.points(stage)
    controls = {point.verb for point in points if point.resource == "deployments" and point.name.endswith("-control")}
    assert controls == {"patch", "delete"}, "the change is made by a canary with control"
    (last, _) = wanted["change"]["speculativedeployments chat"]["status"]["rolloutHistory"]
    assert (last["result"], last["message"]) == ("Promoted", MANUAL_PROMOTION_MESSAGE)

    cases = dict(zip(namespaces.make(len(points)), points, strict=True))
    changed = [name for name, point in cases.items() if point.stage == "change"]
    namespaces.apply(changed, light(OLD, replicas=1))
    with nursery.keep(plain, everywhere=True, lease="before"):
        alike(states, dict.fromkeys(changed, wanted["create"]), "all serve the old drafter")
    namespaces.apply(changed, light(NEW, replicas=1))
    namespaces.apply([name for name in cases if name not in changed], light(OLD, replicas=1))

    def cut_short(name: str, point: Point) -> bool:
        trap = Trap(point)
        kubeconfig = proxy.open_endpoint(trap).write_kubeconfig(tmp_path / name)
        over: float | None = None
        looks = itertools.count()

        def look() -> bool:
            nonlocal over
            if trap.met:
                return True
            if trap.operator is None or not trap.operator.alive():  # it may lose its lease where everything is slow
                trap.operator = nursery.start(name, kubeconfig=kubeconfig)
            if over is None and next(looks) % 20 == 19 and states(name)[name] == wanted[point.stage]:
                over = time.monotonic()
            return over is not None and time.monotonic() > over + NEVER_MET

        wait_until(look, f"the operator is killed, or the rollout is over: {point}", timeout_seconds=240)
        trap.operator.kill()
        return trap.met

    with ThreadPoolExecutor(TOGETHER) as pool:
        met = dict(zip(points, pool.map(cut_short, cases, points), strict=True))
    firsts = [point for point in points if point.count == 1]
    assert [str(point) for point in firsts if not met[point]] == []

    ends = {name: wanted[point.stage] for name, point in cases.items()}
    what = {name: str(point) for name, point in cases.items()}
    with nursery.keep(plain, everywhere=True, lease="after"):
        alike(states, ends, "the end state is the same everywhere", what)
    alike(states, ends, "it has come to rest", what, within=30)
