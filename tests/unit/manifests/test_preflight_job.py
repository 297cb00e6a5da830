"""The preflight Job's pod: requirements of clusters, and fields inherited from the engine and the operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api import SpeculativeDeployment
from aerie.api.engine import ResourceRequirements
from aerie.api.source import DrafterSpec
from aerie.manifests import preflight_job
from aerie.manifests.pod import engine_pod
from aerie.manifests.preflight_job import PreflightJobConfig, RunningDrafter

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
SOURCES: dict[str, dict[str, Any]] = {
    "huggingFace": {"repo": "a/b", "revision": COMMIT},
    "persistentVolumeClaim": {"claimName": "models", "path": "a"},
    "image": {"reference": f"models.example/a@sha256:{'0' * 64}"},
}
RUNNING_SOURCES = {"huggingFace": {"revision": "b" * 40}, "persistentVolumeClaim": {"path": "b"}}
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
"""Volume types of Pod Security's profile restricted (pod-security-admission, check_restrictedVolumes.go)."""


def build_job(
    source: str = "huggingFace",
    runner: PreflightJobConfig = PreflightJobConfig("aerie:1"),  # noqa: B008 - frozen
    engine: dict[str, Any] | None = None,
    running: str | None = None,
    running_source: str | None = None,
    promoted: str = "",
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
    template = engine_pod.build_pod_template(resource, None)
    if running is None:
        return preflight_job.build_preflight_job(resource, "r1", template, runner)
    kind = running_source or source
    drafter = DrafterSpec.from_dict({"source": {kind: {**SOURCES[kind], **RUNNING_SOURCES[kind]}}})
    running_resource = resource.model_copy(update={"spec": resource.spec.model_copy(update={"drafter": drafter})})
    return preflight_job.build_preflight_job(
        resource, "r1", template, runner, RunningDrafter(running, running_resource, promoted)
    )


def variables_by_name(job: dict[str, Any]) -> dict[str, Any]:
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in pod_spec(job)["containers"][0]["env"]
    }


def volumes_by_mount_path(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the volume that is mounted read-only at each path, except the Job's own."""
    volumes_by_name = {volume["name"]: volume for volume in pod_spec(job)["volumes"]}
    mounts = pod_spec(job)["containers"][0]["volumeMounts"]
    assert all(mount["readOnly"] is True for mount in mounts)
    return {mount["mountPath"]: volumes_by_name[mount["name"]] for mount in mounts if mount["name"] != "aerie-resource"}


def pod_spec(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def test_job_knows_the_drafter_that_was_promoted_in_place() -> None:
    argument = f"--promoted-drafter=me/better@{COMMIT}"
    assert argument in pod_spec(build_job(running="r0", promoted=f"me/better@{COMMIT}"))["containers"][0]["args"]


@pytest.mark.parametrize("source", SOURCES)
def test_pod_fits_the_restricted_profile(source: str) -> None:
    spec = pod_spec(build_job(source))
    (container,) = spec["containers"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in container["securityContext"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {next(key for key in volume if key != "name") for volume in spec["volumes"]} <= ALLOWED_VOLUMES


def test_requests_and_limits_satisfy_any_quota() -> None:
    resources = pod_spec(build_job())["containers"][0]["resources"]
    assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory", "ephemeral-storage"}


def test_configured_resources_replace_the_defaults() -> None:
    configured = ResourceRequirements(limits={"cpu": "250m", "memory": "256Mi"})
    resources = pod_spec(build_job(runner=PreflightJobConfig("aerie:1", resources=configured)))["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "250m", "memory": "256Mi"}, "claims": []}


def test_mesh_injection_is_disabled() -> None:
    metadata = build_job()["spec"]["template"]["metadata"]
    for place in ("labels", "annotations"):
        assert metadata[place]["sidecar.istio.io/inject"] == "false"
        assert metadata[place]["linkerd.io/inject"] == "disabled"


@pytest.mark.parametrize(
    ("operator_secrets", "engine_secrets", "expected"),
    [
        ((), None, None),
        ((), ["a"], ["a"]),
        (("operator",), None, ["operator"]),
        (("operator", "a"), ["a", "b"], ["operator", "a", "b"]),
    ],
)
def test_pull_secrets_of_operator_and_engine(
    operator_secrets: tuple[str, ...], engine_secrets: list[str] | None, expected: list[str] | None
) -> None:
    engine_pod_spec: dict[str, Any] = (
        {} if engine_secrets is None else {"imagePullSecrets": [{"name": name} for name in engine_secrets]}
    )
    spec = pod_spec(
        build_job(runner=PreflightJobConfig("aerie:1", operator_secrets), serviceAccountName="engines", **engine_pod_spec)
    )
    pull_secrets = spec.get("imagePullSecrets")
    assert (pull_secrets and [secret["name"] for secret in pull_secrets]) == expected
    assert spec["serviceAccountName"] == "engines", "whose secrets the API server adds where there are no others"
    assert spec["automountServiceAccountToken"] is False


def test_drained_or_waiting_pod_is_no_failure() -> None:
    spec = build_job()["spec"]
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in spec["podFailurePolicy"][
        "rules"
    ]
    assert spec["activeDeadlineSeconds"] >= 3600


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)), st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)))
def test_pull_secrets_are_unique(operator_secrets: list[str], engine_secrets: list[str]) -> None:
    spec = pod_spec(
        build_job(
            runner=PreflightJobConfig("aerie:1", tuple(operator_secrets)),
            imagePullSecrets=[{"name": name} for name in engine_secrets],
        )
    )
    pull_secrets = [secret["name"] for secret in spec.get("imagePullSecrets", [])]
    assert sorted(pull_secrets) == sorted({*operator_secrets, *engine_secrets})


# -- Access to the Hub ---------------------------------------------------------------------------------------------------

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


def build_variables(**values: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def test_variables_of_the_engine_are_inherited_except_its_programs() -> None:
    token = {"secretKeyRef": {"name": "mine", "key": "token"}}
    hub_variables = build_variables(
        HF_ENDPOINT="https://mirror", HTTPS_PROXY="http://proxy:3128", NO_PROXY=".svc", ALL="$(HTTPS_PROXY)"
    )
    engine_variables = build_variables(
        VLLM_USE_V2_MODEL_RUNNER="0", LD_PRELOAD="/lib/tcmalloc.so", PYTHONPATH="/vllm", PATH="/vllm/bin"
    )
    job = build_job(engine={"env": [*hub_variables, *engine_variables, {"name": "HF_TOKEN", "valueFrom": token}]}, **CORPORATE)
    assert variables_by_name(job) == {
        "HF_HOME": "/cache/huggingface",
        "HF_ENDPOINT": "https://mirror",
        "HTTPS_PROXY": "http://proxy:3128",
        "NO_PROXY": ".svc",
        "ALL": "$(HTTPS_PROXY)",
        "HF_TOKEN": token,
    }
    assert pod_spec(job)["containers"][0]["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert pod_spec(job)["hostAliases"] == CORPORATE["hostAliases"]
    assert pod_spec(job)["securityContext"]["fsGroup"] == 1000
    assert "runAsUser" not in pod_spec(job)["securityContext"], "the operator's image is for the user that it names"


def test_token_of_the_engine_is_inherited() -> None:
    assert variables_by_name(build_job(engine={"tokenSecretRef": {"name": "hub"}}))["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hub", "key": "token"}
    }


def test_variables_of_the_engine_take_precedence() -> None:
    runner = PreflightJobConfig(
        "aerie:1", env=tuple(build_variables(HTTPS_PROXY="http://cluster:1", HF_ENDPOINT="https://cluster"))
    )
    variables = variables_by_name(build_job(runner=runner, engine={"env": build_variables(HF_ENDPOINT="https://mine")}))
    assert (variables["HTTPS_PROXY"], variables["HF_ENDPOINT"]) == ("http://cluster:1", "https://mine")


@pytest.mark.parametrize(
    "path", ["SSL_CERT_FILE=/etc/corporate/ca.crt", "REQUESTS_CA_BUNDLE=/etc/corporate/ca.crt", "SSL_CERT_DIR=/etc/corporate"]
)
def test_only_volumes_named_by_variables_are_mounted(path: str) -> None:
    name, _, value = path.partition("=")
    volumes = volumes_by_mount_path(
        build_job(engine={"env": build_variables(**{name: value, "TMPDIR": "/weights/tmp"})}, **CORPORATE)
    )
    assert volumes == {"/etc/corporate": {"name": "authorities", "configMap": {"name": "corporate"}}}


def test_cache_is_mounted_read_only_for_an_offline_engine() -> None:
    cache = {"cache": {"claimName": "models"}}
    assert volumes_by_mount_path(build_job(engine=cache)) == {}, "a claim that one node may mount would hold it up"
    volumes = volumes_by_mount_path(build_job(engine=cache | {"env": build_variables(HF_HUB_OFFLINE="1")}))
    assert volumes == {"/cache": {"name": "cache", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}
    assert volumes_by_mount_path(build_job(engine={"env": build_variables(HF_HUB_OFFLINE="1")})) == {}, "a new cache is empty"


def test_volume_of_the_engine_may_have_any_name() -> None:
    volume = {"name": "resource", "configMap": {"name": "corporate"}}
    engine = {"name": "engine", "volumeMounts": [{"name": "resource", "mountPath": "/etc/corporate"}]}
    job = build_job(engine={"env": build_variables(SSL_CERT_FILE="/etc/corporate/a")}, volumes=[volume], containers=[engine])
    assert volumes_by_mount_path(job) == {"/etc/corporate": volume}
    names = [volume["name"] for volume in pod_spec(job)["volumes"]]
    assert len(names) == len(set(names))


def test_job_of_a_drafter_of_the_hub_mounts_the_claim_of_the_running_one() -> None:
    spec = pod_spec(build_job("huggingFace", running="r0", running_source="persistentVolumeClaim"))
    (container,) = spec["containers"]
    assert "--running-drafter=/models/running-drafter" in container["args"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    claim = volumes[mounts["/models/running-drafter"]]["persistentVolumeClaim"]
    assert claim == {"claimName": SOURCES["persistentVolumeClaim"]["claimName"], "readOnly": True}


@pytest.mark.parametrize("source", RUNNING_SOURCES)
def test_job_reads_the_drafter_of_the_running_engines(source: str) -> None:
    plain, compared = pod_spec(build_job(source)), pod_spec(build_job(source, running="r0"))
    (before,), (container,) = plain["containers"], compared["containers"]
    folder = ["--running-drafter=/models/running-drafter"] if source == "persistentVolumeClaim" else []
    arguments = ["--running-file=/etc/aerie-running/resource.json", "--running-revision=r0", *folder]
    assert [argument for argument in container["args"] if argument not in before["args"]] == arguments
    volumes = [volume for volume in compared["volumes"] if volume not in plain["volumes"]]
    (record,) = volumes
    assert record["configMap"]["name"] == "chat-r0-preflight"
    assert record["configMap"]["optional"] is True, "the record may be deleted meanwhile, and preflight does without it"
    mounts = [mount for mount in container["volumeMounts"] if mount not in before["volumeMounts"]]
    assert {mount["mountPath"]: mount.get("subPath") for mount in mounts} == {
        "/etc/aerie-running": None,
        **({"/models/running-drafter": "b"} if folder else {}),
    }
    names = {volume["name"] for volume in compared["volumes"]}
    assert all(mount["name"] in names and mount["readOnly"] for mount in mounts)
