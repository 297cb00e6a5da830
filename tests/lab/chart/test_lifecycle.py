"""Life cycle of the chart: accepted objects, upgrades, uninstall, and permissions in listed namespaces."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_lab.cluster import Lab
from aerie_lab.testing import Namespace
from aerie_lab.testing.plugin import new_namespace

Release = Callable[..., contextlib.AbstractContextManager[None]]

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.yaml"))
DEFINITION = "speculativedeployments.aerie.dev"
# A paused resource.
PAUSED = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: chat}
spec:
  model: {source: {huggingFace: {repo: a/b, revision: 0e9e39f249a16976918f6564b8830bc894c89659}}}
  drafter: {source: {huggingFace: {repo: a/c, revision: 0e9e39f249a16976918f6564b8830bc894c89659}}}
  engine: {image: "vllm/vllm-openai:v0.33.0"}
  rollout: {paused: true}
"""


@pytest.fixture(scope="module")
def _places(lab: Lab) -> Iterator[None]:
    """The namespaces that the cases name."""
    names = ("aerie-system", "team-a", "team-b")
    lab.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names))
    yield
    lab.kubectl("delete", "namespace", *names, "--wait=false")


@pytest.mark.usefixtures("_places")
@pytest.mark.parametrize("case", CASES)
def test_server_accepts_every_object(lab: Lab, objects: Callable[..., list[dict[str, Any]]], case: str) -> None:
    # The definitions of the Prometheus operator are not in the lab, and `helm test` runs its pod after the installation.
    items = [
        item
        for item in objects(case=case)
        if not item["apiVersion"].startswith("monitoring.coreos.com/")
        and item["metadata"].get("annotations", {}).get("helm.sh/hook") != "test"
    ]
    object_list = {"apiVersion": "v1", "kind": "List", "items": items}
    text = json.dumps(object_list)
    output = lab.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert output.count("serverside-applied (server dry run)") == len(items)


def test_resources_survive_upgrade_and_uninstall(
    lab: Lab, namespace: Namespace, chart: Path, release: Release, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    shutil.copytree(chart, older)
    chart_metadata = yaml.safe_load((older / "Chart.yaml").read_text())
    (older / "Chart.yaml").write_text(yaml.safe_dump(chart_metadata | {"version": "0.0.9"}))
    helm_options = ("--namespace", namespace.name, "--wait", "--timeout=180s")

    def chart_of(kind: str, name: str) -> str:
        label: str = namespace.get(kind, name)["metadata"]["labels"]["helm.sh/chart"]
        return label

    def uid(kind: str, name: str) -> str:
        object_uid: str = namespace.get(kind, name)["metadata"]["uid"]
        return object_uid

    with release(namespace.name, older, "--set", "replicas=1"):
        namespace.apply(PAUSED)
        resource, deployment = uid("specdep", "chat"), uid("deployment", "aerie")
        assert chart_of("crd", DEFINITION) == "aerie-0.0.9"

        lab.helm("upgrade", "aerie", str(chart), *helm_options, "--set", "replicas=2")
        assert (uid("specdep", "chat"), uid("deployment", "aerie")) == (resource, deployment)
        assert chart_of("crd", DEFINITION) == chart_of("deployment", "aerie") == f"aerie-{chart_metadata['version']}"
        assert namespace.get("deployment", "aerie")["status"]["readyReplicas"] == 2

        lab.helm("uninstall", "aerie", *helm_options)
        assert uid("specdep", "chat") == resource
        remaining = lab.kubectl("get", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/name=aerie", "-o", "name")
        assert remaining == ""
        for kind in ("deployment", "role", "rolebinding", "service", "pdb", "serviceaccount"):
            assert namespace.list_all(kind, "app.kubernetes.io/name=aerie") == []

        # The same release takes the definition over again, and this time does not leave it.
        lab.helm("install", "aerie", str(chart), *helm_options, "--set", "replicas=1,crds.keep=false")
        assert uid("specdep", "chat") == resource
        lab.helm("uninstall", "aerie", *helm_options)
        assert not namespace.exists("crd", DEFINITION)


def test_permissions_are_limited_to_listed_namespaces(
    lab: Lab, namespace: Namespace, chart: Path, release: Release, may: Callable[..., bool]
) -> None:
    user = f"system:serviceaccount:{namespace.name}:aerie"
    resources = ("apps/deployments", "aerie.dev/speculativedeployments", "/pods")

    def list_permissions(*namespaces: str) -> list[bool]:
        return [may(user, "list", resource, namespace_name) for resource in resources for namespace_name in namespaces]

    with new_namespace(lab, "team-one") as first_namespace, new_namespace(lab, "team-two") as second_namespace:
        both_namespaces = ("--set", f"replicas=1,namespaces={{{first_namespace.name},{second_namespace.name}}}")
        with release(namespace.name, chart, *both_namespaces):
            assert all(list_permissions(first_namespace.name, second_namespace.name))
            assert not any(list_permissions(namespace.name, ""))
            assert not may(user, "get", "/nodes", "")

            one_namespace = ("--set", f"replicas=1,namespaces={{{second_namespace.name}}}")
            lab.helm("upgrade", "aerie", str(chart), "--namespace", namespace.name, "--wait", "--timeout=180s", *one_namespace)
            assert all(list_permissions(second_namespace.name))
            assert not any(list_permissions(first_namespace.name, namespace.name, ""))
