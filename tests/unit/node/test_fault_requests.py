"""Requests of faults and their repairs: node agent and supervisor serve them, with their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.faults import Fault, FaultInjector
from aerie_lab.node.agent import AGENT_VERBS, NodeAgent
from aerie_lab.supervisor.supervisor import SUPERVISOR_VERBS, Supervisor


class FakeLab:
    """A lab that binds each request to the method that would serve it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verbs: list[str] = []

    def _record(self, server: type, served_verbs: Sequence[str], verb: str, fields: dict[str, Any]) -> None:
        assert verb in served_verbs
        inspect.signature(getattr(server, verb)).bind(None, **fields)
        self.verbs.append(verb)

    def call_agent(self, verb: str, **fields: Any) -> None:
        self._record(NodeAgent, AGENT_VERBS, verb, fields)

    def call_supervisor(self, verb: str, **fields: Any) -> None:
        self._record(Supervisor, SUPERVISOR_VERBS, verb, fields)


@pytest.mark.parametrize(
    ("inject", "kind", "verbs"),
    [
        (lambda faults: faults.crash("pod", 2.0, "main"), "crash", ["crash", "crash"]),
        (lambda faults: faults.freeze("pod", "main"), "freeze", ["freeze", "resume"]),
        (lambda faults: faults.disconnect("pod"), "disconnect", ["disconnect", "reconnect"]),
        (lambda faults: faults.silence_node("node-1"), "silence-node", ["silence_node", "restore_node"]),
        (lambda faults: faults.corrupt_metrics("pod", "nan"), "corrupt-metrics", ["corrupt_metrics", "corrupt_metrics"]),
        (lambda faults: faults.fail_drafter("pod", "swap-fails"), "fail-drafter", ["fail_drafter", "fail_drafter"]),
        (lambda faults: faults.stop_component("hub"), "stop-component", ["stop_component", "resume_component"]),
    ],
)
def test_a_fault_and_its_repair_send_their_requests(
    inject: Callable[[FaultInjector], Fault], kind: str, verbs: list[str], tmp_path: Path
) -> None:
    lab = FakeLab(tmp_path)
    injector = FaultInjector(cast("Lab", lab))
    with inject(injector):
        assert [record.kind for record in injector.list_active()] == [kind]
    assert injector.list_active() == []
    assert lab.verbs == verbs


def test_faults_without_repair_send_one_request(tmp_path: Path) -> None:
    lab = FakeLab(tmp_path)
    injector = FaultInjector(cast("Lab", lab))
    injector.kill("pod", "main")
    injector.restart("hub")
    assert lab.verbs == ["kill", "restart"]
    assert injector.list_active() == []


@pytest.mark.parametrize(("server", "verbs"), [(NodeAgent, AGENT_VERBS), (Supervisor, SUPERVISOR_VERBS)])
def test_all_verbs_are_served(server: type, verbs: Sequence[str]) -> None:
    assert all(inspect.iscoroutinefunction(getattr(server, verb)) for verb in verbs)
