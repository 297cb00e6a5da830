"""`aerie tune explain`: its output for a resource, and for one that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.cli.app import run_command_line
from aerie.cli.commands.tune_explain import render_explanation
from aerie.controller.kubernetes.client import Cluster, ObjectDict, ResourceKind
from aerie.engine.speculation import Schedule, ScheduleTier
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.tuning.recommendation import Recommendation
from tests.golden import Messages

NOW = datetime(2026, 11, 2, tzinfo=UTC)
RECORD = TuningRecord(NOW.timestamp() - 600, "f", "packed", "{}", "HOLD\nK=3 stays: nothing else is surely better.\n")
K3, K5 = {"mode": "Static", "numSpeculativeTokens": 3}, {"mode": "Static", "numSpeculativeTokens": 5}
TRIAL = {
    "fromSetting": K3,
    "toSetting": K5,
    "purpose": "Improve",
    "result": "Promoted",
    "revision": "r2",
    "predicted": {"estimate": 0.08, "lower": 0.04, "upper": 0.12},
    "measured": {"estimate": 0.075},
    "completionTime": "2026-11-01T12:00:00.000Z",
}
SAVINGS = {"saved": 4.5, "spent": 0.5, "net": 4.0, "currentRate": 0.075, "updateTime": "2026-11-01T12:00:00.000Z"}


def document(mode: str = "Auto", **speculation: Any) -> dict[str, Any]:
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat", "namespace": "default", "uid": "u1"},
        "spec": {
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "speculation": {"numSpeculativeTokens": 3, "tuning": {"mode": mode}},
        },
        "status": {"speculation": {"current": K3, **speculation}} if speculation else {},
    }


def explain(mode: str = "Auto", record: TuningRecord | None = RECORD, **speculation: Any) -> str:
    return "\n".join(render_explanation(SpeculativeDeployment.from_dict(document(mode, **speculation)), record, NOW))


def test_text_has_the_settings_the_trials_and_the_last_decision(messages: Messages) -> None:
    applied = {"setting": K5, "revision": "r2", "specRevision": "r1"}
    text = explain(current=K5, applied=applied, trials=[TRIAL], savings=SAVINGS, message="K=5 is better.")
    messages.check("settings, trials and the last decision", text)


def test_text_before_a_decision_has_what_is_pending(messages: Messages) -> None:
    text = explain(record=None)
    messages.check("no decision yet", text)
    messages.check("tuning is off", explain("Off", None))


class FakeCluster(Cluster):
    objects: dict[tuple[str, str, str], ObjectDict] = {}  # noqa: RUF012

    def __init__(self) -> None:
        pass

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        return self.objects.get((kind.kind, namespace, name))

    async def close(self) -> None:
        pass


async def _connect(*_: object, **__: object) -> Cluster:
    return FakeCluster()


def test_the_command_reads_the_resource_and_its_own_config_map(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cluster, "connect", _connect)
    config_map: ObjectDict = {"metadata": {"ownerReferences": [{"uid": "u1"}]}, "data": RECORD.to_data()}
    objects = {("SpeculativeDeployment", "ns", "chat"): document(), ("ConfigMap", "ns", "chat-aerie-tuning"): config_map}
    monkeypatch.setattr(FakeCluster, "objects", objects)
    assert run_command_line(["tune", "explain", "chat", "-n", "ns"]) == 0
    assert "K=3 stays: nothing else is surely better." in capsys.readouterr().out
    config_map["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert run_command_line(["tune", "explain", "chat", "-n", "ns"]) == 0
    assert "No decision yet" in capsys.readouterr().out
    assert run_command_line(["tune", "explain", "other", "-n", "ns"]) == 2
    assert "SpeculativeDeployment ns/other" in capsys.readouterr().err


RECOMMENDATION = Recommendation(
    "r1",
    NOW.timestamp() - 600,
    "Change",
    Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 512, 3)), 5),
    (0.04, 0.08, 0.12),
    "Faster.",
)


def test_json_has_the_same_content(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = {
        "type": "SpeculationTuned",
        "status": "True",
        "reason": "Better",
        "message": "Yes.",
        "lastTransitionTime": "2026-11-01T12:00:00.000Z",
    }
    resource = document(trials=[TRIAL], savings=SAVINGS)
    resource["status"]["conditions"] = [tuned, {**tuned, "type": "Ready"}]
    record = replace(RECORD, recommendation=json.dumps(RECOMMENDATION.to_dict()))
    config_map: ObjectDict = {"metadata": {"ownerReferences": [{"uid": "u1"}]}, "data": record.to_data()}
    objects = {("SpeculativeDeployment", "ns", "chat"): resource, ("ConfigMap", "ns", "chat-aerie-tuning"): config_map}
    monkeypatch.setattr(Cluster, "connect", _connect)
    monkeypatch.setattr(FakeCluster, "objects", objects)

    def explain_as_json() -> Any:
        assert run_command_line(["tune", "explain", "chat", "-n", "ns", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    schedule = [
        {"minBatchSize": 1, "maxBatchSize": 8, "numSpeculativeTokens": 5},
        {"minBatchSize": 9, "maxBatchSize": 512, "numSpeculativeTokens": 3},
    ]
    assert explain_as_json() == {
        "namespace": "default",
        "name": "chat",
        "mode": "Auto",
        "numSpeculativeTokens": 3,
        "speculation": {"current": K3, "trials": [TRIAL], "savings": SAVINGS},
        "condition": tuned,
        "decision": {
            "decisionTime": "2026-11-01T23:50:00.000Z",
            "revision": "r1",
            "action": "Change",
            "setting": {"mode": "Schedule", "numSpeculativeTokens": 5, "schedule": schedule},
            "predicted": {"estimate": 0.08, "lower": 0.04, "upper": 0.12},
            "reason": "Faster.",
            "explanation": RECORD.explanation,
        },
    }
    config_map["data"] = replace(record, recommendation="[").to_data()
    decision = explain_as_json()["decision"]
    assert [decision[key] for key in ("revision", "action", "setting", "predicted", "reason")] == [None] * 5
    assert decision["explanation"] == RECORD.explanation
    objects[("SpeculativeDeployment", "ns", "chat")] = document("Off")
    config_map["data"] = {}
    explanation = explain_as_json()
    assert [explanation[key] for key in ("mode", "speculation", "condition", "decision")] == ["Off", None, None, None]


def test_without_a_cluster_the_error_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert run_command_line(["tune", "explain", "chat"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err
