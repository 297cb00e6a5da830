"""Rendered manifests of the chart: snapshots of several value files, and invariants for all values. Needs Helm, and no cluster.

AERIE_SNAPSHOTS=write in the environment rewrites the snapshots.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.controller.notifications.config import read_notifications_config
from aerie.manifests import naming
from aerie.manifests.evaluator import EVALUATOR_LABEL
from aerie.manifests.recorder import RECORDER_LABEL
from aerie.rollout.status.notifications import EVENT_TYPES

HERE = Path(__file__).parent
MONITORING = "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true"
CASES = sorted(path.stem for path in (HERE / "cases").glob("*.yaml"))

Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., str]
Objects = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("case", CASES)
def test_lint(helm: Helm, chart: Path, case: str) -> None:
    completed = helm("lint", "--strict", chart, "--values", HERE / "cases" / f"{case}.yaml")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "[WARNING]" not in completed.stdout


@pytest.mark.parametrize("case", CASES)
def test_snapshot(render: Render, case: str) -> None:
    snapshot, text = HERE / "snapshots" / f"{case}.yaml", render(case=case)
    if os.environ.get("AERIE_SNAPSHOTS") == "write":
        snapshot.write_text(text)
    assert snapshot.read_text() == text, f"run again with AERIE_SNAPSHOTS=write if {snapshot.name} should change"


def test_values_of_an_earlier_release_are_enough(render: Render) -> None:
    """`helm upgrade --reuse-values` has no values that came later."""
    new_values = (
        "tracing",
        "metrics.prometheusRule.runbooks",
        *(f"networkPolicy.{name}" for name in ("tracingPeers", "tracingPorts", "objectStorePeers", "objectStorePorts")),
    )
    unset = ",".join(f"{name}=null" for name in new_values)
    assert "AerieOperatorDown" in render("--set", f"{MONITORING},networkPolicy.enabled=true,{unset}")


def test_every_snapshot_has_a_case() -> None:
    assert sorted(path.stem for path in (HERE / "snapshots").glob("*.yaml")) == CASES


def test_definition_matches_the_repository(objects: Objects, chart: Path) -> None:
    expected = yaml.safe_load((chart.parents[1] / "crds" / "aerie.dev_speculativedeployments.yaml").read_text())
    for keep, expected_annotations in (("true", {"helm.sh/resource-policy": "keep"}), ("false", {})):
        definitions = objects("--set", f"crds.keep={keep}", "--show-only", "templates/crds.yaml")
        assert [item["metadata"]["name"] for item in definitions] == ["speculativedeployments.aerie.dev"]
        assert definitions[0]["spec"] == expected["spec"]
        assert definitions[0]["metadata"].get("annotations", {}) == expected_annotations


@pytest.mark.parametrize(
    ("value", "location", "message"),
    [
        ("replicas=two", "/replicas", "got string, want integer"),
        ("replicas=-1", "/replicas", "minimum"),
        ("replica=3", "at ''", "'replica' not allowed"),
        ("image.name=aerie", "/image", "'name' not allowed"),
        ("image.digest=sha256:12", "/image/digest", "'sha256:12' does not match"),
        ("image.repository=registry.example/aerie@sha256", "/image/repository", "does not match"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy", "'Always', 'IfNotPresent', 'Never'"),
        ("imagePullSecrets[0]=registry", "/imagePullSecrets/0", "got string, want object"),
        ("preflight.imagePullSecrets={registry}", "/preflight/imagePullSecrets/0", "got string, want object"),
        ("preflight.resources.limits.cpu=one", "/preflight/resources/limits/cpu", "does not match"),
        ("preflight.image=x", "/preflight", "'image' not allowed"),
        ("admission.enabled=maybe", "/admission/enabled", "got string, want boolean"),
        ("namespaces={Team_A}", "/namespaces/0", "'Team_A' does not match"),
        ("namespaces={a,a}", "/namespaces", "items at 0 and 1 are equal"),
        ("namespaces=a", "/namespaces", "got string, want array"),
        ("catalog.mine=1", "/catalog/mine", "got number, want string"),
        ("catalog.my mine=x", "/catalog", "'my mine' not allowed"),
        ("log.level=loud", "/log/level", "'debug', 'info', 'warning', 'error'"),
        ("crds.keep=maybe", "/crds/keep", "got string, want boolean"),
        ("resources.limit.cpu=1", "/resources", "'limit' not allowed"),
        ("resources.limits.memory=512MB", "/resources/limits/memory", "does not match"),
        ("podLabels.a=1", "/podLabels/a", "got number, want string"),
        ("networkPolicy.apiServerPorts={0}", "/networkPolicy/apiServerPorts/0", "minimum"),
        ("networkPolicy.apiServerCIDRs={10.0.0.1}", "/networkPolicy/apiServerCIDRs/0", "'10.0.0.1' does not match"),
        ("networkPolicy.dnsPeers[0].pods=x", "/networkPolicy/dnsPeers/0", "'pods' not allowed"),
        ("networkPolicy.prometheusPorts={0}", "/networkPolicy/prometheusPorts/0", "minimum"),
        ("drafterKey.existingSecret=Sealed", "/drafterKey/existingSecret", "'Sealed' does not match"),
        ("prometheus.tokens[0].address=thanos:9091", "/prometheus/tokens/0", "missing property 'secret'"),
        ("prometheus.tokens[0].address=thanos:9091", "/prometheus/tokens/0/address", "'thanos:9091' does not match"),
        ("tracing.enabled=true", "tracing.endpoint is empty", "Set it to the address of the collector"),
        ("notifications.url=hooks.example", "/notifications/url", "'hooks.example' does not match"),
        ("notifications.receivers.Team.type=slack", "/notifications/receivers", "'Team' not allowed"),
        ("notifications.receivers.a.type=mail", "/notifications/receivers/a/type", "'cloudevents', 'slack', 'teams', 'webhook'"),
        ("notifications.receivers.a.urlFile=x", "/notifications/receivers/a", "missing property 'type'"),
        ("notifications.subscriptions[0].events={promotd}", "/notifications/subscriptions/0/events/0", "'started'"),
        ("prometheus.caBundle.file=x", "/prometheus/caBundle", "'file' not allowed"),
        ("metrics.podMonitor.interval=often", "/metrics/podMonitor/interval", "'often' does not match"),
        ("fullnameOverride=Aerie", "/fullnameOverride", "'Aerie' does not match"),
        (
            "metrics.prometheusRule.enabled=true",
            "metrics.serviceMonitor.enabled is false",
            "Set metrics.serviceMonitor.enabled=true",
        ),
    ],
)
def test_invalid_value_is_rejected_and_named(helm: Helm, chart: Path, value: str, location: str, message: str) -> None:
    completed = helm("template", "aerie", chart, "--set", value)
    assert completed.returncode != 0
    assert location in completed.stderr
    assert message in completed.stderr


def test_chart_as_a_dependency(helm: Helm, chart: Path, tmp_path: Path) -> None:
    (tmp_path / "Chart.yaml").write_text(
        f"apiVersion: v2\nname: platform\nversion: 1.0.0\ndependencies: [{{name: aerie, version: 0.1.0, repository: 'file://{chart}'}}]\n"
    )
    (tmp_path / "values.yaml").write_text("global: {registry: x}\naerie: {replicas: 1}\n")
    dependency_build = helm("dependency", "build", tmp_path)
    assert dependency_build.returncode == 0, dependency_build.stderr
    completed = helm("template", "one", tmp_path, "--show-only", "charts/aerie/templates/deployment.yaml")
    assert completed.returncode == 0, completed.stderr
    assert yaml.safe_load(completed.stdout)["spec"]["replicas"] == 1
    assert yaml.safe_load(completed.stdout)["metadata"]["name"] == "one-aerie"


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_chart_as_a_conditional_dependency(helm: Helm, chart: Path, tmp_path: Path, enabled: str) -> None:
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: platform\nversion: 1.0.0\ndependencies: [{name: aerie, version: 0.1.0, "
        f"repository: 'file://{chart}', condition: aerie.enabled}}]\n"
    )
    assert helm("dependency", "build", tmp_path).returncode == 0
    completed = helm("template", "one", tmp_path, "--set", f"aerie.enabled={enabled}")
    assert completed.returncode == 0, completed.stderr
    assert ("kind: Deployment" in completed.stdout) == (enabled == "true")


def test_numeric_priority_class_is_a_string(objects: Objects) -> None:
    (operator_deployment,) = objects("--set-string", "priorityClassName=123", "--show-only", "templates/deployment.yaml")
    assert operator_deployment["spec"]["template"]["spec"]["priorityClassName"] == "123"


@pytest.mark.parametrize("release", ["1aerie", "my.aerie", "1.2", "a-release-name-of-the-53-characters-that-helm-accepts"])
def test_any_release_name_gives_valid_names(helm: Helm, chart: Path, release: str) -> None:
    completed = helm(
        "template", release, chart, "--namespace", "x", "--set", "crds.enabled=false,networkPolicy.enabled=true," + MONITORING
    )
    assert completed.returncode == 0, completed.stderr
    names = [item["metadata"]["name"] for item in yaml.safe_load_all(completed.stdout) if item]
    assert all(len(name) <= 63 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)


@pytest.mark.parametrize("case", CASES)
def test_selectors_match_the_operators_pods(objects: Objects, case: str) -> None:
    objects_by_kind = {item["kind"]: item for item in objects(case=case)}
    labels = objects_by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [objects_by_kind["Deployment"]["spec"]["selector"]["matchLabels"], objects_by_kind["Service"]["spec"]["selector"]]
    if "PodDisruptionBudget" in objects_by_kind:
        selectors.append(objects_by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    policies = [item for item in objects(case=case) if item["kind"] == "NetworkPolicy"]
    selectors += [selector for item in policies if (selector := item["spec"]["podSelector"].get("matchLabels"))]
    assert all(selector.items() <= labels.items() for selector in selectors)
    if "ServiceMonitor" in objects_by_kind:
        monitor_labels = objects_by_kind["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert monitor_labels.items() <= objects_by_kind["Service"]["metadata"]["labels"].items()


@pytest.mark.parametrize("peers", [[], [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}]])
def test_policies_of_evaluators(objects: Objects, peers: list[dict[str, Any]]) -> None:
    values = ["--set", "networkPolicy.enabled=true", "--set-json", f"networkPolicy.evaluatorPeers={json.dumps(peers)}"]
    (operator,) = (item for item in objects(*values) if item["kind"] == "NetworkPolicy")
    documents = objects(*values, "--set", "namespaces={team-a,team-b}")
    selected = [
        item for item in documents if item["kind"] == "NetworkPolicy" and RECORDER_LABEL not in str(item["spec"]["podSelector"])
    ]
    policies = {item["metadata"]["namespace"]: item for item in selected}
    assert policies.keys() == {operator["metadata"]["namespace"], "team-a", "team-b"}
    engine = {"key": naming.NAME_LABEL, "operator": "Exists"}
    evaluator = {"key": EVALUATOR_LABEL, "operator": "Exists"}
    for namespace in ("team-a", "team-b"):
        spec = policies[namespace]["spec"]
        assert spec["podSelector"] == {"matchExpressions": [evaluator]}
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        (ingress,) = spec["ingress"]
        assert ingress["ports"] == [{"port": "http"}]
        if not peers:
            assert "from" not in ingress
        else:
            own, *others = ingress["from"]
            assert own["podSelector"] == operator["spec"]["podSelector"]
            assert own["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": operator["metadata"]["namespace"]}
            assert others == peers
        dns, engines = spec["egress"]
        assert dns == next(rule for rule in operator["spec"]["egress"] if rule["ports"][0].get("protocol") == "UDP")
        assert engines == {"ports": [{"port": naming.ENGINE_PORT}], "to": [{"podSelector": {"matchExpressions": [engine]}}]}
    reached = [
        expression
        for rule in operator["spec"]["egress"]
        for peer in rule.get("to", ())
        for expression in peer.get("podSelector", {}).get("matchExpressions", ())
    ]
    assert reached == [engine, evaluator]


@pytest.mark.parametrize("peers", [[], [{"ipBlock": {"cidr": "10.9.0.0/16"}}]])
def test_policies_of_recorders(objects: Objects, peers: list[dict[str, Any]]) -> None:
    gateway = [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}]
    settings = {"evaluatorPeers": gateway, "objectStorePeers": peers, "objectStorePorts": [9000], "enabled": True}
    documents = objects("--set-json", f"networkPolicy={json.dumps(settings)}", "--set", "namespaces={team-a}")
    (spec,) = (item["spec"] for item in documents if item["kind"] == "NetworkPolicy" and RECORDER_LABEL in str(item["spec"]))
    assert spec["podSelector"] == {"matchExpressions": [{"key": RECORDER_LABEL, "operator": "Exists"}]}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"ports": [{"port": "http"}], "from": gateway}]
    if not peers:
        assert spec["egress"] == []
    else:
        dns, store = spec["egress"]
        assert {port["port"] for port in dns["ports"]} == {53}
        assert store == {"ports": [{"port": 9000}], "to": peers}


@pytest.mark.parametrize("case", CASES)
def test_permissions_have_no_wildcard_and_read_one_secret(objects: Objects, case: str) -> None:
    items = objects(case=case)
    (operator,) = (item for item in items if item["kind"] == "Deployment")
    (option,) = (
        argument
        for argument in operator["spec"]["template"]["spec"]["containers"][0]["args"]
        if argument.startswith("--drafter-key-secret=")
    )
    reads = []
    for item in items:
        for rule in item["rules"] if item["kind"] in ("Role", "ClusterRole") else ():
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                reads.append((item["kind"], item["metadata"]["namespace"], rule["resourceNames"], rule["verbs"]))
    has_roles = case != "least"
    assert reads == [("Role", "aerie-system", [option.partition("=")[2]], ["get"])] * has_roles


def test_operator_reads_the_receivers_of_the_chart(objects: Objects, chart: Path, tmp_path: Path) -> None:
    items = objects(case="everything")
    (config_map,) = (item for item in items if item["kind"] == "ConfigMap" and "config.yaml" in item["data"])
    (tmp_path / "config.yaml").write_text(config_map["data"]["config.yaml"])
    config = read_notifications_config(tmp_path / "config.yaml", "production")
    assert [receiver.name for receiver in config.receivers] == ["pager", "serving"]
    (deployment,) = (item for item in items if item["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (folder,) = (mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "notifications")
    assert f"--notifications-config={folder}/config.yaml" in pod["containers"][0]["args"]
    (volume,) = (item["projected"]["sources"] for item in pod["volumes"] if item["name"] == "notifications")
    assert volume == [
        {"secret": {"name": "receivers", "optional": True}},
        {"configMap": {"name": config_map["metadata"]["name"]}},
    ]
    schema = json.loads((chart / "values.schema.json").read_text())
    subscriptions = schema["properties"]["notifications"]["properties"]["subscriptions"]
    assert subscriptions["items"]["properties"]["events"]["items"]["enum"] == list(EVENT_TYPES)


@pytest.mark.parametrize("listed", [True, False])
def test_key_of_the_users_own_needs_no_create(objects: Objects, listed: bool) -> None:
    arguments = ["--set", "drafterKey.existingSecret=sealed", *(["--set", "namespaces={team-a}"] if listed else [])]
    roles = objects(*arguments, "--show-only", "templates/rbac.yaml")
    creators = [
        (item["kind"], item["metadata"].get("namespace"))
        for item in roles
        for rule in item.get("rules", ())
        if rule["resources"] == ["secrets"] and "create" in rule["verbs"]
    ]
    assert creators == [("Role", "team-a") if listed else ("ClusterRole", None)]
