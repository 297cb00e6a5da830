"""`kubectl aerie` against a real API server and a running operator: a user's day with one resource, by the plugin alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie.cli.fleet.actions import build_action
from aerie.cli.fleet.kubectl import ConflictError, Kubectl
from aerie.cli.fleet.resource_view import ResourceView, now
from aerie_lab.binaries.lookup import ensure_binary
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.conftest import OperatorLauncher
from tests.lab.operator.resources import LONG, resource

PLUGIN = Path(sys.executable).with_name("kubectl-aerie")
VIEWER_RULES = [
    {"apiGroups": ["aerie.dev"], "resources": ["speculativedeployments"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["configmaps", "events"], "verbs": ["get", "list"]},
]
Aerie = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment of a user: the lab's kubectl, with the plugin on the PATH."""
    folders = (ensure_binary("kubectl").parent, PLUGIN.parent)
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    monkeypatch.setenv("KUBECONFIG", str(namespace.lab.kubeconfig))
    return {**os.environ, "COLUMNS": "80"}


@pytest.fixture
def aerie(namespace: Namespace, environment: dict[str, str]) -> Aerie:
    """A function that runs `kubectl aerie VERB ... -n NAMESPACE`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "aerie", *arguments, "-n", namespace.name]
        process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert "Traceback" not in process.stderr
        return process

    return run


@pytest.fixture
def running_operator(namespace: Namespace, launcher: OperatorLauncher) -> Iterator[None]:
    with launcher.keep_running(namespace.name):
        yield


def chat(drafter: str) -> dict[str, Any]:
    return resource("chat", drafter, analysis=LONG, canary={"scaleDownDelay": "1h"})


def check(process: subprocess.CompletedProcess[str], status: int = 0) -> str:
    assert process.returncode == status, process.stdout + process.stderr
    return process.stdout if status == 0 else process.stdout + process.stderr


@pytest.mark.usefixtures("running_operator")
def test_a_users_day_with_one_resource(namespace: Namespace, aerie: Aerie, environment: dict[str, str]) -> None:
    assert "not found" in check(aerie("status", "chat"), 2)
    namespace.apply(chat("eagle3"))
    check(aerie("wait", "chat", "--for", "ready", "--timeout", "240"))
    assert re.search(r"chat +1/1 +serving", check(aerie("list")))
    assert "clients are served: 1 of 1 pods" in check(aerie("status", "chat"))
    assert "promote is not possible in phase Ready: there is no rollout to decide" in check(aerie("promote", "chat"), 2)

    namespace.apply(chat("eagle31"))

    def phase() -> str:
        return str(json.loads(check(aerie("status", "chat", "-o", "json")))["phase"])

    wait_until(lambda: phase() == "WarmingUp", "the canary warms up", timeout_seconds=240)
    text = check(aerie("status", "chat"))
    assert re.search(r"canary +1/1", text)
    assert "kubectl aerie promote|rollback|pause chat" in text
    assert max(map(len, text.splitlines())) <= 80

    # Dry runs write nothing; neither do users without the right to, nor decisions about a resource that has changed.
    assert check(aerie("promote", "chat", "--dry-run")).startswith("Checked, nothing is written: Revision ")
    namespace.apply(role("viewer", VIEWER_RULES), role_binding("viewer"))
    assert "chat" in check(aerie("list", "--as", "viewer"))
    assert "ask for the ClusterRole view to read, or edit" in check(aerie("promote", "chat", "--as", "viewer"), 2)
    kubectl = Kubectl((f"--namespace={namespace.name}",))
    stale = build_action(ResourceView(kubectl.get("chat")), "promote", "", "", now())
    check(aerie("pause", "chat"))
    with pytest.raises(ConflictError, match="has changed"):
        kubectl.patch("chat", stale.operations)
    assert not any("aerie.dev/" in name for name in kubectl.get("chat")["metadata"].get("annotations") or {})
    assert "promote is not possible in phase" in check(aerie("promote", "chat"), 2)
    check(aerie("resume", "chat"))

    wait_until(lambda: phase() == "WarmingUp", "the canary warms up", timeout_seconds=240)
    check(aerie("rollback", "chat", "--reason", "the drafter is slow in German"))
    assert "RolledBack" in check(aerie("wait", "chat", "--timeout", "240"))
    check(aerie("wait", "chat", "--for", "promoted"), 1)
    assert "chat" in check(aerie("list", "--attention"), 1)
    (record, first) = json.loads(check(aerie("history", "chat", "-o", "json")))["rollouts"]
    assert (record["result"], first["result"]) == ("RolledBack", "Promoted")
    assert (record["requestedBy"]["user"], record["requestedBy"]["reason"]) == ("admin", "the drafter is slow in German")
    assert "Rolled back by admin: the drafter is slow in German." in record["message"]
    assert "RolledBack" in check(aerie("history", "chat"))

    check(aerie("retry", "chat"))
    wait_until(lambda: phase() == "WarmingUp", "the canary warms up again", timeout_seconds=240)
    check(aerie("wait", "chat", "--for", "promoted", "--timeout", "1"), 4)
    check(aerie("promote", "chat"))
    check(aerie("wait", "chat", "--for", "promoted", "--timeout", "240"))
    assert "models.example/eagle31" in check(aerie("explain", "chat"))
    wait_until(lambda: phase() == "Monitoring", "the previous pods are retained", timeout_seconds=240)
    check(aerie("rollback", "chat"))
    check(aerie("wait", "chat", "--for", "rolledback", "--timeout", "240"))

    # Ctrl-C and a closed pipe are quiet.
    command = ["kubectl", "aerie", "status", "chat", "--watch", "-n", namespace.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as watch:
        assert watch.stdout is not None
        assert "chat" in watch.stdout.readline()
        check(aerie("pause", "chat"))
        while "Paused" not in watch.stdout.readline():
            assert watch.poll() is None
        check(aerie("resume", "chat"))
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=30)
        assert (watch.returncode, errors) == (130, "")
    piped = subprocess.run(
        ["bash", "-c", f"kubectl aerie history chat -n {namespace.name} | head -1"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    assert piped.stderr == ""


def role(name: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules}


def role_binding(user: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": "Role", "name": user}
    subject = {"apiGroup": group, "kind": "User", "name": user}
    metadata = {"name": user}
    return {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": metadata, "roleRef": reference, "subjects": [subject]}
