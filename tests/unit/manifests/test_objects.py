"""Objects that Aerie creates for a resource."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, Static
from aerie.manifests import deployment, naming, network
from aerie.manifests.pod import engine_pod
from aerie.manifests.pod.pod_template_policy import PodTemplateError
from aerie.manifests.revision_hash import compute_revision
from tests.golden import Messages

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
SETTINGS = (
    Off(),
    Static(3),
    Static(4),
    Adaptive(4),
    Schedule((ScheduleTier(1, 8, 4), ScheduleTier(9, 64, 1)), 4),
    Schedule((ScheduleTier(1, 8, 4), ScheduleTier(9, 65, 1)), 4),
)
DRAFT = {"method": "eagle3", "model": "/models/drafter", "num_speculative_tokens": 3}


def resource(**spec: Any) -> SpeculativeDeployment:
    complete_spec = {
        "replicas": 4,
        "model": {"source": {"huggingFace": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": COMMIT}}},
        "engine": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=8192"]},
        "drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle31"}}},
        **spec,
    }
    document = {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": complete_spec,
    }
    return SpeculativeDeployment.from_dict(document)


def engine(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = [c for c in template["spec"]["containers"] if c["name"] == naming.ENGINE_CONTAINER]
    return dict(container)


def test_command_line_of_the_engine() -> None:
    assert engine(engine_pod.build_pod_template(resource(), DRAFT))["args"] == [
        "meta-llama/Llama-3.1-8B-Instruct",
        "--served-model-name",
        "chat",
        "--port",
        "8000",
        "--revision",
        COMMIT,
        "--shutdown-timeout",
        "105",
        "--max-model-len=8192",
        "--speculative-config",
        '{"method":"eagle3","model":"/models/drafter","num_speculative_tokens":3}',
    ]


def test_no_drafter_no_flag_and_no_volume() -> None:
    template = engine_pod.build_pod_template(resource(), None)
    assert not [argument for argument in engine(template)["args"] if "speculative" in argument]
    assert [volume["name"] for volume in template["spec"]["volumes"]] == ["cache", "shm"]


def test_claims_and_images_are_mounted_read_only() -> None:
    image = {"image": {"reference": f"registry.example/llama@sha256:{'0' * 64}", "path": "/models/llama"}}
    template = engine_pod.build_pod_template(resource(model={"source": image}), DRAFT)
    volumes = {volume.pop("name"): volume for volume in template["spec"]["volumes"]}
    assert volumes["target"]["image"]["reference"] == image["image"]["reference"]
    assert volumes["drafter"] == {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    mounts = {mount["name"]: mount for mount in engine(template)["volumeMounts"]}
    assert mounts["target"] == {"name": "target", "mountPath": "/models/target", "readOnly": True, "subPath": "models/llama"}
    assert mounts["drafter"]["subPath"] == "eagle31"
    assert engine(template)["args"][0] == "/models/target"


@pytest.mark.parametrize(("grace", "timeout"), [(None, 105), (600, 585), (20, 5), (3, 1)])
def test_shutdown_timeout_follows_the_grace_period(grace: int | None, timeout: int) -> None:
    engine_spec = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": grace}}} if grace else {}
    template = engine_pod.build_pod_template(resource(engine={"image": "vllm/vllm-openai:v0.33.0", **engine_spec}), DRAFT)
    arguments = engine(template)["args"]
    assert arguments[arguments.index("--shutdown-timeout") + 1] == str(timeout)
    assert template["spec"]["terminationGracePeriodSeconds"] == (grace or engine_pod.DEFAULT_GRACE_PERIOD_SECONDS)


def test_users_variables_take_precedence() -> None:
    engine_spec = {
        "image": "vllm/vllm-openai:v0.33.0",
        "env": [{"name": "HF_HOME", "value": "/elsewhere"}],
        "tokenSecretRef": {"name": "hub"},
        "cache": {"claimName": "cache"},
    }
    template = engine_pod.build_pod_template(resource(engine=engine_spec), DRAFT)
    environment = {variable["name"]: variable for variable in engine(template)["env"]}
    assert environment["HF_HOME"]["value"] == "/elsewhere"
    assert environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]["value"] == "3900"
    assert environment["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}} in template["spec"]["volumes"]


def test_pod_template_is_merged_except_over_reserved_labels() -> None:
    pod_template = {
        "metadata": {"labels": {"team": "chat", naming.REVISION_LABEL: "forged"}, "annotations": {"inject": "true"}},
        "spec": {"nodeSelector": {"gpu": "h200"}, "containers": [{"name": "engine", "workingDir": "/tmp"}, {"name": "log"}]},
    }
    template = engine_pod.build_pod_template(
        resource(engine={"image": "vllm/vllm-openai:v0.33.0", "podTemplate": pod_template}), DRAFT
    )
    canary = deployment.build_deployment(resource(), template, "abc", "canary", 1)
    assert canary["spec"]["template"]["metadata"] == {
        "labels": {"team": "chat", naming.NAME_LABEL: "chat", naming.REVISION_LABEL: "abc", naming.CONTROL_LABEL: "false"},
        "annotations": {"inject": "true"},
    }
    assert engine(template)["workingDir"] == "/tmp"
    assert engine(template)["image"] == "vllm/vllm-openai:v0.33.0"
    assert [c["name"] for c in template["spec"]["containers"]] == ["engine", "log"]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("restart policy", {"restartPolicy": "Never"}),
        ("engine deleted", {"containers": [{"name": "engine", "$patch": "delete"}]}),
        ("engine replaced", {"containers": [{"name": "engine", "$patch": "replace", "image": "a"}]}),
        ("containers replaced", {"containers": [{"name": "log"}, {"$patch": "replace"}]}),
        ("containers removed", {"containers": None}),
        ("args changed", {"containers": [{"name": "engine", "args": ["serve"]}]}),
        ("args removed", {"containers": [{"name": "engine", "args": None}]}),
        ("image changed", {"containers": [{"name": "engine", "image": "mine:1"}]}),
        ("port renamed", {"containers": [{"name": "engine", "ports": [{"containerPort": 8000, "name": "api"}]}]}),
        ("port moved", {"containers": [{"name": "engine", "ports": [{"containerPort": 9000, "name": "http"}]}]}),
        ("ports removed", {"containers": [{"name": "engine", "ports": None}]}),
        ("readiness probe removed", {"containers": [{"name": "engine", "readinessProbe": None}]}),
        ("startup probe removed", {"containers": [{"name": "engine", "startupProbe": None}]}),
        ("volume of the target changed", {"volumes": [{"name": "target", "emptyDir": {}}]}),
        ("volumes removed", {"volumes": None}),
        (
            "mount of the drafter changed",
            {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/models/drafter", "name": "mine"}]}]},
        ),
    ],
)
def test_pod_template_cannot_remove_what_the_engine_needs(name: str, spec: dict[str, Any], messages: Messages) -> None:
    with pytest.raises(PodTemplateError) as caught:
        engine_pod.build_pod_template(build_resource_on_claims(podTemplate={"spec": spec}), DRAFT)
    messages.check(name, str(caught.value))


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["/opt/run.sh", "vllm", "serve"]},
        {"ports": [{"containerPort": 9100, "name": "side"}]},
        {"livenessProbe": None},
        {"startupProbe": {"failureThreshold": 3}},
        {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm2"}]},
        {"env": [{"name": "A", "value": "b"}], "resources": {"limits": {"cpu": "1"}}, "lifecycle": {"preStop": None}},
    ],
)
def test_pod_template_may_change_the_rest(changes: dict[str, Any]) -> None:
    spec = {
        "restartPolicy": "Always",
        "initContainers": [{"name": "warm", "image": "a"}],
        "containers": [{"name": "engine", **changes}, {"name": "log", "image": "b", "args": ["c"]}],
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "16Gi"}}, {"name": "mine", "emptyDir": {}}],
    }
    template = engine_pod.build_pod_template(build_resource_on_claims(podTemplate={"spec": spec}), DRAFT)
    container = engine(template)
    for name, value in changes.items():
        assert (
            (name not in container)
            if value is None
            else container[name] != engine(engine_pod.build_pod_template(build_resource_on_claims(), DRAFT)).get(name)
        )
    assert [container_spec["name"] for container_spec in template["spec"]["containers"]] == ["engine", "log"]


def build_resource_on_claims(**engine_spec: Any) -> SpeculativeDeployment:
    """Return a resource whose models are volumes of the pod."""
    source = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "a"}}}
    return resource(model=source, drafter=source, engine={"image": "vllm/vllm-openai:v0.33.0", **engine_spec})


def test_promoted_canary_keeps_its_pods() -> None:
    template = engine_pod.build_pod_template(resource(), DRAFT)
    canary, stable, control = (
        deployment.build_deployment(resource(), template, "abc", arm, 1) for arm in ("canary", "stable", "control")
    )
    assert canary["metadata"]["name"] == stable["metadata"]["name"] == "chat-abc"
    assert canary["spec"] == stable["spec"], "promotion changes a label of the Deployment and nothing of its pods"
    assert control["metadata"]["name"] == "chat-abc-control"
    assert control["spec"]["selector"] != stable["spec"]["selector"]
    budget = deployment.build_disruption_budget(resource(), "abc")["spec"]["selector"]["matchLabels"]
    for arm_deployment in (canary, control):
        labels = arm_deployment["spec"]["template"]["metadata"]["labels"]
        assert arm_deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert naming.serving_selector_labels("chat", None).items() <= labels.items()
        assert (budget.items() <= labels.items()) == (arm_deployment is canary), "what a control pod loses is time alone"
    assert (
        network.build_arm_service(resource(), "control", "abc")["spec"]["selector"] == control["spec"]["selector"]["matchLabels"]
    )


def test_route_has_a_weight_for_each_arm_and_no_timeout() -> None:
    gateway = {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["chat.example.com"]}
    rollout = {"traffic": {"mode": "Gateway", "gateway": gateway}}
    route = network.build_http_route(resource(rollout=rollout), {"stable": 80, "canary": 10, "control": 10})
    assert route["spec"]["parentRefs"] == gateway["parentRefs"]
    (rule,) = route["spec"]["rules"]
    assert [(backend["name"], backend["weight"]) for backend in rule["backendRefs"]] == [
        ("chat-stable", 80),
        ("chat-canary", 10),
        ("chat-control", 10),
    ]
    assert rule["timeouts"] == {"request": "0s"}
    with pytest.raises(ValueError, match="chat has no gateway"):
        network.build_http_route(resource(), {"stable": 100})


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"image": "vllm/vllm-openai:v0.33.1"}},
        {"engine": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]}},
        {"drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}}},
        {"model": {"servedName": "other", "source": {"persistentVolumeClaim": {"claimName": "models"}}}},
    ],
)
def test_change_of_a_pod_changes_the_revision(change: dict[str, Any]) -> None:
    assert compute_revision(resource(**change), Static(3)) != compute_revision(resource(), Static(3))


def test_revision_depends_on_the_setting_and_not_on_the_rollout() -> None:
    assert len({compute_revision(resource(), setting) for setting in SETTINGS}) == len(SETTINGS)
    other = resource(replicas=7, rollout={"paused": True, "progressDeadline": "1h"}, metrics={"scrapeInterval": "5s"})
    assert compute_revision(other, Static(3)) == compute_revision(resource(), Static(3))


def test_pod_template_digest_is_unchanged() -> None:
    """If this fails, pods of new revisions are built in another way, and running pods stay as they are (pod_template.py in
    rollout/revision). Check that the operator reads both, write in the CHANGELOG who should renew their pods, and put the new
    digest here."""
    text = json.dumps(engine_pod.build_pod_template(resource(), DRAFT), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "91d5af419361"
