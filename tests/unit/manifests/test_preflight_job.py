"""The preflight Job's pod: requirements of clusters, and fields inherited from the engine and the operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api import SpeculativeDeployment
from aerie.api.engine import ResourceRequirements
from aerie.manifests import preflight_job
from aerie.manifests.pod import engine_pod
from aerie.manifests.preflight_job import PreflightJobConfig

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
SOURCES: dict[str, dict[str, Any]] = {
    "huggingFace": {"repo": "a/b", "revision": COMMIT},
    "persistentVolumeClaim": {"claimName": "models", "path": "a"},
    "image": {"reference": f"models.example/a@sha256:{'0' * 64}"},
}
ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
    "image",
}
"""Of Pod Security's profile restricted (pod-security-admission, check_restrictedVolumes.go)."""


def job(
    source: str = "huggingFace",
    runner: PreflightJobConfig = PreflightJobConfig("aerie:1"),  # noqa: B008 - frozen
    engine: dict[str, Any] | None = None,
    **pods: Any,
) -> dict[str, Any]:
    document = {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {source: SOURCES[source]}},
            "drafter": {"source": {source: SOURCES[source]}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0", "podTemplate": {"spec": pods}, **(engine or {})},
        },
    }
    resource = SpeculativeDeployment.from_dict(document)
    return preflight_job.build_preflight_job(resource, "r1", engine_pod.build_pod_template(resource, None), runner)


def variables(made: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod(made)["containers"][0]["env"]}


def mounts(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volume that is mounted for reading at each path, but for the Job's own."""
    known = {volume["name"]: volume for volume in pod(made)["volumes"]}
    found = pod(made)["containers"][0]["volumeMounts"]
    assert all(mount["readOnly"] is True for mount in found)
    return {mount["mountPath"]: known[mount["name"]] for mount in found if mount["name"] != "aerie-resource"}


def pod(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_pod_fits_the_restricted_profile(source: str) -> None:
    spec = pod(job(source))
    (container,) = spec["containers"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in container["securityContext"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {next(key for key in volume if key != "name") for volume in spec["volumes"]} <= ALLOWED_VOLUMES


def test_requests_and_limits_satisfy_any_quota() -> None:
    resources = pod(job())["containers"][0]["resources"]
    assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory", "ephemeral-storage"}


def test_configured_resources_replace_the_defaults() -> None:
    mine = ResourceRequirements(limits={"cpu": "250m", "memory": "256Mi"})
    resources = pod(job(runner=PreflightJobConfig("aerie:1", resources=mine)))["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "250m", "memory": "256Mi"}, "claims": []}


def test_mesh_injection_is_disabled() -> None:
    metadata = job()["spec"]["template"]["metadata"]
    for place in ("labels", "annotations"):
        assert metadata[place]["sidecar.istio.io/inject"] == "false"
        assert metadata[place]["linkerd.io/inject"] == "disabled"


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ((), None, None),
        ((), ["a"], ["a"]),
        (("operator",), None, ["operator"]),
        (("operator", "a"), ["a", "b"], ["operator", "a", "b"]),
    ],
)
def test_pull_secrets_of_operator_and_engine(ours: tuple[str, ...], theirs: list[str] | None, wanted: list[str] | None) -> None:
    given: dict[str, Any] = {} if theirs is None else {"imagePullSecrets": [{"name": name} for name in theirs]}
    spec = pod(job(runner=PreflightJobConfig("aerie:1", ours), serviceAccountName="engines", **given))
    found = spec.get("imagePullSecrets")
    assert (found and [secret["name"] for secret in found]) == wanted
    assert spec["serviceAccountName"] == "engines", "whose secrets the API server adds where there are no others"
    assert spec["automountServiceAccountToken"] is False


def test_drained_or_waiting_pod_is_no_failure() -> None:
    spec = job()["spec"]
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in spec["podFailurePolicy"][
        "rules"
    ]
    assert spec["activeDeadlineSeconds"] >= 3600


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)), st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)))
def test_pull_secrets_are_unique(ours: list[str], theirs: list[str]) -> None:
    spec = pod(job(runner=PreflightJobConfig("aerie:1", tuple(ours)), imagePullSecrets=[{"name": name} for name in theirs]))
    found = [secret["name"] for secret in spec.get("imagePullSecrets", [])]
    assert sorted(found) == sorted({*ours, *theirs})


# -- The way to the Hub --------------------------------------------------------------------------------------------------

CORPORATE: dict[str, Any] = {
    "volumes": [
        {"name": "authorities", "configMap": {"name": "corporate"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "huge", "persistentVolumeClaim": {"claimName": "weights"}},
    ],
    "containers": [
        {
            "name": "engine",
            "envFrom": [{"secretRef": {"name": "proxy"}}],
            "env": [{"name": "NODE", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}],
            "volumeMounts": [
                {"name": "authorities", "mountPath": "/etc/corporate"},
                {"name": "scratch", "mountPath": "/scratch"},
                {"name": "huge", "mountPath": "/weights"},
            ],
        }
    ],
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub.example"]}],
    "securityContext": {"fsGroup": 1000, "runAsUser": 0},
}


def named(**values: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def test_variables_of_the_engine_are_inherited_except_its_programs() -> None:
    token = {"secretKeyRef": {"name": "mine", "key": "token"}}
    world = named(HF_ENDPOINT="https://mirror", HTTPS_PROXY="http://proxy:3128", NO_PROXY=".svc", ALL="$(HTTPS_PROXY)")
    foreign = named(VLLM_USE_V2_MODEL_RUNNER="0", LD_PRELOAD="/lib/tcmalloc.so", PYTHONPATH="/vllm", PATH="/vllm/bin")
    made = job(engine={"env": [*world, *foreign, {"name": "HF_TOKEN", "valueFrom": token}]}, **CORPORATE)
    assert variables(made) == {
        "HF_HOME": "/cache/huggingface",
        "HF_ENDPOINT": "https://mirror",
        "HTTPS_PROXY": "http://proxy:3128",
        "NO_PROXY": ".svc",
        "ALL": "$(HTTPS_PROXY)",
        "HF_TOKEN": token,
    }
    assert pod(made)["containers"][0]["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert pod(made)["hostAliases"] == CORPORATE["hostAliases"]
    assert pod(made)["securityContext"]["fsGroup"] == 1000
    assert "runAsUser" not in pod(made)["securityContext"], "the operator's image is for the user that it names"


def test_token_of_the_engine_is_inherited() -> None:
    assert variables(job(engine={"tokenSecretRef": {"name": "hub"}}))["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hub", "key": "token"}
    }


def test_variables_of_the_engine_take_precedence() -> None:
    runner = PreflightJobConfig("aerie:1", env=tuple(named(HTTPS_PROXY="http://cluster:1", HF_ENDPOINT="https://cluster")))
    found = variables(job(runner=runner, engine={"env": named(HF_ENDPOINT="https://mine")}))
    assert (found["HTTPS_PROXY"], found["HF_ENDPOINT"]) == ("http://cluster:1", "https://mine")


@pytest.mark.parametrize(
    "path", ["SSL_CERT_FILE=/etc/corporate/ca.crt", "REQUESTS_CA_BUNDLE=/etc/corporate/ca.crt", "SSL_CERT_DIR=/etc/corporate"]
)
def test_only_volumes_named_by_variables_are_mounted(path: str) -> None:
    name, _, value = path.partition("=")
    found = mounts(job(engine={"env": named(**{name: value, "TMPDIR": "/weights/tmp"})}, **CORPORATE))
    assert found == {"/etc/corporate": {"name": "authorities", "configMap": {"name": "corporate"}}}


def test_cache_is_mounted_read_only_for_an_offline_engine() -> None:
    cache = {"cache": {"claimName": "models"}}
    assert mounts(job(engine=cache)) == {}, "a claim that one node may mount would hold it up"
    found = mounts(job(engine=cache | {"env": named(HF_HUB_OFFLINE="1")}))
    assert found == {"/cache": {"name": "cache", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}
    assert mounts(job(engine={"env": named(HF_HUB_OFFLINE="1")})) == {}, "a new cache is empty"


def test_volume_of_the_engine_may_have_any_name() -> None:
    own = {"name": "resource", "configMap": {"name": "corporate"}}
    engine = {"name": "engine", "volumeMounts": [{"name": "resource", "mountPath": "/etc/corporate"}]}
    made = job(engine={"env": named(SSL_CERT_FILE="/etc/corporate/a")}, volumes=[own], containers=[engine])
    assert mounts(made) == {"/etc/corporate": own}
    names = [volume["name"] for volume in pod(made)["volumes"]]
    assert len(names) == len(set(names))
