"""Rollouts of spec.speculation.draftSampling are compared by acceptance; it is recommended for sampled traffic."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.rollout.canary.analysis_run import explain_incomparable_acceptance
from aerie.rollout.revision.desired import recommend_draft_sampling, resolve_desired_revision
from tests.golden import Messages


def resource(image: str = "vllm/vllm-openai:v0.33.0", **speculation: Any) -> SpeculativeDeployment:
    volume = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "x"}}}
    return SpeculativeDeployment.from_dict(
        {
            "apiVersion": "aerie.dev/v1alpha1",
            "kind": "SpeculativeDeployment",
            "metadata": {"name": "chat", "namespace": "default", "uid": "u1"},
            "spec": {
                "replicas": 2,
                "model": volume,
                "engine": {"image": image},
                "drafter": volume,
                "speculation": speculation,
            },
        }
    )


def test_sampling_change_makes_revision_comparable_by_acceptance() -> None:
    before, after = resolve_desired_revision(resource()), resolve_desired_revision(resource(draftSampling="Probabilistic"))
    assert before.revision != after.revision
    assert before.pod_template != after.pod_template
    assert after.describe_change(Status(stable=before.arm)) == "probabilistic draft sampling"
    assert before.describe_change(Status(stable=after.arm)) == "default draft sampling"
    assert explain_incomparable_acceptance(after.arm, before.arm) == ""


@pytest.mark.parametrize(
    ("speculation", "key"),
    [
        ({"engineOptions": {"fly_window_size": 3}}, "fly_window_size"),
        ({"engineOptions": {"num_speculative_tokens": 9}}, "num_speculative_tokens"),
        ({"engineOptions": {"of_tomorrow": 1}}, "of_tomorrow"),
        (
            {"draftSampling": "Probabilistic", "engineOptions": {"use_local_argmax_reduction": True}},
            "use_local_argmax_reduction",
        ),
    ],
)
def test_rejected_sampling_creates_no_pods(speculation: dict[str, Any], key: str, messages: Messages) -> None:
    desired = resolve_desired_revision(resource(**speculation))
    assert desired.pod_template is None
    messages.check(f"invalid option {key}", desired.problem)


def test_engine_version_without_sampling_key_is_rejected(messages: Messages) -> None:
    desired = resolve_desired_revision(resource("vllm/vllm-openai:v0.20.2", draftSampling="Probabilistic"))
    messages.check("a version without the key", desired.problem)


@pytest.mark.parametrize(
    ("speculation", "setting", "image", "expected"),
    [
        ({"tuning": {"trafficSampling": "Sampled"}}, Static(3), "v0.33.0", "Probabilistic"),
        ({"tuning": {"trafficSampling": "Greedy"}}, Static(3), "v0.33.0", None),
        ({}, Static(3), "v0.33.0", None),
        ({"tuning": {"trafficSampling": "Sampled", "mode": "Off"}}, Static(3), "v0.33.0", None),
        ({"tuning": {"trafficSampling": "Sampled"}, "draftSampling": "Greedy"}, Static(3), "v0.33.0", None),
        ({"tuning": {"trafficSampling": "Sampled"}}, Off(), "v0.33.0", None),
        ({"tuning": {"trafficSampling": "Sampled"}}, Static(3), "v0.20.2", None),
        (
            {"tuning": {"trafficSampling": "Sampled"}, "engineOptions": {"use_local_argmax_reduction": True}},
            Static(3),
            "v0.33.0",
            None,
        ),
    ],
)
def test_sampling_is_recommended_for_sampled_traffic_only(
    speculation: dict[str, Any], setting: SpeculationSetting, image: str, expected: str | None
) -> None:
    assert recommend_draft_sampling(resource(f"vllm/vllm-openai:{image}", **speculation), setting) == expected
