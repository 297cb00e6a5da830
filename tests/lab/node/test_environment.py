"""Command, arguments, variables and working directory of a container."""

from __future__ import annotations

import pytest

from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import config_map, pod, python, read_termination_json

REPORT_SCRIPT = """
import json, os, sys
told = {"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}
open("/dev/termination-log", "w").write(json.dumps(told))
"""
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "letters"}, "stringData": {"a": "alpha", "b": "beta"}}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "my-model"},
    "spec": {"ports": [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]},
}


@pytest.fixture(autouse=True)
def _objects(namespace: Namespace) -> None:
    namespace.apply(config_map("numbers", one="1", two="2"), SECRET, SERVICE)


def test_environment_arguments_and_folder_of_a_container(namespace: Namespace) -> None:
    def field(path: str) -> dict[str, object]:
        return {"fieldRef": {"fieldPath": path}}

    container = python(REPORT_SCRIPT, args=["--model=$(MODEL)", "$(UNKNOWN)", "$$(MODEL)", "$(HOME)"], workingDir="/made/for/it")
    container["resources"] = {"requests": {"cpu": "250m"}, "limits": {"memory": "64Mi", "nvidia.com/gpu": "1"}}
    container["envFrom"] = [
        {"configMapRef": {"name": "numbers"}, "prefix": "N_"},
        {"secretRef": {"name": "letters"}},
        {"configMapRef": {"name": "absent", "optional": True}},
    ]
    container["env"] = [
        {"name": "MODEL", "value": "m-$(N_one)-$(LATER)"},
        {"name": "LATER", "value": "later"},
        {"name": "a", "value": "overridden"},
        {"name": "POD", "valueFrom": field("metadata.name")},
        {"name": "NAMESPACE", "valueFrom": field("metadata.namespace")},
        {"name": "UID", "valueFrom": field("metadata.uid")},
        {"name": "NODE", "valueFrom": field("spec.nodeName")},
        {"name": "ACCOUNT", "valueFrom": field("spec.serviceAccountName")},
        {"name": "IP", "valueFrom": field("status.podIP")},
        {"name": "HOST_IP", "valueFrom": field("status.hostIP")},
        {"name": "LABEL", "valueFrom": field("metadata.labels['app']")},
        {"name": "ANNOTATION", "valueFrom": field("metadata.annotations['note']")},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
        {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "NODE_CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "TWO", "valueFrom": {"configMapKeyRef": {"name": "numbers", "key": "two"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "letters", "key": "b"}}},
        {"name": "OPTIONAL", "valueFrom": {"configMapKeyRef": {"name": "numbers", "key": "three", "optional": True}}},
    ]
    namespace.apply(pod("told", container, metadata={"annotations": {"note": "x=1"}}, restartPolicy="Never"))
    environment_pod = namespace.wait_until_phase("told", "Succeeded")
    report = read_termination_json(environment_pod)
    assert report["arguments"] == ["--model=m-1-$(LATER)", "$(UNKNOWN)", "$(MODEL)", "$(HOME)"]
    assert report["folder"] == "/made/for/it"
    service = namespace.get("service", "my-model")["spec"]["clusterIP"]
    expected = {
        "MODEL": "m-1-$(LATER)",
        "N_one": "1",
        "N_two": "2",
        "a": "overridden",
        "b": "beta",
        "POD": "told",
        "NAMESPACE": namespace.name,
        "UID": environment_pod["metadata"]["uid"],
        "NODE": environment_pod["spec"]["nodeName"],
        "ACCOUNT": "default",
        "IP": environment_pod["status"]["podIP"],
        "HOST_IP": environment_pod["status"]["hostIP"],
        "LABEL": "told",
        "ANNOTATION": "x=1",
        "CPU": "250",
        "MEMORY": "64",
        "NODE_CPU": "32",
        "TWO": "2",
        "B": "beta",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT_HTTPS": "443",
        "MY_MODEL_SERVICE_HOST": service,
        "MY_MODEL_SERVICE_PORT": "8000",
        "MY_MODEL_SERVICE_PORT_METRICS": "9000",
        "MY_MODEL_PORT_9000_TCP_ADDR": service,
        "HOSTNAME": "told",
    }
    assert {name: report["environment"].get(name) for name in expected} == expected
    assert "OPTIONAL" not in report["environment"]


def test_without_service_links_only_the_api_server_has_variables(namespace: Namespace) -> None:
    namespace.apply(pod("unlinked", python(REPORT_SCRIPT), enableServiceLinks=False, restartPolicy="Never"))
    environment = read_termination_json(namespace.wait_until_phase("unlinked", "Succeeded"))["environment"]
    assert "KUBERNETES_SERVICE_HOST" in environment
    assert not [name for name in environment if name.startswith("MY_MODEL")]
