"""Whatever is wrong with the API server, the clock or the user's timing, the rollout comes to the end that it should."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from aerie_lab.cluster import Lab
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace
from aerie_lab.testing.proxy import ApiCall, ApiServerProxy, ForwardCall, build_error_response

Light = Callable[..., dict[str, Any]]
State = dict[str, Any]
Settled = Callable[..., State]
OLD, NEW = "eagle3", "eagle31"
AWAY = 60.0
"""Seconds without an API server: longer than any lease and any call of the operator's."""


def status(namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = namespace.get("specdep", "chat").get("status") or {}
    return found


def results(state: State) -> list[str]:
    return [one["result"] for one in state["speculativedeployments chat"]["status"]["rolloutHistory"]]


def condition(found: dict[str, Any], kind: str) -> tuple[str, str]:
    return next(((one["status"], one["reason"]) for one in found.get("conditions") or [] if one["type"] == kind), ("", ""))


# ------------------------------------------------------------------------------------------------------- a hard API server
@pytest.fixture(scope="module")
def slow_rollout(
    lab: Lab, operators: Any, proxy: ApiServerProxy, light: Light, settled: Settled, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[State]]:
    """A rollout through a door at which every call takes two seconds longer. It mostly waits, so others run beside it."""

    async def slow(_: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
        await asyncio.sleep(2)
        return await pass_on()

    kubeconfig = proxy.open_endpoint(slow).write_kubeconfig(tmp_path_factory.mktemp("slow") / "kubeconfig")

    def roll_out(namespace: Namespace) -> State:
        with operators.keep(namespace.name, kubeconfig=kubeconfig):
            namespace.apply(light(OLD))
            settled(namespace.name, OLD)
            namespace.apply(light(NEW))
            return settled(namespace.name, NEW)

    with new_namespace(lab, "slow") as namespace, ThreadPoolExecutor(1) as pool:
        yield pool.submit(roll_out, namespace)


@pytest.mark.usefixtures("slow_rollout")
def test_every_write_conflicts_once(
    namespace: Namespace, nursery: Any, proxy: ApiServerProxy, light: Light, settled: Settled, tmp_path: Path
) -> None:
    refused: set[tuple[str, str, str]] = set()

    async def conflicting(call: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
        key = (call.verb, call.resource, call.name)
        if call.is_write and key not in refused:
            refused.add(key)
            return build_error_response(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        return await pass_on()

    kubeconfig = proxy.open_endpoint(conflicting).write_kubeconfig(tmp_path / "kubeconfig")
    with nursery.keep(namespace.name, kubeconfig=kubeconfig):
        namespace.apply(light(OLD))
        settled(namespace.name, OLD)
        refused.clear()
        namespace.apply(light(NEW))
        end = settled(namespace.name, NEW)
    assert results(end) == ["Promoted", "Promoted"]
    assert ("delete", "deployments") in {key[:2] for key in refused}


# --------------------------------------------------------------------------------------------------------- clocks and leaders
def test_the_clock_jumps_while_a_rollout_waits(
    namespace: Namespace, nursery: Any, light: Light, settled: Settled, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    gated = light(NEW, gates=["aerie.dev/test"])
    # An operator that has to be started anew goes by the clock as it then is, so it had better be right by then.
    with nursery.keep(namespace.name, clock=clock, first=lambda: clock.write_text("0")) as operator:
        namespace.apply(light(OLD))
        settled(namespace.name, OLD)
        namespace.apply(gated)
        wait_until(lambda: status(namespace)["phase"] == "Starting", "its canary is to start", timeout_seconds=120)
        for number, jump in enumerate((7200, -7200, 0)):
            changed = tmp_path / "changed"
            changed.write_text(str(jump))
            changed.replace(clock)  # in one step: it may be read at any moment
            gated["spec"]["replicas"] = 3 + number  # any change: its generation shows that there was a look since the jump
            namespace.apply(gated)
            wanted = namespace.get("specdep", "chat")["metadata"]["generation"]
            wait_until(functools.partial(seen, namespace, wanted), "it is looked at", timeout_seconds=120)
            assert status(namespace)["phase"] == "Starting"
        open_gates(namespace, 5)
        end = settled(namespace.name, NEW, replicas=5)
    assert results(end) == ["Promoted", "Promoted"]
    assert operator.starts > 1 or operator.said().count("clock has jumped") == 3


def seen(namespace: Namespace, generation: int) -> bool:
    return bool(status(namespace)["observedGeneration"] == generation)


def open_gates(namespace: Namespace, count: int) -> None:
    """Let the pods that wait start, until there are none."""

    def opened() -> bool:
        waiting = [pod["metadata"]["name"] for pod in namespace.list_all("pods") if pod["spec"].get("schedulingGates")]
        for name in waiting:
            remove = '[{"op": "remove", "path": "/spec/schedulingGates"}]'
            namespace.kubectl("patch", "pod", name, "--type=json", "-p", remove)
        done.update(waiting)
        return len(done) >= count

    done: set[str] = set()
    wait_until(opened, f"{count} pods have been let go", timeout_seconds=120)


def test_two_leaders_at_once(
    namespace: Namespace, nursery: Any, proxy: ApiServerProxy, light: Light, settled: Settled, tmp_path: Path
) -> None:
    last: dict[str, float] = {}
    waiting: dict[ApiCall, tuple[str, asyncio.Event]] = {}
    together: list[ApiCall] = []

    def pairing(who: str) -> Callable[[ApiCall, ForwardCall], Any]:
        """Holds up a write until the other operator makes the same one, so that they do meet."""

        async def pair(call: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
            if call.is_write and call.resource != "leases":
                last[who] = time.monotonic()
                other, event = waiting.get(call, (who, asyncio.Event()))
                if other != who:
                    together.append(call)
                    event.set()
                else:
                    waiting[call] = who, event
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1 if together else 10):
                            await event.wait()
                    waiting.pop(call, None)
            return await pass_on()

        return pair

    def leader(who: str) -> Any:
        return nursery.keep(
            namespace.name, lease=who, kubeconfig=proxy.open_endpoint(pairing(who)).write_kubeconfig(tmp_path / who)
        )

    with leader("one") as one, leader("other") as other:
        wait_until(lambda: " is the leader" in one.said() and " is the leader" in other.said(), "both lead", timeout_seconds=120)
        namespace.apply(light(OLD))
        settled(namespace.name, OLD)
        namespace.apply(light(NEW))
        end = settled(namespace.name, NEW)
        assert results(end) == ["Promoted", "Promoted"]
        namespace.apply(light(NEW, replicas=4))
        settled(namespace.name, NEW, replicas=4)
        assert together, "both have acted, and at once"
        wait_until(
            lambda: time.monotonic() > max(last.values()) + 10, "neither writes any more", timeout_seconds=240, interval_seconds=1
        )
    assert results(settled(namespace.name, NEW, replicas=4)) == ["Promoted", "Promoted"]


# ------------------------------------------------------------------------------------------------------------ the user's timing
@pytest.mark.parametrize("runs", [True, False], ids=["operator-up", "operator-down"])
def test_a_resource_is_deleted_and_made_anew(
    namespace: Namespace, nursery: Any, light: Light, settled: Settled, runs: bool
) -> None:
    def renew() -> str:
        namespace.kubectl("delete", "specdep", "chat", "--wait=false")
        namespace.apply(light())
        return uid(namespace)

    def owners() -> set[str]:
        found = namespace.list_all("deployments,services,poddisruptionbudgets,jobs,configmaps")
        return {reference["uid"] for item in found for reference in item["metadata"].get("ownerReferences") or ()}

    def is_right(old: str, new: str) -> None:
        assert new != old
        wait_until(lambda: owners() == {new}, "all that there is belongs to the new one", timeout_seconds=240)
        assert results(settled(namespace.name, NEW)) == ["Promoted"]
        assert condition(status(namespace), "Degraded") == ("False", "AsExpected")
        assert not {reason for reason, _ in events(namespace, new)} & {"NameTaken", "ApplyFailed"}

    with nursery.keep(namespace.name):
        namespace.apply(light())
        settled(namespace.name, NEW)
        old = uid(namespace)
        if runs:
            is_right(old, renew())
    if not runs:
        new = renew()
        with nursery.keep(namespace.name):
            is_right(old, new)


def uid(namespace: Namespace) -> str:
    return str(namespace.get("specdep", "chat")["metadata"]["uid"])


def events(namespace: Namespace, uid: str) -> list[tuple[str, str]]:
    """(reason, note) of the events about the object with this uid."""
    return [(e["reason"], e["message"]) for e in namespace.list_all("events") if e["involvedObject"].get("uid") == uid]


def test_fifty_resources_at_once(namespace: Namespace, nursery: Any, light: Light) -> None:
    names = [f"chat-{number}" for number in range(50)]

    def ready() -> bool:
        found = {item["metadata"]["name"]: item.get("status") or {} for item in namespace.list_all("specdep")}
        waiting = [name for name in names if found[name].get("phase") != "Ready"]
        if waiting:
            raise LabError(f"{len(waiting)} are not: {waiting[0]}: {found[waiting[0]].get('conditions')}")
        return True

    with nursery.keep(namespace.name):
        namespace.apply(*(light(name=name, replicas=1) for name in names))
        wait_until(ready, "all are Ready", timeout_seconds=280, interval_seconds=2)
    pods = [pod for pod in namespace.list_all("pods") if "aerie.dev/name" in pod["metadata"]["labels"]]
    assert sorted(pod["metadata"]["labels"]["aerie.dev/name"] for pod in pods) == sorted(names)


def test_every_call_takes_two_seconds_longer(slow_rollout: Future[State]) -> None:
    assert results(slow_rollout.result()) == ["Promoted", "Promoted"]


# ------------------------------------------------------------------------- no API server: last, because all others need one
def test_an_api_server_that_is_away_for_a_minute(namespace: Namespace, nursery: Any, light: Light, settled: Settled) -> None:
    namespace.apply(light(OLD))
    with nursery.keep(namespace.name) as first, nursery.keep(namespace.name) as second:
        settled(namespace.name, OLD)
        namespace.apply(light(NEW))
        wait_until(
            lambda: len(status(namespace).get("rolloutHistory", ())) == 2 or status(namespace)["phase"] != "Ready", "it has begun"
        )
        with namespace.faults.stop_component("kube-apiserver"):
            time.sleep(AWAY)
        for component in ("kube-controller-manager", "kube-scheduler"):  # by themselves they look again after up to a minute
            namespace.faults.restart(component)
        end = settled(namespace.name, NEW)
        assert results(end) == ["Promoted", "Promoted"]
        assert first.starts + second.starts > 2, "a leader that cannot renew its lease ends"


def test_etcd_restarts_and_what_watches_missed_is_forgotten(
    namespace: Namespace, nursery: Any, proxy: ApiServerProxy, light: Light, settled: Settled, tmp_path: Path
) -> None:
    forgotten = False
    refused: set[str] = set()

    async def forgetful(call: ApiCall, pass_on: ForwardCall) -> web.StreamResponse:
        if call.verb == "watch" and forgotten:
            refused.add(call.resource)
            gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired"}
            event = {"type": "ERROR", "object": {**gone, "message": "too old resource version"}}
            return web.Response(text=json.dumps(event) + "\n", content_type="application/json")
        return await pass_on()

    door = proxy.open_endpoint(forgetful)
    namespace.apply(light(OLD))
    with nursery.keep(namespace.name, kubeconfig=door.write_kubeconfig(tmp_path / "kubeconfig")):
        settled(namespace.name, OLD)
        namespace.apply(light(NEW))
        namespace.faults.restart("etcd")
        settled(namespace.name, NEW)

        forgotten = True

        def cut() -> bool:
            door.break_watches()
            return {"speculativedeployments", "deployments"} <= refused

        wait_until(cut, "the watches have been refused")
        namespace.kubectl("delete", "service,pdb", "--all")
        namespace.apply(light(OLD, replicas=3))
        forgotten = False
        end = settled(namespace.name, OLD, replicas=3)
        assert results(end) == ["Promoted"] * 3
