"""`aerie tune explain`: what it says of a resource, and of one that cannot be read."""

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
KEPT = TuningRecord(NOW.timestamp() - 600, "f", "packed", "{}", "HOLD\nK=3 stays: nothing else is surely better.\n")
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


def told(mode: str = "Auto", kept: TuningRecord | None = KEPT, **speculation: Any) -> str:
    return "\n".join(render_explanation(SpeculativeDeployment.from_dict(document(mode, **speculation)), kept, NOW))


def test_a_person_gets_what_is_in_force_what_was_tried_and_the_last_decision(messages: Messages) -> None:
    applied = {"setting": K5, "revision": "r2", "specRevision": "r1"}
    text = told(current=K5, applied=applied, trials=[TRIAL], savings=SAVINGS, message="K=5 is better.")
    messages.check("settings, trials and the last decision", text)


def test_before_anything_was_decided_it_says_what_is_waited_for(messages: Messages) -> None:
    text = told(kept=None)
    messages.check("no decision yet", text)
    messages.check("tuning is off", told("Off", None))


class Reads(Cluster):
    objects: dict[tuple[str, str, str], ObjectDict] = {}  # noqa: RUF012

    def __init__(self) -> None:
        pass

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        return self.objects.get((kind.kind, namespace, name))

    async def close(self) -> None:
        pass


async def _connected(*_: object, **__: object) -> Cluster:
    return Reads()


def test_the_command_reads_the_resource_and_its_own_config_map(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Cluster, "connect", _connected)
    config_map: ObjectDict = {"metadata": {"ownerReferences": [{"uid": "u1"}]}, "data": KEPT.to_data()}
    objects = {("SpeculativeDeployment", "ns", "chat"): document(), ("ConfigMap", "ns", "chat-aerie-tuning"): config_map}
    monkeypatch.setattr(Reads, "objects", objects)
    assert run_command_line(["tune", "explain", "chat", "-n", "ns"]) == 0
    assert "K=3 stays: nothing else is surely better." in capsys.readouterr().out
    config_map["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert run_command_line(["tune", "explain", "chat", "-n", "ns"]) == 0
    assert "No decision yet" in capsys.readouterr().out
    assert run_command_line(["tune", "explain", "other", "-n", "ns"]) == 2
    assert "SpeculativeDeployment ns/other" in capsys.readouterr().err


ADVICE = Recommendation(
    "r1",
    NOW.timestamp() - 600,
    "Change",
    Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 512, 3)), 5),
    (0.04, 0.08, 0.12),
    "Faster.",
)


def test_a_program_gets_the_same_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = {
        "type": "SpeculationTuned",
        "status": "True",
        "reason": "Better",
        "message": "Yes.",
        "lastTransitionTime": "2026-11-01T12:00:00.000Z",
    }
    found = document(trials=[TRIAL], savings=SAVINGS)
    found["status"]["conditions"] = [tuned, {**tuned, "type": "Ready"}]
    kept = replace(KEPT, recommendation=json.dumps(ADVICE.to_dict()))
    config_map: ObjectDict = {"metadata": {"ownerReferences": [{"uid": "u1"}]}, "data": kept.to_data()}
    objects = {("SpeculativeDeployment", "ns", "chat"): found, ("ConfigMap", "ns", "chat-aerie-tuning"): config_map}
    monkeypatch.setattr(Cluster, "connect", _connected)
    monkeypatch.setattr(Reads, "objects", objects)

    def explained() -> Any:
        assert run_command_line(["tune", "explain", "chat", "-n", "ns", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    schedule = [
        {"minBatchSize": 1, "maxBatchSize": 8, "numSpeculativeTokens": 5},
        {"minBatchSize": 9, "maxBatchSize": 512, "numSpeculativeTokens": 3},
    ]
    assert explained() == {
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
            "explanation": KEPT.explanation,
        },
    }
    config_map["data"] = replace(kept, recommendation="[").to_data()
    decision = explained()["decision"]
    assert [decision[key] for key in ("revision", "action", "setting", "predicted", "reason")] == [None] * 5
    assert decision["explanation"] == KEPT.explanation
    objects[("SpeculativeDeployment", "ns", "chat")] = document("Off")
    config_map["data"] = {}
    found = explained()
    assert [found[key] for key in ("mode", "speculation", "condition", "decision")] == ["Off", None, None, None]


def test_without_a_cluster_it_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert run_command_line(["tune", "explain", "chat"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err
