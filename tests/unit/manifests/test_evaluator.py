"""Objects of the evaluator."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.manifests import evaluator, naming, network
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.pod_address import find_engine_url
from tests.unit.manifests.test_objects import resource

CONFIG = PreflightJobConfig("registry/aerie:1", ("pull",))
PROMPTS = {"source": "Prompts", "prompts": {"configMap": "questions", "key": "q.jsonl"}}
URL = "http://10.0.0.7:8000"
ENGINE_POD = {"spec": {"containers": [{"name": "engine"}]}}
GATEWAY = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}


def shadowed(shadow: dict[str, Any], **rollout: Any) -> SpeculativeDeployment:
    return resource(rollout={"analysis": {"shadow": shadow}, **rollout})


def test_the_pod_is_restricted_and_no_service_of_engines_selects_it() -> None:
    document = evaluator.build_evaluator_deployment(shadowed(PROMPTS), ENGINE_POD, URL, 8.0, CONFIG)
    template = document["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["args"] == [
        "evaluator",
        "--engine=http://10.0.0.7:8000",
        "--window-seconds=8",
        "--port=8000",
        "--prompts=/etc/aerie-prompts/q.jsonl",
    ]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert template["spec"]["volumes"][0]["configMap"] == {"name": "questions", "items": [{"key": "q.jsonl", "path": "q.jsonl"}]}
    assert naming.NAME_LABEL not in template["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_it_inherits_what_the_cluster_requires_of_pods() -> None:
    engine_pod = {
        "spec": {
            "containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
            "nodeSelector": {"pool": "serving"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}, {"name": "pull"}],
            "serviceAccountName": "engines",
            "affinity": {"nodeAffinity": {}},
            "hostNetwork": True,
        }
    }
    pod = evaluator.build_evaluator_deployment(shadowed(PROMPTS), engine_pod, URL, 8.0, CONFIG)["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "serving"}, [{"key": "nvidia.com/gpu", "operator": "Exists"}])
    assert pod["imagePullSecrets"] == [{"name": "pull"}, {"name": "registry"}]
    assert pod.keys().isdisjoint({"serviceAccountName", "affinity", "hostNetwork"})
    assert "nvidia.com/gpu" not in str(pod["containers"])


def test_the_api_key_of_the_engine_is_mounted_and_never_written() -> None:
    variable = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "engine"}}}
    engine_pod = {"spec": {"containers": [{"name": "engine", "env": [variable]}]}}
    document = evaluator.build_evaluator_deployment(shadowed({"source": "Mirror"}, traffic=GATEWAY), engine_pod, URL, 8.0, CONFIG)
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--engine-key-file=/etc/aerie-engine-key/key" in container["args"]
    assert container["volumeMounts"] == [{"name": "engine-key", "mountPath": "/etc/aerie-engine-key", "readOnly": True}]
    assert pod["volumes"] == [
        {"name": "engine-key", "secret": {"secretName": "keys", "items": [{"key": "engine", "path": "key"}]}}
    ]
    assert "env" not in container
    plain = {"spec": {"containers": [{"name": "engine", "args": ["--api-key=plain-text"]}]}}
    document = evaluator.build_evaluator_deployment(shadowed(PROMPTS), plain, URL, 8.0, CONFIG)
    assert "plain-text" not in str(document)
    assert "engine-key" not in str(document)


def test_two_engines_are_compared_by_a_token_of_the_operator() -> None:
    engine = {"image": "vllm/vllm-openai:v0.33.0", "args": ["--scheduling-policy", "priority", "--generation-config=vllm"]}
    plain, tuned = (
        evaluator.build_paired_evaluator_deployment(each, ENGINE_POD, ["http://10.0.0.7:8000"], ["http://10.0.0.8:8000"], CONFIG)
        for each in (shadowed(PROMPTS), resource(engine=engine, rollout={"analysis": {"shadow": PROMPTS}}))
    )
    pod = plain["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = [
        "evaluator",
        "--canary=http://10.0.0.7:8000",
        "--control=http://10.0.0.8:8000",
        "--token-file=/etc/aerie-token/token",
        "--port=8000",
        "--prompts=/etc/aerie-prompts/q.jsonl",
    ]
    assert container["args"] == arguments
    assert pod["volumes"][0] == {"name": "token", "secret": {"secretName": "chat-aerie-evaluator-token"}}
    mounts = {"token": "/etc/aerie-token", "prompts": "/etc/aerie-prompts"}
    assert container["volumeMounts"] == [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounts.items()]
    (container,) = tuned["spec"]["template"]["spec"]["containers"]
    assert set(container["args"]) - set(arguments) == {"--priority=1000000", "--neutral-defaults"}


def test_the_evaluator_of_two_engines_inherits_from_the_pod_of_the_canary() -> None:
    variable = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "engine"}}}
    canary_pod = {
        "spec": {
            "containers": [{"name": "engine", "env": [variable]}],
            "nodeSelector": {"pool": "serving"},
            "imagePullSecrets": [{"name": "registry"}],
        }
    }
    document = evaluator.build_paired_evaluator_deployment(shadowed(PROMPTS), canary_pod, [URL], [URL], CONFIG)
    pod = document["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"pool": "serving"}, [{"name": "pull"}, {"name": "registry"}])
    assert "--engine-key-file=/etc/aerie-engine-key/key" in pod["containers"][0]["args"]
    assert [volume["name"] for volume in pod["volumes"]] == ["token", "prompts", "engine-key"]


def test_a_route_mirrors_requests_to_its_service() -> None:
    mirrored = shadowed({"source": "Mirror"}, traffic=GATEWAY)
    service = evaluator.build_evaluator_service(mirrored)
    deployment = evaluator.build_evaluator_deployment(mirrored, ENGINE_POD, URL, 8.0, CONFIG)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (rule,) = network.build_http_route(mirrored, {"stable": 100}, service["metadata"]["name"])["spec"]["rules"]
    assert rule["filters"] == [{"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "chat-evaluator", "port": 80}}}]
    (rule,) = network.build_http_route(mirrored, {"stable": 100})["spec"]["rules"]
    assert "filters" not in rule


@pytest.mark.parametrize(
    ("address", "url"),
    [("10.0.0.7", "http://10.0.0.7:8000"), ("fd00::7", "http://[fd00::7]:8000"), ("", None), (None, None)],
)
def test_engine_url(address: str | None, url: str | None) -> None:
    container = {"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}
    assert find_engine_url({"spec": {"containers": [container]}, "status": {"podIP": address}}) == url
    assert find_engine_url({"spec": {"containers": [{"name": "engine"}]}, "status": {"podIP": "10.0.0.7"}}) is None
