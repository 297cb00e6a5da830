"""`kubectl aerie plan` against a real API server: the rollout that it plans is the one that the operator then starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aerie_lab.testing import Namespace
from tests.lab.operator.resources import resource

Wait = Callable[..., dict[str, Any]]


def run_plan(namespace: Namespace, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "aerie.cli", "plan", "-f", str(file), "-n", namespace.name, *options)
    return subprocess.run(command, env=namespace.lab.environment(), capture_output=True, text=True, check=False)


def plan(namespace: Namespace, file: Path, *options: str) -> dict[str, Any]:
    result = run_plan(namespace, file, "-o", "json", *options)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def write(folder: Path, drafter: str, **options: Any) -> Path:
    file = folder / f"{drafter}.json"
    file.write_text(json.dumps(resource("chat", drafter, replicas=2, gpus=1, **options)))
    return file


def test_the_canary_that_starts_is_the_planned_one(
    namespace: Namespace, launcher: Any, wait_for_status: Wait, tmp_path: Path
) -> None:
    launcher.start(namespace.name)
    first, second = write(tmp_path, "eagle3"), write(tmp_path, "eagle31")
    planned = plan(namespace, first)
    assert planned["change"]["kind"] == "FirstRevision"
    assert planned["pods"]["extra"] == 2
    assert namespace.kubectl("get", "specdep", "-o", "name") == "", "a plan writes nothing"

    namespace.kubectl("apply", "-f", str(first))
    served = wait_for_status(lambda status: status.get("phase") == "Ready", "it is Ready")
    assert served["status"]["stable"]["revision"] == planned["change"]["revision"]
    assert plan(namespace, first)["change"]["kind"] == "Unchanged"

    planned = plan(namespace, second, "--diff")
    change, pods = planned["change"], planned["pods"]
    assert (change["kind"], change["servedRevision"]) == ("Canary", served["status"]["stable"]["revision"])
    assert (pods["canary"], pods["control"], pods["extra"], pods["gpusPerPod"]) == (1, 1, 2, 1)
    assert pods["fit"] is True
    assert [node["name"] for node in pods["room"]["nodes"]] == ["node-1"], "others do not match the node selector"
    assert planned["preflight"]["state"] == "NotChecked"
    assert "+      reference: models.example/eagle31" in planned["diff"]
    assert namespace.get("specdep", "chat")["metadata"]["generation"] == served["metadata"]["generation"]
    shown = run_plan(namespace, second)
    assert "a canary with new pods tests the change" in " ".join(shown.stdout.split())

    namespace.kubectl("apply", "-f", str(second))
    status = wait_for_status(lambda status: status.get("canary"), "the canary starts")["status"]
    assert (status["canary"]["revision"], status["canary"]["change"]) == (change["revision"], change["description"])
    wait_for_status(
        lambda status: (status["canary"].get("replicas"), status["canary"].get("control", {}).get("replicas")) == (1, 1),
        "canary and control have the planned pods",
    )
    assert plan(namespace, second)["change"]["kind"] == "Continues"
    superseding = plan(namespace, first)
    assert superseding["change"]["kind"] == "Withdrawn"
    assert superseding["change"]["superseded"]["revision"] == change["revision"]


def test_a_rejection_names_field_and_value(namespace: Namespace, tmp_path: Path) -> None:
    document = resource("chat", replicas=-1)
    document["spec"]["rollout"]["canary"]["stepWeights"] = [50, 25]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(document))
    result = run_plan(namespace, file)
    assert result.returncode == 1
    assert "spec.replicas" in result.stderr
    assert "-1" in result.stderr
    document["spec"]["replica"] = 3
    file.write_text(json.dumps(document))
    assert 'unknown field "spec.replica"' in run_plan(namespace, file).stderr
