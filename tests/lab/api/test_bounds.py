"""Bounds of single values on the API server: durations, which it and Python have to read alike, numbers, and required fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from aerie.api.types import duration
from aerie_lab.errors import KubeError

Changes = Mapping[str, Any]
DryRun = Callable[..., dict[str, Any]]

NOT_A_DURATION = "not a duration: write whole numbers with h, m, s or ms, such as 30s, 5m or 1h30m"
# Each duration with its bounds, one value out of bounds, and one that all rules accept.
DURATIONS = [
    ("speculation.tuning.slo.timePerOutputToken", "1ms", "1m", "61s", "40ms"),
    ("speculation.tuning.slo.timeToFirstToken", "1ms", "1h", "61m", "1h"),
    ("speculation.tuning.decisionInterval", "10s", "24h", "25h", "12h"),
    ("speculation.tuning.cooldownDuration", "0s", "168h", "169h", "0s"),
    ("speculation.tuning.historyWindow", "1m", "168h", "169h", "168h"),
    ("rollout.canary.stepDuration", "0s", "24h", "24h1ms", "24h"),
    ("rollout.canary.scaleDownDelay", "0s", "24h", "24h1ms", "24h"),
    ("rollout.analysis.blockDuration", "2s", "1h", "61m", "30s"),
    ("rollout.analysis.warmupDuration", "0s", "24h", "25h", "0s"),
    ("rollout.analysis.minDuration", "0s", "168h", "169h", "0s"),
    ("rollout.analysis.maxDuration", "1m", "336h", "337h", "336h"),
    ("rollout.analysis.shadow.maxDuration", "1m", "24h", "25h", "24h"),
    ("rollout.inPlace.minDuration", "0s", "24h", "25h", "0s"),
    ("rollout.progressDeadline", "1m", "24h", "59s", "1m"),
    ("metrics.scrapeInterval", "1s", "5m", "999ms", "1s"),
    ("capture.retention.duration", "1h", "8760h", "59m", "8760h"),
    ("capture.redaction.hook.timeout", "100ms", "1m", "61s", "100ms"),
]
REQUIRED_PARENTS: dict[str, dict[str, Any]] = {
    "capture": {
        "consent": {"confirmed": True, "basis": "terms of service, section 4"},
        "storage": {"persistentVolumeClaim": {"claimName": "prompts"}},
    },
    "capture.redaction.hook": {"image": "registry.example/redact:1"},
}
"""Fields that an object requires, by its path: a field below it needs them."""


@pytest.mark.parametrize(
    "path", ["engine.cache.sizeLimit", "engine.resources.limits", "engine.resources.requests"], ids=["size", "limits", "requests"]
)
@pytest.mark.parametrize("amount", [-1, -5])
def test_negative_number_is_rejected_as_an_amount(dry_run: DryRun, path: str, amount: int) -> None:
    is_scalar = path.endswith("sizeLimit")
    assert "write an amount of 0 or more" in get_rejection(dry_run, {path: amount if is_scalar else {"nvidia.com/gpu": amount}})
    dry_run({path: 0 if is_scalar else {"nvidia.com/gpu": 0}})


@pytest.mark.parametrize(
    "preflight_spec", [{"acceptedChecks": ["c2"]}, {"acceptedChecks": ["C0"]}, {"acceptedChecks": ["C123"]}, {"mode": "Never"}]
)
def test_invalid_preflight_spec_is_rejected(dry_run: DryRun, preflight_spec: Changes) -> None:
    get_rejection(dry_run, {"rollout.preflight": preflight_spec})
    dry_run({"rollout.preflight": {"mode": "Warn", "acceptedChecks": ["C2", "C29"]}})


def get_rejection(dry_run: DryRun, changes: Changes) -> str:
    with pytest.raises(KubeError) as caught:
        dry_run(changes)
    assert caught.value.status == 422, caught.value
    return caught.value.message


@pytest.mark.parametrize(("path", "shortest", "longest", "beyond", "accepted"), DURATIONS)
def test_duration_bounds(dry_run: DryRun, path: str, shortest: str, longest: str, beyond: str, accepted: str) -> None:
    parents: dict[str, Any] = {parent: fields for parent, fields in REQUIRED_PARENTS.items() if path.startswith(f"{parent}.")}
    message = get_rejection(dry_run, {**parents, path: "5 minutes"})
    assert message.endswith(f'spec.{path}: Invalid value: "5 minutes": {NOT_A_DURATION}'), message
    assert f'spec.{path}: Invalid value: "{beyond}": write a duration from {shortest} to {longest}' in get_rejection(
        dry_run, {**parents, path: beyond}
    )
    dry_run({**parents, path: accepted})


@pytest.mark.parametrize(
    ("changes", "message", "accepted"),
    [
        (
            {"speculation.numSpeculativeTokens": 16},
            "spec.speculation.numSpeculativeTokens in body should be less than or equal to 15",
            {"speculation": {"numSpeculativeTokens": 15, "tuning": {"maxSpeculativeTokens": 15}}},
        ),
        (
            {"speculation.tuning.maxSpeculativeTokens": 16},
            "spec.speculation.tuning.maxSpeculativeTokens in body should be less than or equal to 15",
            {"speculation.tuning.maxSpeculativeTokens": 15},
        ),
        ({"speculation.tuning.mode": "On"}, 'supported values: "Auto", "Recommend", "Off"', {"speculation.tuning.mode": "Off"}),
        (
            {"rollout.canary.stepWeights": [0, 50]},
            "spec.rollout.canary.stepWeights[0] in body should be greater than or equal to 1",
            {"rollout.canary.stepWeights": [1, 99]},
        ),
        (
            {"rollout.canary.stepWeights": [50, 100]},
            "spec.rollout.canary.stepWeights[1] in body should be less than or equal to 99",
            {"rollout.canary.stepWeights": [50, 99]},
        ),
        (
            {"rollout.traffic": {"mode": "Gateway", "gateway": {"parentRefs": []}}},
            "spec.rollout.traffic.gateway.parentRefs in body should have at least 1 items",
            {"rollout.traffic": {"mode": "Gateway", "gateway": {"parentRefs": [{"name": "public"}]}}},
        ),
        (
            {"rollout.analysis": {"shadow": {"source": "Prompts", "prompts": {"key": "prompts.jsonl"}}}},
            "spec.rollout.analysis.shadow.prompts.configMap: Required value",
            {"rollout.analysis": {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}}},
        ),
        (
            {"rollout.analysis": {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts", "key": "a/b"}}}},
            "spec.rollout.analysis.shadow.prompts.key in body should match",
            {"rollout.analysis": {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts", "key": "a_b"}}}},
        ),
        (
            {"rollout.analysis": {"shadow": {"source": "Copies"}}},
            'supported values: "None", "Mirror", "Prompts"',
            {"rollout.analysis": {"shadow": {"source": "None"}}},
        ),
        ({"engine.image": None}, "spec.engine.image: Required value", {}),
        ({"model.source.huggingFace.revision": None}, "spec.model.source.huggingFace.revision: Required value", {}),
        ({"metrics.source": {}}, "spec.metrics.source.prometheus: Required value", {}),
        ({"metrics.source.prometheus": {"podLabel": "pod"}}, "spec.metrics.source.prometheus.address: Required value", {}),
        (
            {"metrics.source.prometheus": {"address": "http://a", "podLabel": "pod.name"}},
            "spec.metrics.source.prometheus.podLabel in body should match",
            {"metrics.source.prometheus": {"address": "http://a", "podLabel": "pod_name", "namespaceLabel": "ns"}},
        ),
        (
            {"metrics.source.prometheus": {"address": "http://a", "matchLabels": {f"a{n}": "b" for n in range(9)}}},
            "spec.metrics.source.prometheus.matchLabels: Too many: 9: must have at most 8 items",
            {"metrics.source.prometheus": {"address": "http://a", "matchLabels": {f"a{n}": "b" for n in range(8)}}},
        ),
        (
            {"engine.resources": {"limits": {"nvidia.com/gpu": "one"}}},
            "spec.engine.resources.limits.nvidia.com/gpu in body should match",
            {"engine.resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi", "cpu": "500m"}}},
        ),
    ],
    ids=lambda value: next(iter(value), "minimal") if isinstance(value, Mapping) else "",
)
def test_bound_rejects_and_accepts(dry_run: DryRun, changes: Changes, message: str, accepted: Changes) -> None:
    assert message in get_rejection(dry_run, changes)
    dry_run(accepted)


def test_long_name_is_rejected(dry_run: DryRun) -> None:
    dry_run({}, "a" * 40)
    with pytest.raises(KubeError, match=r"metadata\.name: Too long: may not be more than 40 bytes"):
        dry_run({}, "a" * 41)


def test_every_duration_field_is_covered(crd: dict[str, Any]) -> None:
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert set(_durations(spec)) == {path for path, *_ in DURATIONS}


def _durations(node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    if any(rule["message"] == NOT_A_DURATION for rule in node.get("x-kubernetes-validations", [])):
        yield path.removeprefix(".")
    for name, child in node.get("properties", {}).items():
        yield from _durations(child, f"{path}.{name}")


WELL_FORMED = ["0s", "00005m", "1h1m1s1ms", "1ms1s", "1h1h", "99999ms"]
MALFORMED = ["", "5", "1.5h", "-5m", "+5m", "5 m", "5m\n", "1d", "1us", "\uff15m", "100000ms", "1s1s1s1s1s", "5M", "PT5M"]


@pytest.mark.parametrize("text", WELL_FORMED + MALFORMED)
def test_server_and_python_agree_on_durations(dry_run: DryRun, text: str) -> None:
    try:
        duration.parse_duration(text)
    except ValueError:
        assert NOT_A_DURATION in get_rejection(dry_run, {"rollout.canary.stepDuration": text})
    else:
        assert dry_run({"rollout.canary.stepDuration": text})["spec"]["rollout"]["canary"]["stepDuration"] == text
