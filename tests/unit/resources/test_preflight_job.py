"""The preflight Job's pod: what clusters ask of a pod, and what it takes from the engine and the operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api import SpeculativeDeployment
from aerie.api.engine import Resources
from aerie.resources import preflight
from aerie.resources.preflight import Runner

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
SOURCES: dict[str, dict[str, Any]] = {
    "huggingFace": {"repo": "a/b", "revision": COMMIT},
    "volumeClaim": {"claimName": "models", "path": "a"},
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


def job(source: str = "huggingFace", runner: Runner = Runner("aerie:1"), **pods: Any) -> dict[str, Any]:  # noqa: B008 - frozen
    document = {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {source: SOURCES[source]}},
            "drafter": {"source": {source: SOURCES[source]}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0", "tokenSecret": {"name": "hub"}, "podTemplate": {"spec": pods}},
        },
    }
    return preflight.job(SpeculativeDeployment.from_dict(document), "r1", runner)


def pod(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_the_pod_fits_the_restricted_profile(source: str) -> None:
    spec = pod(job(source))
    (container,) = spec["containers"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in container["securityContext"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {next(key for key in volume if key != "name") for volume in spec["volumes"]} <= ALLOWED_VOLUMES


def test_requests_and_limits_are_set_for_all_that_a_quota_asks_for() -> None:
    resources = pod(job())["containers"][0]["resources"]
    assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory", "ephemeral-storage"}


def test_the_operators_own_resources_go_before() -> None:
    mine = Resources(limits={"cpu": "250m", "memory": "256Mi"})
    resources = pod(job(runner=Runner("aerie:1", resources=mine)))["containers"][0]["resources"]
    assert resources == {"limits": {"cpu": "250m", "memory": "256Mi"}, "claims": []}


def test_meshes_are_asked_to_inject_nothing() -> None:
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
def test_images_are_pulled_by_the_operators_secrets_and_the_engines(
    ours: tuple[str, ...], theirs: list[str] | None, wanted: list[str] | None
) -> None:
    given: dict[str, Any] = {} if theirs is None else {"imagePullSecrets": [{"name": name} for name in theirs]}
    spec = pod(job(runner=Runner("aerie:1", ours), serviceAccountName="engines", **given))
    found = spec.get("imagePullSecrets")
    assert (found and [secret["name"] for secret in found]) == wanted
    assert spec["serviceAccountName"] == "engines", "whose secrets the API server adds where there are no others"
    assert spec["automountServiceAccountToken"] is False


def test_a_drained_pod_is_no_failure_and_waiting_is_none_for_hours() -> None:
    spec = job()["spec"]
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in spec["podFailurePolicy"][
        "rules"
    ]
    assert spec["activeDeadlineSeconds"] >= 3600


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)), st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True)))
def test_no_secret_is_named_twice(ours: list[str], theirs: list[str]) -> None:
    spec = pod(job(runner=Runner("aerie:1", tuple(ours)), imagePullSecrets=[{"name": name} for name in theirs]))
    found = [secret["name"] for secret in spec.get("imagePullSecrets", [])]
    assert sorted(found) == sorted({*ours, *theirs})
