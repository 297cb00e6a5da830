"""Objects of the recorder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.manifests import naming, network, recorder
from aerie.manifests.preflight_job import PreflightJobConfig
from tests.unit.manifests.test_objects import resource

CONFIG = PreflightJobConfig("registry/aerie:1", ("pull",))
CONSENT = {"confirmed": True, "basis": "terms of service, section 4"}
CLAIM: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "prompts"}}
BUCKET: dict[str, Any] = {"objectStore": {"bucket": "prompts", "credentialsSecretRef": {"name": "keys"}}}


def captured(storage: dict[str, Any], **capture: Any) -> SpeculativeDeployment:
    return resource(capture={"consent": CONSENT, "storage": storage, **capture})


def pod_of(document: SpeculativeDeployment) -> dict[str, Any]:
    assert document.spec.capture is not None
    built = recorder.build_recorder_deployment(document, document.spec.capture, CONFIG)
    pod: dict[str, Any] = built["spec"]["template"]["spec"]
    return pod


def arguments_of(document: SpeculativeDeployment) -> list[str]:
    return [argument.replace("$$", "$") for argument in pod_of(document)["containers"][0]["args"]]


def test_the_pod_is_restricted_and_no_service_of_engines_selects_it() -> None:
    document = captured(CLAIM)
    assert document.spec.capture is not None
    built = recorder.build_recorder_deployment(document, document.spec.capture, CONFIG)
    template = built["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["args"] == [
        "recorder",
        "--folder=/var/lib/aerie-capture/chat",
        "--rate=0.01",
        "--max-per-minute=60",
        "--retention-seconds=604800",
        "--max-bytes=5368709120",
        "--port=8000",
    ]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"] == [{"name": "storage", "mountPath": "/var/lib/aerie-capture"}]
    assert pod["volumes"] == [{"name": "storage", "persistentVolumeClaim": {"claimName": "prompts"}}]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert naming.NAME_LABEL not in template["metadata"]["labels"]
    assert built["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    service = recorder.build_recorder_service(document)
    assert service["metadata"]["name"] == built["metadata"]["name"] == "chat-recorder"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_the_retention_is_exact() -> None:
    assert "--retention-seconds=12345678" in arguments_of(captured(CLAIM, retention={"duration": "3429h21m18s"}))


def test_pod_follows_the_engines_scheduling_alone() -> None:
    spec = {
        "nodeSelector": {"pool": "serving"},
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "engines",
        "volumes": [{"name": "theirs", "hostPath": {"path": "/"}}],
    }
    engine = {"image": "vllm/vllm-openai:v0.33.0", "podTemplate": {"spec": spec}}
    pod = pod_of(resource(engine=engine, capture={"consent": CONSENT, "storage": CLAIM}))
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "serving"}, [{"operator": "Exists"}])
    assert pod["imagePullSecrets"] == [{"name": "pull"}, {"name": "registry"}]
    assert [volume["name"] for volume in pod["volumes"]] == ["storage"]
    assert "serviceAccountName" not in pod


def test_bucket_has_its_credentials_from_the_secret() -> None:
    storage = {"objectStore": BUCKET["objectStore"] | {"prefix": "a/b", "endpoint": "http://minio:9000", "region": "eu-1"}}
    pod = pod_of(captured(storage))
    (container,) = pod["containers"]
    assert container["args"][-4:] == ["--bucket=prompts", "--prefix=a/b/chat", "--region=eu-1", "--endpoint=http://minio:9000"]
    assert [(item["name"], item["valueFrom"]["secretKeyRef"]) for item in container["env"]] == [
        ("AWS_ACCESS_KEY_ID", {"name": "keys", "key": "AWS_ACCESS_KEY_ID"}),
        ("AWS_SECRET_ACCESS_KEY", {"name": "keys", "key": "AWS_SECRET_ACCESS_KEY"}),
    ]
    assert pod["volumes"] == [{"name": "storage", "emptyDir": {"sizeLimit": "128Mi"}}]


def test_patterns_survive_the_expansion_of_arguments() -> None:
    patterns = [{"pattern": "$(HOME)|a$", "replacement": "$$(b)"}]
    document = captured(CLAIM, redaction={"patterns": patterns})
    (redact,) = [argument for argument in arguments_of(document) if argument.startswith("--redact=")]
    assert json.loads(redact.removeprefix("--redact=")) == patterns
    written = pod_of(document)["containers"][0]["args"]
    assert [argument for argument in written if "$" in argument.replace("$$", "")] == []


def test_hook_is_a_container_without_the_storage() -> None:
    hook = {"image": "registry/redact:1", "args": ["--fast"], "port": 9000, "path": "/r", "timeout": "1500ms"}
    hook |= {"env": [{"name": "A", "value": "b"}], "resources": {"limits": {"memory": "1Gi"}}}
    document = captured(CLAIM, redaction={"hook": hook})
    pod = pod_of(document)
    container = pod["containers"][1]
    assert (container["name"], container["image"], container["args"]) == ("hook", "registry/redact:1", ["--fast"])
    assert (container["env"], container["resources"]) == (
        [{"name": "A", "value": "b"}],
        {"limits": {"memory": "1Gi"}, "claims": []},
    )
    assert "volumeMounts" not in container
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {"--hook-url=http://127.0.0.1:9000/r", "--hook-timeout-seconds=1.5"} <= set(arguments_of(document))


@pytest.mark.parametrize(("size", "expected"), [("64Mi", 2**26), ("10Gi", 10 * 2**30), ("2Ti", 2**41)])
def test_sizes(size: str, expected: int) -> None:
    assert f"--max-bytes={expected}" in arguments_of(captured(CLAIM, retention={"maxSize": size}))


def test_folder_of_the_claim() -> None:
    storage = {"persistentVolumeClaim": {"claimName": "prompts", "path": "team/a/"}}
    assert "--folder=/var/lib/aerie-capture/team/a/chat" in arguments_of(captured(storage))


def test_route_mirrors_to_the_recorder() -> None:
    traffic = {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}
    route = network.build_http_route(resource(rollout={"traffic": traffic}), {"stable": 100}, "chat-recorder")
    (rule,) = route["spec"]["rules"]
    backend = {"name": "chat-recorder", "port": 80}
    assert rule["filters"] == [{"type": "RequestMirror", "requestMirror": {"backendRef": backend}}]


@pytest.mark.parametrize(
    "capture",
    [
        {"consent": {**CONSENT, "confirmed": False}, "storage": CLAIM},
        {"consent": {"basis": "terms of service"}, "storage": CLAIM},
        {"storage": CLAIM},
        {"consent": CONSENT},
        {"consent": CONSENT, "storage": {}},
        {"consent": CONSENT, "storage": CLAIM | BUCKET},
    ],
)
def test_capture_without_consent_or_storage_is_no_capture(capture: dict[str, Any]) -> None:
    with pytest.raises(ResourceError, match=r"spec\.capture"):
        resource(capture=capture)
