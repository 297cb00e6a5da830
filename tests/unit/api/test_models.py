"""The models: what is written reads back, unknown fields are ignored, and invalid input gets a message."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.engine import LMCACHE_IMAGE_PATTERN, VERSIONED_IMAGE_PATTERN, ResourceRequirements
from aerie.api.source import HuggingFaceSource, ImageSource, VolumeClaimSource
from aerie.api.status import Condition, RolloutOutcome, SettingStatus, SpeculationStatus, Status
from aerie.api.types.base import JsonObject
from aerie.engine.releases import UnknownVersion, parse_image_version
from tests.golden import Messages

EXAMPLES = [
    file
    for file in sorted((Path(__file__).resolve().parents[3] / "examples").rglob("*.yaml"))
    if "kind: SpeculativeDeployment" in file.read_text()
]
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.fixture
def minimal_resource() -> JsonObject:
    """The minimal resource."""
    source = {"huggingFace": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": COMMIT}}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": source}, "engine": {"image": "vllm/vllm-openai:v0.33.0"}},
    }


def test_defaults_of_the_spec(minimal_resource: JsonObject) -> None:
    spec = SpeculativeDeployment.from_dict(minimal_resource).spec
    assert (spec.replicas, spec.drafter, spec.metrics.scrape_interval) == (1, None, timedelta(seconds=15))
    assert (
        spec.speculation.num_speculative_tokens,
        spec.speculation.tuning.mode,
        spec.speculation.tuning.max_speculative_tokens,
    ) == (3, "Recommend", 7)
    canary, analysis = spec.rollout.canary, spec.rollout.analysis
    assert (canary.replicas, canary.control, canary.capacity, canary.approval) == (1, "Fresh", "Surge", "Automatic")
    assert (canary.step_weights, canary.step_duration) == ([25, 50], timedelta(minutes=5))
    assert (analysis.block_duration, analysis.warmup_duration, analysis.min_blocks) == (
        timedelta(minutes=2),
        timedelta(minutes=5),
        5,
    )
    assert (analysis.min_duration, analysis.max_duration, analysis.margin) == (timedelta(minutes=30), timedelta(hours=4), 0.02)
    assert (analysis.goal, analysis.on_inconclusive) == ("NonInferior", "Hold")
    assert (spec.rollout.progress_deadline, spec.rollout.paused) == (timedelta(minutes=30), False)
    assert spec.rollout.traffic.mode == "Service"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_example_reads_strictly_and_back(example: Path) -> None:
    read = SpeculativeDeployment.from_dict(yaml.safe_load(example.read_text()), unknown_fields="forbid")
    assert SpeculativeDeployment.from_dict(read.to_dict(), unknown_fields="forbid") == read


minutes = st.integers(0, 1440).map(lambda count: timedelta(minutes=count))


@given(
    tokens=st.integers(0, 15),
    soak=minutes,
    margin=st.floats(0.001, 0.2),
    ramp=st.lists(st.integers(1, 99), max_size=16),
    env=st.lists(st.text("ABC_", min_size=1, max_size=5), max_size=4, unique=True),
    gpus=st.integers(0, 16) | st.sampled_from(["1", "500m", "16Gi"]),
)
def test_any_resource_reads_back(
    tokens: int, soak: timedelta, margin: float, ramp: list[int], env: list[str], gpus: int | str
) -> None:
    document = {
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "engine": {
                "image": "vllm/vllm-openai:v0.33.0",
                "env": [{"name": name, "value": "1"} for name in env],
                "resources": {"limits": {"nvidia.com/gpu": gpus}},
            },
            "speculation": {"numSpeculativeTokens": tokens},
            "rollout": {
                "canary": {"stepWeights": ramp},
                "analysis": {"minDuration": f"{soak // timedelta(minutes=1)}m", "margin": margin},
            },
        },
    }
    read = SpeculativeDeployment.from_dict(document)
    assert read.spec.rollout.analysis.min_duration == soak
    assert read.spec.engine.resources is not None
    assert read.spec.engine.resources.limits == {"nvidia.com/gpu": str(gpus)}
    assert SpeculativeDeployment.from_dict(read.to_dict()) == read


def test_unknown_fields_from_the_server_are_ignored(minimal_resource: JsonObject) -> None:
    expected_resource = SpeculativeDeployment.from_dict(minimal_resource)
    newer_document = copy.deepcopy(minimal_resource)
    newer_document["spec"]["future"] = 1
    newer_document["spec"]["engine"]["future"] = {"a": 1}
    newer_document["metadata"] |= {"managedFields": [], "finalizers": ["x"], "ownerReferences": []}
    assert SpeculativeDeployment.from_dict(newer_document) == expected_resource


def test_any_metadata_of_a_user_is_accepted(minimal_resource: JsonObject) -> None:
    minimal_resource["metadata"] |= {"finalizers": ["x"], "annotations": {"a": "b"}}
    read = SpeculativeDeployment.from_dict(minimal_resource, unknown_fields="forbid")
    assert read.metadata.annotations == {"a": "b"}


def _set(*path: str, to: Any) -> Callable[[JsonObject], None]:
    def change(document: JsonObject) -> None:
        node: Any = document
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rolout", {}),
        ("spec.engine", {}),
        ("spec.replicas", "3"),
        ("spec.speculation.numSpeculativeTokens", 16),
        ("spec.rollout.canary.stepWeights", [25, 100]),
        ("spec.metrics.scrapeInterval", "15 s"),
        ("spec.metrics.scrapeInterval", 15),
        ("spec.metrics.scrapeInterval", "6m"),
        ("spec.model.source.image", {"reference": "a@sha256:1"}),
        ("spec.rollout.analysis.goal", "Better"),
        ("kind", "Deployment"),
    ],
)
def test_invalid_input_gets_a_message(minimal_resource: JsonObject, path: str, value: Any, messages: Messages) -> None:
    _set(*path.split("."), to=value)(minimal_resource)
    with pytest.raises(ResourceError) as caught:
        SpeculativeDeployment.from_dict(minimal_resource, unknown_fields="forbid")
    messages.check(f"{path}: {value}", str(caught.value))


def test_each_error_has_its_own_line(minimal_resource: JsonObject) -> None:
    minimal_resource["spec"] |= {"replicas": -1, "metrics": {"scrapeInterval": "x"}}
    with pytest.raises(ResourceError) as caught:
        SpeculativeDeployment.from_dict(minimal_resource)
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == ["spec.replicas", "spec.metrics.scrapeInterval:"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ({"huggingFace": {"repo": "gpt2", "revision": COMMIT}}, HuggingFaceSource),
        ({"persistentVolumeClaim": {"claimName": "models", "path": "a/b"}}, VolumeClaimSource),
        ({"image": {"reference": "a@sha256:" + "0" * 64}}, ImageSource),
    ],
)
def test_source_variant(minimal_resource: JsonObject, source: JsonObject, kind: type) -> None:
    minimal_resource["spec"]["model"]["source"] = source
    assert isinstance(SpeculativeDeployment.from_dict(minimal_resource).spec.model.source.variant, kind)


def test_served_name_defaults_to_the_name(minimal_resource: JsonObject) -> None:
    assert SpeculativeDeployment.from_dict(minimal_resource).served_name == "chat"
    minimal_resource["spec"]["model"]["servedName"] = "llama"
    assert SpeculativeDeployment.from_dict(minimal_resource).served_name == "llama"


@pytest.mark.parametrize(
    "image",
    [
        "vllm/vllm-openai:v0.33.0",
        "vllm/vllm-openai:0.33.0-cu130",
        "registry.example:5000/vllm:v0.33.0rc1@sha256:" + "0" * 64,
        "rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210",
        "mirror.example:5000/hub/vllm-openai:v0.33.0",
        "vllm/vllm-openai-rocm:v0.33.0",
        "ghcr.io/llm-d/llm-d-cuda:v0.4.0",
        "kserve/huggingfaceserver:v0.16.0-gpu",
        "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.7.1",
        "lmcache/vllm-openai:v0.3.9",
        "docker.io/lmcache/vllm-openai:v0.3.9",
        "mycorp/vllm:0.30.1",
        "vllm/vllm-openai",
        "vllm/vllm-openai:latest",
        "vllm/vllm-openai:v0.33",
        "registry.example:5000/vllm",
        "10.0.0.1:5000/vllm",
        "registry.example:1.2.3/vllm",
        "nvcr.io/nvidia/vllm:25.10-py3",
        "vllm/vllm-openai@sha256:" + "0" * 64,
    ],
)
def test_schema_accepts_exactly_the_image_tags_with_a_version(image: str) -> None:
    is_accepted = bool(re.search(VERSIONED_IMAGE_PATTERN, image)) and not re.search(LMCACHE_IMAGE_PATTERN, image)
    assert is_accepted == (not isinstance(parse_image_version(image), UnknownVersion))


def test_timestamp_is_written_in_utc_and_read_back() -> None:
    moment = datetime(2026, 11, 21, 13, 0, 0, 123_000, tzinfo=timezone(timedelta(hours=1)))
    condition = Condition(type="Ready", status="True", reason="AllPodsReady", message="", last_transition_time=moment)
    assert condition.to_dict()["lastTransitionTime"] == "2026-11-21T12:00:00.123Z"
    assert Condition.from_dict(condition.to_dict()) == condition
    assert Condition.from_dict(condition.to_dict() | {"lastTransitionTime": "2026-11-21T12:00:00Z"}) != condition


def test_timestamp_without_a_time_zone_is_rejected() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        Condition(type="Ready", status="True", reason="A", message="", last_transition_time=datetime(2026, 11, 21))  # noqa: DTZ001


def test_status_beyond_the_schema_is_rejected() -> None:
    with pytest.raises(ValidationError, match="at most 10 items"):
        Status(rollout_history=[OUTCOME] * 11)
    assert len(Status(rollout_history=[OUTCOME] * 10).rollout_history) == 10


def test_empty_lists_of_a_status_are_not_written() -> None:
    """Each would be an empty line of `kubectl describe`."""
    setting = SettingStatus(mode="Static", num_speculative_tokens=3)
    written = Status(rollout_history=[OUTCOME], speculation=SpeculationStatus(current=setting)).to_dict()
    assert set(written) == {"rolloutHistory", "speculation"}
    assert "comparisons" not in written["rolloutHistory"][0]
    assert written["speculation"] == {"current": {"mode": "Static", "numSpeculativeTokens": 3}}
    assert Status.from_dict(written) == Status(rollout_history=[OUTCOME], speculation=SpeculationStatus(current=setting))


OUTCOME = RolloutOutcome(
    revision="abc",
    change="K=5",
    result="Promoted",
    message="It was better.",
    start_time=datetime(2026, 11, 21, tzinfo=UTC),
    completion_time=datetime(2026, 11, 21, 1, tzinfo=UTC),
)


@pytest.mark.parametrize("amount", [-1, "-1", -5])
def test_negative_amount_of_an_older_definition_is_read(amount: object) -> None:
    """An error would stop the reconciles of serving pods."""
    assert ResourceRequirements.from_dict({"limits": {"nvidia.com/gpu": amount}}).limits == {"nvidia.com/gpu": str(amount)}
