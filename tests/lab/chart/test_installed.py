"""The chart installed with its defaults, under the strictest Pod Security Standard: pods run with sufficient permissions."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_lab.cluster import Lab, process
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace

May = Callable[..., bool]
Release = Callable[..., contextlib.AbstractContextManager[None]]
SPECDEPS = "aerie.dev/speculativedeployments"
CHILDREN = (
    "apps/deployments",
    "/services",
    "/configmaps",
    "policy/poddisruptionbudgets",
    "batch/jobs",
    "gateway.networking.k8s.io/httproutes",
)


@pytest.fixture(scope="module")
def home(lab: Lab, chart: Path, release: Release) -> Iterator[Namespace]:
    """A restricted namespace with a release `aerie` in it, ready."""
    with new_namespace(lab, "aerie-system") as namespace:
        lab.kubectl("label", "namespace", namespace.name, "pod-security.kubernetes.io/enforce=restricted")
        with release(namespace.name, chart):
            yield namespace


@pytest.fixture(scope="module")
def operator(home: Namespace) -> str:
    """The operator's user."""
    return f"system:serviceaccount:{home.name}:aerie"


def pods(home: Namespace) -> list[dict[str, Any]]:
    return home.list_all("pods", "app.kubernetes.io/name=aerie")


def test_two_restricted_pods_run_on_different_nodes(home: Namespace) -> None:
    home.wait_for_rollout("aerie")
    operator_pods = pods(home)
    assert len(operator_pods) == 2
    assert len({pod["spec"]["nodeName"] for pod in operator_pods}) == 2
    assert {pod["metadata"]["labels"]["app.kubernetes.io/instance"] for pod in operator_pods} == {"aerie"}
    budget = home.wait_until("pdb", "aerie", lambda item: item["status"].get("currentHealthy") == 2, "both count for the budget")
    assert budget["status"]["disruptionsAllowed"] == 1


def test_leader_holds_the_lease_of_the_release(home: Namespace) -> None:
    lease = home.wait_until("lease", "aerie", lambda item: item["spec"].get("holderIdentity"), "a leader")
    assert any(lease["spec"]["holderIdentity"].startswith(pod["metadata"]["name"]) for pod in pods(home))


def test_service_selects_the_metrics_port(home: Namespace) -> None:
    def find_metrics_urls() -> list[str]:
        slices = home.list_all("endpointslices", "kubernetes.io/service-name=aerie-metrics")
        ports = [port["port"] for item in slices for port in item["ports"]]
        urls = [f"http://{endpoint['addresses'][0]}:{ports[0]}" for item in slices for endpoint in item["endpoints"] or []]
        return urls if len(urls) == 2 else []

    for url in wait_until(find_metrics_urls, "both pods are behind the Service"):
        assert "# TYPE " in fetch_inside_the_lab(home.lab, f"{url}/metrics")


def fetch_inside_the_lab(lab: Lab, url: str) -> str:
    """Return the response to a GET from the lab's own network."""
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
    command = [
        sys.executable,
        "-m",
        "aerie_lab.sandbox.inside",
        str(process.find_lab_pid(lab.folder)),
        sys.executable,
        "-c",
        code,
        url,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize("resource", CHILDREN)
def test_operator_may_manage_children_everywhere(may: May, operator: str, resource: str) -> None:
    verbs = {"get", "list", "watch", "create", "patch", "delete"}
    assert {verb for verb in (*verbs, "update", "deletecollection") if may(operator, verb, resource, "default")} == verbs


@pytest.mark.parametrize(
    ("resource", "verbs"),
    [
        (SPECDEPS, {"get", "list", "watch"}),
        (f"{SPECDEPS}/status", {"patch"}),
        (f"{SPECDEPS}/finalizers", {"update"}),
        ("/pods", {"get", "list", "watch"}),
        ("/pods/log", {"get"}),
        ("/pods/exec", set()),
        ("/secrets", {"create"}),
        ("/serviceaccounts", set()),
        ("/nodes", {"get"}),
        ("/nodes/status", set()),
        ("/nodes/proxy", set()),
        ("/namespaces", set()),
        ("apps/daemonsets", set()),
        ("events.k8s.io/events", {"list", "create", "patch"}),
        ("rbac.authorization.k8s.io/roles", set()),
        ("apiextensions.k8s.io/customresourcedefinitions", set()),
        ("coordination.k8s.io/leases", set()),
    ],
)
def test_operator_has_no_other_permissions(may: May, operator: str, resource: str, verbs: set[str]) -> None:
    all_verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
    assert {verb for verb in all_verbs if may(operator, verb, resource, "default")} == verbs


def test_operator_has_one_lease_in_its_namespace(may: May, operator: str, home: Namespace) -> None:
    assert may(operator, "create", "coordination.k8s.io/leases", home.name)
    for verb in ("get", "update"):
        assert may(operator, verb, "coordination.k8s.io/leases", home.name, "aerie")
        assert not may(operator, verb, "coordination.k8s.io/leases", home.name, "another")


def test_operator_reads_its_own_key_and_no_other_secret(may: May, operator: str, home: Namespace) -> None:
    all_verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

    def allowed_verbs(name: str) -> set[str]:
        return {verb for verb in all_verbs if may(operator, verb, "/secrets", home.name, name)}

    assert (allowed_verbs("aerie-drafter-key"), allowed_verbs("another")) == ({"create", "get"}, {"create"})


@pytest.mark.parametrize(
    ("role", "verbs"),
    [
        ("view", {"get", "list", "watch"}),
        ("edit", {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}),
        ("admin", {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}),
    ],
)
@pytest.mark.usefixtures("home")
def test_cluster_roles_cover_the_resource(may: May, namespace: Namespace, role: str, verbs: set[str]) -> None:
    namespace.kubectl("create", "rolebinding", "one", f"--clusterrole={role}", "--user=somebody")
    wait_until(lambda: may("somebody", "get", SPECDEPS, namespace.name), "the controller has aggregated the roles")
    all_verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

    def allowed_verbs(resource: str = SPECDEPS) -> set[str]:
        return {verb for verb in all_verbs if may("somebody", verb, resource, namespace.name)}

    wait_until(lambda: allowed_verbs() == verbs, f"{role} may {sorted(verbs)}")
    assert allowed_verbs(f"{SPECDEPS}/scale") == {"get"} | (set() if role == "view" else {"update", "patch"})
    assert allowed_verbs(f"{SPECDEPS}/status") == {"get"}


def test_commands_of_the_notes_work(home: Namespace) -> None:
    notes = home.lab.helm("get", "notes", "aerie", "--namespace", home.name)
    assert f"\n  helm test aerie --namespace {home.name}\n" in notes
    secret, watch, explain, *plugin = (line.split()[1:] for line in notes.splitlines() if line.startswith("  kubectl "))
    home.kubectl(*secret, "--dry-run=server")
    _, manifest, _ = re.split(r"^kubectl apply -f - <<'END'$|^END$", notes, flags=re.MULTILINE)
    wait_until(lambda: "FIELDS" in home.lab.kubectl(*explain), "the resource is explained")
    assert "chat" in home.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=manifest)
    assert watch == ["get", "specdep", "chat", "--watch"]
    assert [command[0] for command in plugin] == ["aerie", "aerie"]


def test_helm_test_passes_and_leaves_nothing(home: Namespace) -> None:
    output = home.lab.helm("test", "aerie", "--namespace", home.name, "--timeout=180s")
    assert "Phase:" in output
    assert "Succeeded" in output
    assert home.list_all("pods", "app.kubernetes.io/name=aerie-test") == []


def test_example_of_the_chart_is_accepted(home: Namespace, chart: Path) -> None:
    chart_metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    for example in yaml.safe_load(chart_metadata["annotations"]["artifacthub.io/crdsExamples"]):
        home.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(example))
