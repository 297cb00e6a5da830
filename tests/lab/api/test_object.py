"""The resource as an object of the API server: defaults, pruning, apply, scale, status, and the output of kubectl."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, CanaryArm, CanaryEvaluation, Condition, SettingStatus, Status
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace

EXAMPLES_FOLDER = Path(__file__).resolve().parents[3] / "examples"
EXAMPLES = sorted(EXAMPLES_FOLDER.rglob("*.yaml"))
DryRun = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.usefixtures("crd")


@pytest.fixture
def chat(namespace: Namespace, minimal_resource: dict[str, Any]) -> dict[str, Any]:
    """The minimal resource in the namespace of the test."""
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))
    return namespace.get("specdep", "chat")


def test_server_stores_the_defaults_of_the_models(chat: dict[str, Any], minimal_resource: dict[str, Any]) -> None:
    spec = chat["spec"]
    read = SpeculativeDeployment.from_dict(minimal_resource).to_dict()["spec"]
    for name in ("replicas", "speculation", "rollout", "metrics"):
        assert spec[name] == read[name]
    assert spec["engine"] == {"image": "vllm/vllm-openai:v0.33.0"}
    assert "drafter" not in spec


def test_partial_object_gets_the_other_defaults(dry_run: DryRun) -> None:
    rollout = dry_run({"rollout": {"analysis": {"blockDuration": "1m"}}})["spec"]["rollout"]
    assert rollout["analysis"]["blockDuration"] == "1m"
    assert rollout["analysis"]["maxDuration"] == "4h"
    assert rollout["canary"]["stepWeights"] == [25, 50]
    assert rollout["progressDeadline"] == "30m"


def test_stored_object_reads_back(chat: dict[str, Any]) -> None:
    read = SpeculativeDeployment.from_dict(chat, unknown_fields="forbid")
    assert read.metadata.uid == chat["metadata"]["uid"]
    assert read.metadata.generation == 1
    assert read.served_name == "chat"


@pytest.mark.parametrize("apply_options", [[], ["--server-side"]], ids=["client-side", "server-side"])
def test_applying_twice_changes_nothing(namespace: Namespace, apply_options: list[str]) -> None:
    text = (EXAMPLES_FOLDER / "gateway.yaml").read_text()
    namespace.kubectl("apply", *apply_options, "-f", "-", stdin=text)
    before = namespace.get("specdep", "chat")
    namespace.kubectl("apply", *apply_options, "-f", "-", stdin=text)
    assert namespace.get("specdep", "chat") == before
    assert before["metadata"]["generation"] == 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(EXAMPLES_FOLDER)))
def test_example_is_accepted(namespace: Namespace, example: Path) -> None:
    text = example.read_text()
    options = ("--server-side", "--dry-run=server", "--validate=strict", "-o", "json")
    dry_run_result = json.loads(namespace.kubectl("apply", *options, "-f", "-", stdin=text))
    namespace.kubectl("apply", "--validate=strict", "-f", "-", stdin=text)
    document = yaml.safe_load(text)
    stored = namespace.get(document["kind"], document["metadata"]["name"])
    if document["kind"] == "SpeculativeDeployment":
        assert stored["spec"] == dry_run_result["spec"]
        SpeculativeDeployment.from_dict(stored)


def test_misspelt_field_is_rejected_by_kubectl_and_pruned_by_the_server(
    namespace: Namespace, minimal_resource: dict[str, Any], dry_run: DryRun
) -> None:
    minimal_resource["spec"]["rolout"] = {"paused": True}
    with pytest.raises(LabError, match=r'unknown field "spec\.rolout"'):
        namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))
    assert "rolout" not in dry_run({"rolout": {"paused": True}})["spec"]


def test_pod_template_is_stored_unchanged(dry_run: DryRun) -> None:
    spec = {
        "nodeSelector": {"pool": "a"},
        "containers": [{"name": "engine", "securityContext": {"privileged": False}, "ports": [{"containerPort": 1}]}],
        "overhead": {"cpu": 1},
    }
    assert dry_run({"engine.podTemplate": {"spec": spec}})["spec"]["engine"]["podTemplate"]["spec"] == spec


def test_scale(namespace: Namespace, chat: dict[str, Any]) -> None:
    assert chat["spec"]["replicas"] == 1
    namespace.kubectl("scale", "specdep", "chat", "--replicas=3")
    assert namespace.get("specdep", "chat")["spec"]["replicas"] == 3
    status = {"status": {"replicas": 3, "selector": "aerie.dev/name=chat"}}
    namespace.kubectl("patch", "specdep", "chat", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    scale = json.loads(namespace.kubectl("get", "specdep", "chat", "--subresource=scale", "-o", "json"))
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 3, "selector": "aerie.dev/name=chat"}


@pytest.mark.parametrize("replicas", [2, 1, 0])
def test_autoscaler_may_request_fewer_pods_than_a_canary_with_reuse(
    namespace: Namespace, minimal_resource: dict[str, Any], replicas: int
) -> None:
    minimal_resource["spec"] |= {"replicas": 3, "rollout": {"canary": {"capacity": "Reuse"}}}
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(minimal_resource))
    namespace.kubectl("scale", "specdep", "chat", f"--replicas={replicas}")


def build_status() -> Status:
    now = datetime(2026, 11, 21, 12, 0, 0, 250_000, tzinfo=UTC)
    setting = SettingStatus(mode="Static", num_speculative_tokens=3)
    stable = Arm(revision="abc", drafter="org/eagle3 (EAGLE 3)", setting=setting, acceptance_length=2.41, ready_replicas=3)
    return Status(
        observed_generation=1,
        phase="Analyzing",
        conditions=[
            Condition(type="Ready", status="True", reason="AllPodsReady", message="4/4 pods ready.", last_transition_time=now)
        ],
        replicas=4,
        ready_replicas=4,
        selector="aerie.dev/name=chat",
        stable=stable,
        canary=CanaryArm(
            revision="def",
            change="org/eagle3.1",
            start_time=now,
            setting=setting,
            acceptance_length=2.63,
            evaluation=CanaryEvaluation(start_time=now, result="Inconclusive", message="m" * 2048, state="s" * 65536),
        ),
    )


def test_status_is_stored_and_read_back(namespace: Namespace, chat: dict[str, Any]) -> None:
    status = build_status()
    patch = json.dumps({"status": status.to_dict(), "spec": {"replicas": 9}})
    namespace.kubectl("patch", "specdep", "chat", "--subresource=status", "--type=merge", "-p", patch)
    stored = namespace.get("specdep", "chat")
    assert SpeculativeDeployment.from_dict(stored).status == status
    assert stored["spec"] == chat["spec"]
    assert stored["metadata"]["generation"] == 1


def test_printer_columns(namespace: Namespace, chat: dict[str, Any]) -> None:
    assert "status" not in chat
    patch = json.dumps({"status": build_status().to_dict()})
    namespace.kubectl("patch", "specdep", "chat", "--subresource=status", "--type=merge", "-p", patch)
    head, row = namespace.kubectl("get", "specdep").splitlines()
    assert head.split() == ["NAME", "PHASE", "DRAFTER", "K", "AL", "CANARY", "CANARY-AL", "READY", "AGE"]
    assert row.split()[:-1] == ["chat", "Analyzing", "org/eagle3", "(EAGLE", "3)", "3", "2.41", "org/eagle3.1", "2.63", "4"]
    assert "chat" in namespace.kubectl("get", "all", "-o", "name")


def test_explain_prints_description_default_and_bounds(namespace: Namespace) -> None:
    text = " ".join(namespace.kubectl("explain", "specdep.spec.rollout.analysis").split())
    assert "Analysis of a canary. After warmupDuration, time is divided into blocks." in text
    assert "enum: NonInferior, Superior Hypothesis that the canary has to meet." in text
    assert "Default: 2m. From 2s to 1h." in text
    assert "Default: 0.02. From 0.001 to 0.2." in text
