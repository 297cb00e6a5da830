"""Rollouts with faults of the API server, the clock or the user's timing have the right result."""

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

ResourceFactory = Callable[..., dict[str, Any]]
State = dict[str, Any]
WaitUntilSettled = Callable[..., State]
OLD, NEW = "eagle3", "eagle31"
OUTAGE_SECONDS = 60.0
"""Duration without an API server: longer than any lease and any call of the operator."""


def status(namespace: Namespace) -> dict[str, Any]:
    status: dict[str, Any] = namespace.get("specdep", "chat").get("status") or {}
    return status


def results(state: State) -> list[str]:
    return [record["result"] for record in state["speculativedeployments chat"]["status"]["rolloutHistory"]]


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    return next(
        ((entry["status"], entry["reason"]) for entry in status.get("conditions") or [] if entry["type"] == kind), ("", "")
    )


# ---------------------------------------------------------------------------------------------------- faults of the API server
@pytest.fixture(scope="module")
def slow_rollout(
    lab: Lab,
    operators: Any,
    proxy: ApiServerProxy,
    processless_resource: ResourceFactory,
    wait_until_settled: WaitUntilSettled,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Future[State]]:
    """A rollout through an endpoint that delays every call by two seconds. It mostly waits, so other tests run beside it."""

    async def slow(_: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        await asyncio.sleep(2)
        return await forward()

    kubeconfig = proxy.open_endpoint(slow).write_kubeconfig(tmp_path_factory.mktemp("slow") / "kubeconfig")

    def roll_out(namespace: Namespace) -> State:
        with operators.keep_running(namespace.name, kubeconfig=kubeconfig):
            namespace.apply(processless_resource(OLD))
            wait_until_settled(namespace.name, OLD)
            namespace.apply(processless_resource(NEW))
            return wait_until_settled(namespace.name, NEW)

    with new_namespace(lab, "slow") as namespace, ThreadPoolExecutor(1) as pool:
        yield pool.submit(roll_out, namespace)


@pytest.mark.nightly  # two leaders conflict too
@pytest.mark.usefixtures("slow_rollout")
def test_rollout_completes_if_every_write_conflicts_once(
    namespace: Namespace,
    launcher: Any,
    proxy: ApiServerProxy,
    processless_resource: ResourceFactory,
    wait_until_settled: WaitUntilSettled,
    tmp_path: Path,
) -> None:
    rejected_writes: set[tuple[str, str, str]] = set()

    async def conflicting(call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        key = (call.verb, call.resource, call.name)
        if call.is_write and key not in rejected_writes:
            rejected_writes.add(key)
            return build_error_response(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        return await forward()

    kubeconfig = proxy.open_endpoint(conflicting).write_kubeconfig(tmp_path / "kubeconfig")
    with launcher.keep_running(namespace.name, kubeconfig=kubeconfig):
        namespace.apply(processless_resource(OLD))
        wait_until_settled(namespace.name, OLD)
        rejected_writes.clear()
        namespace.apply(processless_resource(NEW))
        end = wait_until_settled(namespace.name, NEW)
    assert results(end) == ["Promoted", "Promoted"]
    assert ("delete", "deployments") in {key[:2] for key in rejected_writes}


# --------------------------------------------------------------------------------------------------------- clocks and leaders
def test_clock_jumps_do_not_affect_a_waiting_rollout(
    namespace: Namespace,
    launcher: Any,
    processless_resource: ResourceFactory,
    wait_until_settled: WaitUntilSettled,
    tmp_path: Path,
) -> None:
    clock = tmp_path / "clock"
    gated = processless_resource(NEW, gates=["aerie.dev/test"])
    # A restarted operator uses the clock of that moment, so the clock has to be right then.
    with launcher.keep_running(namespace.name, clock=clock, first=lambda: clock.write_text("0")) as operator:
        namespace.apply(processless_resource(OLD))
        wait_until_settled(namespace.name, OLD)
        namespace.apply(gated)
        wait_until(lambda: status(namespace)["phase"] == "Starting", "its canary is to start", timeout_seconds=120)
        for number, jump in enumerate((7200, -7200, 0)):
            changed = tmp_path / "changed"
            changed.write_text(str(jump))
            changed.replace(clock)  # atomically: it may be read at any moment
            gated["spec"]["replicas"] = 3 + number  # any change: its generation shows a reconcile after the jump
            namespace.apply(gated)
            generation = namespace.get("specdep", "chat")["metadata"]["generation"]
            wait_until(functools.partial(is_observed, namespace, generation), "it is reconciled", timeout_seconds=120)
            assert status(namespace)["phase"] == "Starting"
        open_gates(namespace, 5)
        end = wait_until_settled(namespace.name, NEW, replicas=5)
    assert results(end) == ["Promoted", "Promoted"]
    assert operator.starts > 1 or operator.read_log().count("clock has jumped") == 3


def is_observed(namespace: Namespace, generation: int) -> bool:
    return bool(status(namespace)["observedGeneration"] == generation)


def open_gates(namespace: Namespace, count: int) -> None:
    """Remove the scheduling gates of `count` pods."""

    def all_opened() -> bool:
        waiting = [pod["metadata"]["name"] for pod in namespace.list_all("pods") if pod["spec"].get("schedulingGates")]
        for name in waiting:
            remove = '[{"op": "remove", "path": "/spec/schedulingGates"}]'
            namespace.kubectl("patch", "pod", name, "--type=json", "-p", remove)
        opened.update(waiting)
        return len(opened) >= count

    opened: set[str] = set()
    wait_until(all_opened, f"{count} pods have no gate any more", timeout_seconds=120)


def test_two_simultaneous_leaders_complete_the_rollout(
    namespace: Namespace,
    launcher: Any,
    proxy: ApiServerProxy,
    processless_resource: ResourceFactory,
    wait_until_settled: WaitUntilSettled,
    tmp_path: Path,
) -> None:
    last_write_at: dict[str, float] = {}
    waiting_calls: dict[ApiCall, tuple[str, asyncio.Event]] = {}
    simultaneous_writes: list[ApiCall] = []

    def pair_writes(operator_name: str) -> Callable[[ApiCall, ForwardCall], Any]:
        """Delay a write until the other operator makes the same one, so that they are simultaneous."""

        async def pair(call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
            if call.is_write and call.resource != "leases":
                last_write_at[operator_name] = time.monotonic()
                waiting_operator, event = waiting_calls.get(call, (operator_name, asyncio.Event()))
                if waiting_operator != operator_name:
                    simultaneous_writes.append(call)
                    event.set()
                else:
                    waiting_calls[call] = operator_name, event
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1 if simultaneous_writes else 10):
                            await event.wait()
                    waiting_calls.pop(call, None)
            return await forward()

        return pair

    def start_leader(operator_name: str) -> Any:
        return launcher.keep_running(
            namespace.name,
            lease=operator_name,
            kubeconfig=proxy.open_endpoint(pair_writes(operator_name)).write_kubeconfig(tmp_path / operator_name),
        )

    with start_leader("one") as first, start_leader("other") as second:
        wait_until(
            lambda: " is the leader" in first.read_log() and " is the leader" in second.read_log(),
            "both lead",
            timeout_seconds=120,
        )
        namespace.apply(processless_resource(OLD))
        wait_until_settled(namespace.name, OLD)
        namespace.apply(processless_resource(NEW))
        end = wait_until_settled(namespace.name, NEW)
        assert results(end) == ["Promoted", "Promoted"]
        namespace.apply(processless_resource(NEW, replicas=4))
        wait_until_settled(namespace.name, NEW, replicas=4)
        assert simultaneous_writes, "both have written simultaneously"
        wait_until(
            lambda: time.monotonic() > max(last_write_at.values()) + 10,
            "neither writes any more",
            timeout_seconds=240,
            interval_seconds=1,
        )
    assert results(wait_until_settled(namespace.name, NEW, replicas=4)) == ["Promoted", "Promoted"]


# ------------------------------------------------------------------------------------------------------------ the user's timing
@pytest.mark.parametrize("runs", [True, False], ids=["operator-up", "operator-down"])
def test_recreated_resource_replaces_all_objects(
    namespace: Namespace, launcher: Any, processless_resource: ResourceFactory, wait_until_settled: WaitUntilSettled, runs: bool
) -> None:
    def recreate() -> str:
        namespace.kubectl("delete", "specdep", "chat", "--wait=false")
        namespace.apply(processless_resource())
        return uid(namespace)

    def owners() -> set[str]:
        objects = namespace.list_all("deployments,services,poddisruptionbudgets,jobs,configmaps")
        return {reference["uid"] for item in objects for reference in item["metadata"].get("ownerReferences") or ()}

    def check_recreated(old: str, new: str) -> None:
        assert new != old
        wait_until(lambda: owners() == {new}, "all objects belong to the new one", timeout_seconds=240)
        assert results(wait_until_settled(namespace.name, NEW)) == ["Promoted"]
        assert condition(status(namespace), "Degraded") == ("False", "AsExpected")
        assert not {reason for reason, _ in events(namespace, new)} & {"NameTaken", "ApplyFailed"}

    with launcher.keep_running(namespace.name):
        namespace.apply(processless_resource())
        wait_until_settled(namespace.name, NEW)
        old = uid(namespace)
        if runs:
            check_recreated(old, recreate())
    if not runs:
        new = recreate()
        with launcher.keep_running(namespace.name):
            check_recreated(old, new)


def uid(namespace: Namespace) -> str:
    return str(namespace.get("specdep", "chat")["metadata"]["uid"])


def events(namespace: Namespace, uid: str) -> list[tuple[str, str]]:
    """(reason, note) of the events about the object with this uid."""
    return [
        (event["reason"], event["message"]) for event in namespace.list_all("events") if event["involvedObject"].get("uid") == uid
    ]


@pytest.mark.nightly  # test_rollout_faults.py begins with all its resources at once
def test_fifty_simultaneous_resources_become_ready(
    namespace: Namespace, launcher: Any, processless_resource: ResourceFactory
) -> None:
    names = [f"chat-{number}" for number in range(50)]

    def ready() -> bool:
        statuses = {item["metadata"]["name"]: item.get("status") or {} for item in namespace.list_all("specdep")}
        waiting = [name for name in names if statuses[name].get("phase") != "Ready"]
        if waiting:
            raise LabError(f"{len(waiting)} are not: {waiting[0]}: {statuses[waiting[0]].get('conditions')}")
        return True

    with launcher.keep_running(namespace.name):
        namespace.apply(*(processless_resource(name=name, replicas=1) for name in names))
        wait_until(ready, "all are Ready", timeout_seconds=280, interval_seconds=2)
    pods = [pod for pod in namespace.list_all("pods") if "aerie.dev/name" in pod["metadata"]["labels"]]
    assert sorted(pod["metadata"]["labels"]["aerie.dev/name"] for pod in pods) == sorted(names)


def test_rollout_completes_with_slow_api_server(slow_rollout: Future[State]) -> None:
    assert results(slow_rollout.result()) == ["Promoted", "Promoted"]


# ------------------------------------------------------------------------- no API server: last, because all others need one
def test_rollout_completes_after_api_server_outage(
    namespace: Namespace, launcher: Any, processless_resource: ResourceFactory, wait_until_settled: WaitUntilSettled
) -> None:
    namespace.apply(processless_resource(OLD))
    with launcher.keep_running(namespace.name) as first, launcher.keep_running(namespace.name) as second:
        wait_until_settled(namespace.name, OLD)
        namespace.apply(processless_resource(NEW))
        wait_until(
            lambda: len(status(namespace).get("rolloutHistory", ())) == 2 or status(namespace)["phase"] != "Ready", "it has begun"
        )
        with namespace.faults.stop_component("kube-apiserver"):
            time.sleep(OUTAGE_SECONDS)
        for component in ("kube-controller-manager", "kube-scheduler"):  # their own retry takes up to a minute
            namespace.faults.restart(component)
        end = wait_until_settled(namespace.name, NEW)
        assert results(end) == ["Promoted", "Promoted"]
        assert first.starts + second.starts > 2, "a leader that cannot renew its lease ends"


def test_rollout_completes_after_etcd_restart_and_expired_watches(
    namespace: Namespace,
    launcher: Any,
    proxy: ApiServerProxy,
    processless_resource: ResourceFactory,
    wait_until_settled: WaitUntilSettled,
    tmp_path: Path,
) -> None:
    history_expired = False
    rejected_resources: set[str] = set()

    async def reject_watches(call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        if call.verb == "watch" and history_expired:
            rejected_resources.add(call.resource)
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired"}
            event = {"type": "ERROR", "object": {**status, "message": "too old resource version"}}
            return web.Response(text=json.dumps(event) + "\n", content_type="application/json")
        return await forward()

    endpoint = proxy.open_endpoint(reject_watches)
    namespace.apply(processless_resource(OLD))
    with launcher.keep_running(namespace.name, kubeconfig=endpoint.write_kubeconfig(tmp_path / "kubeconfig")):
        wait_until_settled(namespace.name, OLD)
        namespace.apply(processless_resource(NEW))
        namespace.faults.restart("etcd")
        wait_until_settled(namespace.name, NEW)

        history_expired = True

        def watches_rejected() -> bool:
            endpoint.break_watches()
            return {"speculativedeployments", "deployments"} <= rejected_resources

        wait_until(watches_rejected, "the watches have been rejected")
        namespace.kubectl("delete", "service,pdb", "--all")
        namespace.apply(processless_resource(OLD, replicas=3))
        history_expired = False
        end = wait_until_settled(namespace.name, OLD, replicas=3)
        assert results(end) == ["Promoted"] * 3
