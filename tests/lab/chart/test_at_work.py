"""The installed operator works with exactly the permissions of the chart."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab, process
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace
from tests.nightly import at_night

Release = Callable[..., contextlib.AbstractContextManager[None]]

RESOURCE = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: chat}
spec:
  model: {source: {huggingFace: {repo: a/b, revision: 0e9e39f249a16976918f6564b8830bc894c89659}}}
  engine: {image: "vllm/vllm-openai:v0.33.0"}
"""

DRAFTER = """spec:
  drafter: {source: {huggingFace: {repo: a/c, revision: 0e9e39f249a16976918f6564b8830bc894c89659}}}"""

IN_PLACE_RESOURCE = """
apiVersion: aerie.dev/v1alpha1
kind: SpeculativeDeployment
metadata: {name: chat}
spec:
  replicas: 1
  model: {source: {persistentVolumeClaim: {claimName: models, path: target}}}
  drafter: {source: {persistentVolumeClaim: {claimName: models, path: eagle3}}}
  engine: {image: "vllm/vllm-openai:v0.33.0"}
  rollout: {preflight: {mode: "Off"}}
"""
TOKEN_SECRET = "chat-aerie-drafter-token"

ENTRY = """
targets = ["a/b"]
kind = "eagle3.1"
repo = "a/c"
revision = "0e9e39f249a16976918f6564b8830bc894c89659"
"""


@pytest.mark.parametrize("scope", ["all", "listed"])
def test_operator_works_with_its_permissions_and_catalog(
    lab: Lab, namespace: Namespace, chart: Path, release: Release, scope: str, tmp_path: Path
) -> None:
    """The resource names no drafter: preflight gets that of the chart's catalog."""
    (tmp_path / "entry").write_text(ENTRY)
    helm_arguments = ["--set-file", f"catalog.mine={tmp_path / 'entry'}"]
    helm_arguments += ["--set", f"namespaces={{{namespace.name}}}"] if scope == "listed" else []
    with new_namespace(lab, "aerie-system") as home, release(home.name, chart, *helm_arguments):
        (pod, *_) = pods = home.list_all("pods", "app.kubernetes.io/name=aerie")
        for target in (home, namespace):
            target.apply(RESOURCE)
        (job, *_) = wait_until(lambda: namespace.list_all("jobs", "aerie.dev/name=chat"), "the preflight Job of the resource")
        chat = namespace.wait_until("specdep", "chat", lambda item: item.get("status", {}).get("conditions"), "a status")

        (owner,) = job["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("SpeculativeDeployment", chat["metadata"]["uid"], True)
        assert images(job["spec"]["template"]) == images(pod)
        (drafter,) = chat["status"]["selectedDrafters"]
        assert (drafter["target"], drafter["repo"], drafter["kind"], drafter["inUse"]) == ("a/b", "a/c", "EAGLE 3.1", False)
        resource_json = namespace.get("configmap", job["metadata"]["name"])["data"]["resource.json"]
        assert json.loads(resource_json)["spec"]["drafter"]["source"]["huggingFace"]["repo"] == "a/c"
        if scope == "all":
            home.wait_until("specdep", "chat", lambda item: "status" in item, "a status in the other namespace")
        else:
            assert "status" not in home.get("specdep", "chat")
        for operator_pod in pods:
            assert "forbidden" not in home.kubectl("logs", operator_pod["metadata"]["name"])


@pytest.mark.parametrize("scope", ["all", at_night("listed")])
def test_tokens_are_created_and_no_secret_but_the_key_is_read(
    lab: Lab, namespace: Namespace, chart: Path, release: Release, scope: str
) -> None:
    helm_arguments = ["--set", f"namespaces={{{namespace.name}}}"] if scope == "listed" else []
    with new_namespace(lab, "aerie-system") as home, release(home.name, chart, *helm_arguments):
        namespace.apply(IN_PLACE_RESOURCE)
        wait_until(lambda: namespace.exists("secret", TOKEN_SECRET), "the Secret with the token")
        chat, secret = namespace.get("specdep", "chat"), namespace.get("secret", TOKEN_SECRET)
        (owner,) = secret["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("SpeculativeDeployment", chat["metadata"]["uid"], True)
        (deployment,) = wait_until(lambda: namespace.list_all("deployments"), "the Deployment of the pods")
        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        assert volumes["aerie-token"]["secret"]["secretName"] == TOKEN_SECRET

        user = f"--as=system:serviceaccount:{home.name}:aerie"
        assert home.kubectl("get", "secret", "aerie-drafter-key", user)
        home.kubectl("create", "secret", "generic", "another", "--from-literal=a=b")
        for target, *call in (
            (namespace, "get", "secret", TOKEN_SECRET),
            (namespace, "get", "secrets"),
            (namespace, "patch", "secret", TOKEN_SECRET, '--patch={"metadata":{"labels":{"a":"b"}}}'),
            (namespace, "delete", "secret", TOKEN_SECRET),
            (home, "get", "secret", "another"),
            (home, "get", "secrets"),
            (home, "delete", "secret", "aerie-drafter-key"),
        ):
            with pytest.raises(LabError, match="forbidden"):
                target.kubectl(*call, user)

        key = home.get("secret", "aerie-drafter-key")["data"]
        home.kubectl("rollout", "restart", "deployment/aerie")
        home.wait_for_rollout("aerie")
        namespace.kubectl("delete", "secret", TOKEN_SECRET)
        namespace.kubectl("patch", "specdep", "chat", "--type=merge", '--patch={"spec":{"replicas":2}}')
        wait_until(lambda: namespace.exists("secret", TOKEN_SECRET), "the Secret is created again")
        assert namespace.get("secret", TOKEN_SECRET)["data"] == secret["data"]
        assert home.get("secret", "aerie-drafter-key")["data"] == key
        for operator_pod in home.list_all("pods", "app.kubernetes.io/name=aerie"):
            assert "forbidden" not in home.kubectl("logs", operator_pod["metadata"]["name"])

        namespace.kubectl("delete", "specdep", "chat")
        namespace.wait_until_deleted("secret", TOKEN_SECRET)


def test_namespace_without_permissions_blocks_no_other(lab: Lab, namespace: Namespace, chart: Path, release: Release) -> None:
    """The operator restarts without permissions in one of its namespaces. It manages the other one for longer than Kopf tolerates
    rejections, and both when the permissions are restored."""
    with contextlib.ExitStack() as stack:
        home, forbidden_namespace = (stack.enter_context(new_namespace(lab, label)) for label in ("aerie-system", "lost"))
        helm_arguments = ["--set", f"namespaces={{{namespace.name},{forbidden_namespace.name}}}", "--set", "replicas=1"]
        stack.enter_context(release(home.name, chart, *helm_arguments))
        binding = forbidden_namespace.get("rolebinding", "aerie")
        forbidden_namespace.kubectl("delete", "rolebinding", "aerie")
        home.kubectl("rollout", "restart", "deployment/aerie")
        home.wait_for_rollout("aerie")
        (pod,) = (
            operator_pod
            for operator_pod in home.list_all("pods", "app.kubernetes.io/name=aerie")
            if "deletionTimestamp" not in operator_pod["metadata"]
        )
        for target in (namespace, forbidden_namespace):
            target.apply(RESOURCE.replace("spec:", DRAFTER))
        wait_until(lambda: namespace.list_all("jobs", "aerie.dev/name=chat"), "work in the other namespace")

        def fetch(port: int, path: str) -> str:
            url = f"http://{pod['status']['podIP']}:{port}{path}"
            code = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"
            inside = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(lab.folder))]
            return subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

        ready = fetch(8081, "/readyz")
        assert ready.startswith("ready\n")
        assert f"SpeculativeDeployments of namespace {forbidden_namespace.name} cannot be listed" in ready
        list_failed_metric = f'aerie_list_failed{{kind="SpeculativeDeployment",namespace="{forbidden_namespace.name}"}}'
        assert f"{list_failed_metric} 1.0" in fetch(8080, "/metrics")
        phase_metric = f'aerie_resource_phase{{name="chat",namespace="{namespace.name}",phase="Preflight"}} 1.0'
        wait_until(lambda: phase_metric in fetch(8080, "/metrics"), "the leader exports the resource's phase")

        def count_forbidden_requests() -> int:
            match = re.search(
                r'^aerie_kube_api_requests_total{code="403",verb="GET"} (\S+)', fetch(8080, "/metrics"), re.MULTILINE
            )
            return int(float(match[1])) if match else 0

        wait_until(lambda: count_forbidden_requests() >= 7, "two minutes of rejections", timeout_seconds=240, interval_seconds=2)
        namespace.kubectl("delete", "job", "-l", "aerie.dev/name=chat", "--wait=true")
        wait_until(lambda: namespace.list_all("jobs", "aerie.dev/name=chat"), "it is still at work")
        assert not forbidden_namespace.list_all("jobs", "aerie.dev/name=chat")

        forbidden_namespace.apply(
            {key: value for key, value in binding.items() if key != "metadata"} | {"metadata": {"name": "aerie"}}
        )
        wait_until(
            lambda: forbidden_namespace.list_all("jobs", "aerie.dev/name=chat"),
            "work in the namespace that is back",
            timeout_seconds=180,
        )
        assert f"{list_failed_metric} 0.0" in fetch(8080, "/metrics")
        assert fetch(8081, "/readyz") == "ready\n"
        (current_pod,) = home.list_all("pods", "app.kubernetes.io/name=aerie")
        assert current_pod["metadata"]["uid"] == pod["metadata"]["uid"]
        assert [container["restartCount"] for container in current_pod["status"]["containerStatuses"]] == [0]
        log = home.kubectl("logs", current_pod["metadata"]["name"])
        assert log.count("cannot be listed") == log.count("can be listed again") == 1
        assert "will retry" not in log


def images(pod: dict[str, Any]) -> list[str]:
    return [container["image"] for container in pod["spec"]["containers"]]
