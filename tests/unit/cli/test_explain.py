"""`kubectl aerie explain`: the last verdict, and why the setting is in use."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from aerie.cli.fleet.explain import (
    build_explanation_document,
    read_tuning_record,
    render_explanation,
    tuning_config_map_name,
)
from aerie.cli.fleet.resource_view import ResourceView
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord, render_tuning_config_map
from aerie.rollout.revision.desired import build_status_setting
from aerie.tuning.recommendation import Recommendation
from tests.golden import Messages
from tests.unit.cli.fleet_documents import Document, analyzing, condition, ready

NOW = datetime(2026, 11, 28, 8, 30, tzinfo=UTC)
SCHEDULE = Schedule((ScheduleTier(1, 8, 5), ScheduleTier(9, 512, 3)), 5)
RECORD = TuningRecord(NOW.timestamp() - 600, "f", "packed", "{}", "HOLD\nK=3 stays: nothing else is surely better.\n")
K3, K5 = {"mode": "Static", "numSpeculativeTokens": 3}, {"mode": "Static", "numSpeculativeTokens": 5}
SAVINGS = {"saved": 4.5, "spent": 0.5, "net": 4.0, "currentRate": 0.075, "updateTime": "2026-11-27T12:00:00.000Z"}


def tuned(document: Document, mode: str = "Auto", **speculation: Any) -> ResourceView:
    document["spec"]["speculation"] = {"numSpeculativeTokens": 3, "tuning": {"mode": mode, "decisionInterval": "30m"}}
    document["status"]["speculation"] = {"current": K3, **speculation}
    document["status"]["conditions"].append(condition("SpeculationTuned", "True", "Optimal", "K=3 is the best setting."))
    return ResourceView(document)


def config_map(record: TuningRecord, uid: str = "6b1f") -> Document:
    rendered = render_tuning_config_map("chat", record)
    return rendered | {"metadata": rendered["metadata"] | {"ownerReferences": [{"uid": uid}]}}


def explain(view: ResourceView, record: TuningRecord | None = RECORD, width: int = 100) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        data = read_tuning_record(view, None if record is None else config_map(record))
        console.print(render_explanation(view, data, NOW, width=width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.mark.parametrize("width", [80, 130])
def test_the_explanation_has_the_verdict_and_the_decision(width: int, messages: Messages) -> None:
    document = analyzing()
    document["status"]["analysis"] |= {"verdict": "Continue", "message": "After 12 blocks: time to first token is missing."}
    applied = {"setting": K5, "revision": "r2", "specRevision": "r1"}
    messages.check(f"analyzing, {width} columns", explain(tuned(document, applied=applied, savings=SAVINGS), width=width))


def test_the_explanation_has_the_reference() -> None:
    document = ready()
    document["status"]["stable"] |= {"acceptanceLength": 2.4, "referenceAcceptanceLength": 3.0}
    assert "\n  acceptance length 2.40; the reference is 3.00\n" in explain(ResourceView(document), None)


def test_the_explanation_says_what_is_pending(messages: Messages) -> None:
    messages.check("no decision yet", explain(tuned(ready()), None))
    messages.check("tuning is off", explain(tuned(ready(), "Off"), None))
    messages.check("nothing serves", explain(ResourceView(ready(stable=None, rolloutHistory=[])), None))


def test_the_record_belongs_to_the_resource() -> None:
    view = ResourceView(ready())
    assert tuning_config_map_name(view) == tuning_config_map.tuning_config_map_name(view.name)
    assert read_tuning_record(view, config_map(RECORD)) == RECORD.to_data()
    assert read_tuning_record(view, config_map(RECORD, uid="another")) is None
    assert read_tuning_record(view, config_map(RECORD) | {"data": {}}) is None


@pytest.mark.parametrize("setting", [Off(), Static(3), Adaptive(5), SCHEDULE])
def test_json_has_settings_in_the_form_of_the_status(setting: SpeculationSetting) -> None:
    recommendation = Recommendation("r1", NOW.timestamp() - 600, "Change", setting, (0.04, 0.08, 0.12), "Faster.")
    record = replace(RECORD, recommendation=json.dumps(recommendation.to_dict())).to_data()
    document = build_explanation_document(tuned(analyzing()), record)
    assert "state" not in document["analysis"]
    assert document["decision"] == {
        "decisionTime": "2026-11-28T08:20:00.000+00:00",
        "revision": "r1",
        "action": "Change",
        "setting": build_status_setting(setting).to_dict(),
        "predicted": {"lower": 0.04, "estimate": 0.08, "upper": 0.12},
        "reason": "Faster.",
        "explanation": RECORD.explanation,
    }


@pytest.mark.parametrize("text", ["[", "[]", "null", '{"setting": 3, "predicted_gain": "much"}'])
def test_a_recommendation_of_another_release_is_left_out(text: str) -> None:
    decision = build_explanation_document(tuned(ready()), replace(RECORD, recommendation=text).to_data())["decision"]
    assert [decision[key] for key in ("revision", "action", "setting", "predicted", "reason")] == [None] * 5
    assert decision["explanation"] == RECORD.explanation
