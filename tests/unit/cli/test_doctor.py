"""`doctor`: each check passes, fails with a fix, or is unknown for want of rights; kubectl is a script here."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from aerie.api.crd import build_custom_resource_definition
from aerie.cli.app import run_command_line
from aerie.cli.fleet.doctor import FORBIDDEN, ClusterFacts, Mark, check_cluster, find_lease, is_allowed
from tests.golden import Messages
from tests.unit.cli.fleet_documents import Document, condition, ready

NOW = datetime(2026, 11, 28, 8, 30, tzinfo=UTC)
RULES = [
    {"verbs": ["get", "list", "watch", "patch"], "apiGroups": ["aerie.dev"], "resources": ["speculativedeployments"]},
    {"verbs": ["get"], "apiGroups": [""], "resources": ["pods", "pods/proxy"]},
]


def definition() -> Document:
    document: Document = build_custom_resource_definition()
    return document | {"status": {"conditions": [{"type": "Established", "status": "True"}]}}


def operator_pod(*, is_ready: bool = True, waiting: str = "", arguments: tuple[str, ...] = ()) -> Document:
    state: Document = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    args = ["operator", "--lease-namespace=aerie-system", "--lease-name=aerie", *arguments]
    return {
        "metadata": {"name": "aerie-1", "namespace": "aerie-system", "labels": {"app.kubernetes.io/version": "0.1.0"}},
        "spec": {"containers": [{"name": "operator", "image": "registry/aerie:0.1.0", "args": args}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            "containerStatuses": [{"state": state}],
        },
    }


def lease(age: float = 2.0, holder: str = "aerie-1_7") -> Document:
    time = (NOW - timedelta(seconds=age)).isoformat()
    return {"spec": {"holderIdentity": holder, "renewTime": time, "leaseDurationSeconds": 12}}


HEALTHY = ClusterFacts(
    definition=definition(),
    missing_fields=[],
    resources=[ready()],
    operator_pods=[operator_pod()],
    lease=lease(),
    admission_bindings=[{}],
    rules=RULES,
    has_gateway_api=False,
    server_time=NOW,
    read_from=NOW,
    read_until=NOW + timedelta(seconds=1),
    namespace="prod",
    version="0.1.0",
)


def degraded(reason: str, message: str) -> Document:
    return ready(conditions=[condition("Ready", "True", "AllPodsReady", ""), condition("Degraded", "True", reason, message)])


def with_spec(**spec: Any) -> Document:
    document = ready()
    return document | {"spec": document["spec"] | spec}


GATEWAY = with_spec(rollout={"traffic": {"mode": "Gateway"}})
PROMETHEUS = with_spec(metrics={"source": {"prometheus": {"address": "http://prometheus:9090"}}})
PROBLEMS: dict[str, dict[str, Any]] = {
    "no definition": {"definition": None},
    "definition not established": {"definition": definition() | {"status": {}}},
    "old definition": {"missing_fields": ["status.a", "status.b", "status.c", "status.d"]},
    "no operator": {"operator_pods": [], "lease": None},
    "operator without image": {"operator_pods": [operator_pod(is_ready=False, waiting="ImagePullBackOff")]},
    "operator crashes": {"operator_pods": [operator_pod(is_ready=False, waiting="CrashLoopBackOff")]},
    "dry run": {"operator_pods": [operator_pod(arguments=("--dry-run",))]},
    "no leader": {"lease": lease(holder="")},
    "stale leader": {"lease": lease(age=300.0)},
    "another version": {"version": "0.2.0"},
    "no admission policy": {"admission_bindings": []},
    "nobody": {"rules": []},
    "Prometheus fails": {"resources": [degraded("MetricsUnavailable", "http://prometheus:9090 returned status 401")]},
    "spec not observed": {"resources": [ready(observedGeneration=2)]},
    "no Gateway API": {"resources": [GATEWAY]},
    "clock ahead": {"server_time": NOW - timedelta(minutes=5)},
    "clock behind": {"server_time": NOW + timedelta(minutes=5), "lease": lease(age=-300.0)},
}


def describe(facts: ClusterFacts) -> str:
    return "\n".join(
        f"{line.mark}: {line.title}: {line.text}" + (f" -> {line.fix}" * bool(line.fix)) for line in check_cluster(facts)
    )


def test_a_healthy_cluster(messages: Messages) -> None:
    assert {line.mark for line in check_cluster(HEALTHY)} == {Mark.OK}
    messages.check("healthy", describe(HEALTHY))
    used = replace(HEALTHY, resources=[GATEWAY, PROMETHEUS], has_gateway_api=True)
    assert {line.mark for line in check_cluster(used)} == {Mark.OK}
    messages.check("healthy, with Gateway and Prometheus", describe(used))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_has_a_line_and_a_fix(name: str, messages: Messages) -> None:
    lines = [line for line in check_cluster(replace(HEALTHY, **PROBLEMS[name])) if line.mark is not Mark.OK]
    assert any(line.mark is Mark.PROBLEM for line in lines)
    assert all(line.fix for line in lines)
    messages.check(name, "\n".join(f"{line.mark}: {line.title}: {line.text} -> {line.fix}" for line in lines))


def test_without_rights_nothing_passes_and_nothing_fails() -> None:
    names = ("definition", "resources", "operator_pods", "lease", "admission_bindings", "rules", "has_gateway_api")
    facts = replace(HEALTHY, server_time=None, **dict.fromkeys(names, FORBIDDEN))  # type: ignore[arg-type]
    assert {line.mark for line in check_cluster(facts)} == {Mark.UNKNOWN}


def test_a_viewer_learns_what_others_may(messages: Messages) -> None:
    facts = replace(HEALTHY, rules=[RULES[0] | {"verbs": ["get", "list", "watch"]}])
    lines = [line for line in check_cluster(facts) if line.mark is not Mark.OK]
    assert {line.mark for line in lines} == {Mark.UNKNOWN}
    messages.check("viewer", "\n".join(f"{line.mark}: {line.title}: {line.text} -> {line.fix}" for line in lines))


def test_a_thousand_degraded_resources_are_one_line_by_reason() -> None:
    resources = [degraded("MetricsUnavailable", "no answer") for _ in range(1000)]
    (line,) = [line for line in check_cluster(replace(HEALTHY, resources=resources)) if line.mark is Mark.PROBLEM]
    assert line.text.startswith("prod/chat, prod/chat, prod/chat and 997 more: no answer")


def test_rules_with_wildcards_and_names() -> None:
    everything = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]
    assert is_allowed(everything, "patch", "aerie.dev", "speculativedeployments")
    proxies = [{"verbs": ["get"], "apiGroups": [""], "resources": ["*/proxy"]}]
    assert is_allowed(proxies, "get", "", "pods/proxy")
    assert not is_allowed(proxies, "get", "", "pods")
    assert not is_allowed([everything[0] | {"resourceNames": ["chat"]}], "get", "", "pods")


def test_the_lease_is_that_of_the_arguments() -> None:
    assert find_lease([operator_pod()]) == ("aerie-system", "aerie")
    assert find_lease([]) is None


# -- the command line
ANSWERS = r"""#!/bin/sh
printf '%s\n' "$*" >> "$KUBECTL_FOLDER/log"
case "$*" in
  *"auth whoami"*) name=user ;;
  *"config view"*) printf prod; exit ;;
  *"customresourcedefinitions"*) name=definition ;;
  *" leases."*) name=lease ;;
  *"get pods"*) name=pods ;;
  *"validatingadmissionpolicybindings"*) name=bindings ;;
  *"selfsubjectrulesreviews"*) cat > "$KUBECTL_FOLDER/review"; name=rules ;;
  *"/apis/gateway"*) name=gateway ;;
  *"get speculativedeployments"*) name=resources ;;
esac
[ -f "$KUBECTL_FOLDER/$name" ] || { echo "Error from server (Forbidden): $name is forbidden: User \"alice\"" >&2; exit 1; }
cat "$KUBECTL_FOLDER/$name"
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that answers with the files of a folder, and that a missing one is forbidden."""
    script = tmp_path / "kubectl"
    script.write_text(ANSWERS)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path))
    now = datetime.now(UTC)
    pod = operator_pod()
    pod["metadata"]["labels"]["app.kubernetes.io/version"] = version("aerie-operator")
    documents: dict[str, Any] = {
        "user": {"metadata": {"creationTimestamp": now.isoformat()}},
        "definition": definition(),
        "pods": {"items": [pod]},
        "lease": {"spec": lease()["spec"] | {"renewTime": now.isoformat()}},
        "bindings": {"items": [{}]},
        "rules": {"status": {"resourceRules": RULES}},
        "gateway": {},
        "resources": {"items": [ready()]},
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


def test_a_healthy_cluster_takes_eight_requests(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["doctor"]) == 0
    assert "✗" not in capsys.readouterr().out
    log = (cluster / "log").read_text().splitlines()
    assert len([line for line in log if not line.startswith("config")]) == 8
    assert json.loads((cluster / "review").read_text())["spec"] == {"namespace": "prod"}


def test_a_problem_ends_with_1(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "bindings").write_text('{"items": []}')
    assert run_command_line(["doctor", "-o", "json", "-n", "dev"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == ("cli.aerie.dev/v1", "ClusterChecks")
    assert [check["check"] for check in document["checks"] if check["result"] == "problem"] == ["admission policy"]
    assert json.loads((cluster / "review").read_text())["spec"] == {"namespace": "dev"}


def test_a_user_without_rights_learns_what_is_unknown(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("definition", "pods", "lease", "bindings", "rules", "gateway", "resources"):
        (cluster / name).unlink()
    assert run_command_line(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "? operator" in out
    assert "ask for the ClusterRole aerie-view" in out


def test_an_unreachable_cluster_is_an_error(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "kubectl").write_text('#!/bin/sh\necho "Unable to connect to the server: no route" >&2\nexit 1\n')
    assert run_command_line(["doctor"]) == 2
    assert "check the connection" in capsys.readouterr().err
