"""Alerts of the rendered chart, by promtool: each one fires when it should, not before and not otherwise. Needs no cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from aerie.rollout.status.metric_samples import ATTENTION_REASONS
from aerie_lab.binaries import ensure_binary

MONITORING = "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true"
Objects = Callable[..., list[dict[str, Any]]]
UP = 'up{namespace="aerie-system",service="aerie-metrics",pod="%s"}'
CHAT = 'namespace="team",name="chat",service="aerie-metrics",pod="%s"'


class Case(NamedTuple):
    """Series, and the minutes at which an alert does not and does fire."""

    alert: str
    series: dict[str, str]
    silent: tuple[int, ...]
    firing: tuple[int, ...]
    labels: dict[str, str] = {}  # noqa: RUF012 - never changed
    """Labels of the alert, besides those of the resource."""
    is_of_resource: bool = True


def attention(reason: str, values: str, pod: str = "a") -> dict[str, str]:
    return {f'aerie_attention{{{CHAT % pod},reason="{reason}"}}': values}


def phase(name: str, values: str, pod: str = "a") -> dict[str, str]:
    return {f'aerie_resource_phase{{{CHAT % pod},phase="{name}"}}': values}


def progress(values: str) -> dict[str, str]:
    return {f"aerie_rollout_last_progress_time_seconds{{{CHAT % 'a'}}}": values}


def trials(result: str, values: str) -> dict[str, str]:
    return {f'aerie_tuning_trials_finished_total{{{CHAT % "a"},result="{result}"}}': values}


def stable(acceptance_length: str, *, promoted: str = "2.5x200", tokens: str = "3x200", mode: str = "Static") -> dict[str, str]:
    arm = CHAT % "a" + ',arm="stable"'
    return {
        f"aerie_acceptance_length{{{arm}}}": acceptance_length,
        f"aerie_promoted_acceptance_length{{{CHAT % 'a'}}}": promoted,
        f"aerie_speculative_tokens{{{arm}}}": tokens,
        f'aerie_arm_info{{{arm},revision="r",speculation="{mode}"}}': "1x200",
    }


def regression(values: str) -> dict[str, str]:
    return attention("AcceptanceRegression", values)


def of_operator(metric: str, labels: str, values: str) -> dict[str, str]:
    return {f'{metric}{{namespace="aerie-system",service="aerie-metrics",pod="a"{labels}}}': values}


OWN_ALERTS = ("NotServing", "Failed", "InvalidSpec", "PreflightFailed", "Held")
DRIFT = ("DraftsRejected", "AcceptanceRegression", "MetricsUnavailable")
CASES = [
    Case("AerieNotServing", attention("NotServing", "_x4 1x6 _x20"), (4, 5, 20), (7, 10)),
    Case("AerieNotServing", attention("Held", "1x200"), (10, 100), ()),
    Case("AerieNotServing", attention("NotServing", "1 _x20"), (1, 2, 3, 10), ()),
    # The leader changes meanwhile: the series of the next pod continues the alert.
    Case("AerieNeedsAttention", attention("AwaitingApproval", "1x30 _x100") | attention("AwaitingApproval", "_x33 1x60", "b"),
         (59,), (62, 90), {"reason": "AwaitingApproval"}),
    Case("AerieNeedsAttention", attention("AwaitingApproval", "1x30 _x100"), (30, 62, 100), ()),
    *(Case("AerieNeedsAttention", attention(reason, "1x200"), (30, 59), (61, 150), {"reason": reason})
      for reason in ATTENTION_REASONS if reason not in (*OWN_ALERTS, *DRIFT)),
    *(Case("AerieNeedsAttention", attention(reason, "1x200"), (61, 150), ()) for reason in (*OWN_ALERTS, *DRIFT)),
    Case("AerieRolloutFailed", attention("Failed", "_x9 1x100"), (9, 12), (16, 80), {"reason": "Failed"}),
    Case("AerieRolloutFailed", attention("InvalidSpec", "1x100"), (3,), (6,), {"reason": "InvalidSpec"}),
    Case("AerieRolloutFailed", attention("RolledBack", "1x100"), (50,), ()),
    Case("AeriePreflightFailed", attention("PreflightFailed", "1x30 _x30"), (4, 45), (6, 30)),
    Case("AeriePreflightFailed", attention("Failed", "1x100"), (50,), ()),
    Case("AerieRolloutUndecided", attention("Held", "1x30 _x30"), (4, 45), (6, 30)),
    Case("AerieRolloutUndecided", attention("AwaitingApproval", "1x100"), (50,), ()),
    Case("AerieRolloutStuck", phase("Starting", "1x200"), (60, 119), (121, 190), {"phase": "Starting"}),
    Case("AerieRolloutStuck", phase("Starting", "1x90 _x200") | phase("Analyzing", "_x91 1x200"), (90, 121, 190), ()),
    Case("AerieRolloutStuck", phase("Promoting", "1x200") | progress("0x200"),
         (60, 125), (135, 190), {"phase": "Promoting"}),
    # Pods of a large fleet become ready all the time.
    Case("AerieRolloutStuck", phase("Promoting", "1x200") | progress("0+60x200"),
         (130, 190), ()),
    Case("AerieAcceptanceFell", stable("2.4x20 2.0x200") | regression("0x20 1x200"), (20, 79), (85, 190)),
    Case("AerieAcceptanceFell", stable("2.2x200"), (100,), ()),
    # A value of few requests, which the operator does not compare.
    Case("AerieAcceptanceFell", stable("1.9x200"), (100,), ()),
    Case("AerieAcceptanceFell", stable("1.0x200") | regression("1x200"), (100,), ()),
    Case("AerieAcceptanceLost", stable("2.4x20 1.02x200"), (20, 49), (52, 190)),
    Case("AerieAcceptanceLost", stable("1.1x200"), (100,), ()),
    Case("AerieAcceptanceLost", stable("1.0x200", tokens="0x200"), (100,), ()),
    Case("AerieAcceptanceLost", stable("1.0x200", mode="Adaptive"), (100,), ()),
    Case("AerieTrialsReverted",
         trials("RolledBack", "0x9 1x9 2x9 3x200") | trials("Promoted", "0x9 5x200"), (15, 25), (40, 100)),
    Case("AerieTrialsReverted",
         trials("RolledBack", "0x9 1x200") | trials("Failed", "0x9 1x200"), (40, 100), ()),
    Case("AerieNotLeading", of_operator("aerie_leader", "", "1x10 0x100"), (9, 14), (17, 60), is_of_resource=False),
    Case("AerieNotLeading", of_operator("aerie_leader", "", "1x100"), (50,), (), is_of_resource=False),
    Case("AerieOperatorCannotList", {'aerie_list_failed{kind="Pod",namespace=""}': "0x5 1x60 0x20"}, (5, 20, 80), (22, 60),
         is_of_resource=False),
    Case("AerieMetricsUnreadable",
         of_operator("aerie_scrape_failures_total", ',reason="timeout"', "0x10 0+2x100")
         | of_operator("aerie_scrape_duration_seconds_count", "", "0+10x110"), (10, 20), (40, 100), is_of_resource=False),
    Case("AerieMetricsUnreadable",
         of_operator("aerie_scrape_failures_total", ',reason="timeout"', "0+1x100")
         | of_operator("aerie_scrape_duration_seconds_count", "", "0+100x100"), (40, 90), (), is_of_resource=False),
    Case("AerieMetricsUnreadable", attention("MetricsUnavailable", "1x100"), (14,), (16, 90), is_of_resource=False),
    Case("AerieNotificationsLost", of_operator("aerie_notifications_total", ',receiver="team",outcome="rejected"', "0x10 1x100"),
         (9, 50), (12, 30), {"receiver": "team", "outcome": "rejected"}, is_of_resource=False),
    Case("AerieNotificationsLost", of_operator("aerie_notifications_total", ',receiver="team",outcome="sent"', "0+1x100"),
         (12, 50), (), is_of_resource=False),
    # Both operators, then one, then none.
    Case("AerieOperatorDown", {UP % "a": "1x29 0x60", UP % "b": "1x9 0x80"}, (9, 28, 33), (36, 60), is_of_resource=False),
    Case("AerieOperatorDown", {}, (4,), (6, 60), is_of_resource=False),
    Case("AerieOperatorWithoutReserve", {UP % "a": "1x200", UP % "b": "1x9 0x200"}, (9, 23), (26, 60), is_of_resource=False),
    Case("AerieOperatorWithoutReserve", {UP % "a": "1x200", UP % "b": "1x200"}, (60,), (), is_of_resource=False),
]  # fmt: skip


def promtool(*arguments: object) -> None:
    """Run promtool. Raises AssertionError with its output."""
    command = [str(ensure_binary("promtool")), *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture(scope="module")
def groups(objects: Objects) -> list[dict[str, Any]]:
    """Rule groups of the chart with its defaults."""
    (rule,) = objects("--set", MONITORING, "--show-only", "templates/prometheusrule.yaml")
    rule_groups: list[dict[str, Any]] = rule["spec"]["groups"]
    return rule_groups


def test_alerts_fire_exactly_when_expected(groups: list[dict[str, Any]], tmp_path: Path) -> None:
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert {case.alert for case in CASES if case.firing} == alerts.keys()
    assert {case.alert for case in CASES if not case.firing} >= alerts.keys() - {"AerieOperatorDown", "AerieOperatorCannotList"}
    # Texts with values are checked below: here, only which alerts fire.
    plain = [{**group, "rules": [{**rule, "annotations": {}} for rule in group["rules"]]} for group in groups]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": plain}))
    tests: list[dict[str, Any]] = []
    for case in CASES:
        labels = {"severity": alerts[case.alert]["labels"]["severity"], **case.labels}
        labels |= {"namespace": "team", "name": "chat"} if case.is_of_resource else {}
        expected: list[dict[str, Any]] = [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": []} for minute in case.silent
        ]
        expected += [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": [{"exp_labels": labels}]} for minute in case.firing
        ]
        series = [{"series": name, "values": values} for name, values in case.series.items()]
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": expected})
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", tmp_path / "tests.yaml")


def test_texts_name_the_resource_and_its_value(groups: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    annotations = {
        "summary": "The acceptance length of team/chat fell.",
        "description": "Clients get correct answers, more slowly than before. The acceptance length is 80% of the reference of "
        "the same revision.",
        "runbook_url": "docs/how-to/runbooks/AerieAcceptanceFell.md",
    }
    labels = {"namespace": "team", "name": "chat", "severity": "warning"}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values} for name, values in (stable("2.0x200") | regression("1x200")).items()
        ],
        "alert_rule_test": [
            {
                "eval_time": "61m",
                "alertname": "AerieAcceptanceFell",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}],
            }
        ],
    }
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", tmp_path / "tests.yaml")


def test_runbooks_begin_with_the_value(objects: Objects) -> None:
    arguments = ("--set", f"{MONITORING},metrics.prometheusRule.runbooks=https://wiki.example/aerie/")
    (rule,) = objects(*arguments, "--show-only", "templates/prometheusrule.yaml")
    for group in rule["spec"]["groups"]:
        for alert in group["rules"]:
            assert alert["annotations"]["runbook_url"] == f"https://wiki.example/aerie/{alert['alert']}.md"


def test_one_operator_has_no_reserve(objects: Objects) -> None:
    (rule,) = objects("--set", f"{MONITORING},replicas=1", "--show-only", "templates/prometheusrule.yaml")
    names = {alert["alert"] for group in rule["spec"]["groups"] for alert in group["rules"]}
    assert "AerieOperatorWithoutReserve" not in names
    assert "AerieOperatorDown" in names
