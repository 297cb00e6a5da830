"""Each alert of the chart has its runbook and its line in docs/how-to/monitoring.md, and no page is left over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks"
RULES = (ROOT / "charts" / "aerie" / "templates" / "prometheusrule.yaml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
SECTIONS = ["Symptom", "Meaning for clients", "Check", "Fix", "When to ignore"]


def test_alerts_and_runbooks_match() -> None:
    assert len(ALERTS) == len(set(ALERTS))
    assert sorted(ALERTS) == sorted(path.stem for path in RUNBOOKS.glob("*.md"))


@pytest.mark.parametrize("alert", ALERTS)
def test_runbook_has_all_sections(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    assert text.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert "kubectl" in text
    for path in re.findall(r"\]\(([^)#]+)", text):
        assert (RUNBOOKS / path).exists()


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_states_severity_meaning_and_runbook(alert: str) -> None:
    rule = RULES.split(f"- alert: {alert}\n")[1].split("- alert: ")[0]
    assert re.search(r"severity: (critical|warning|info)\n", rule)
    assert re.search(r"^ +summary: .+\n +description: .*(Clients|Engines|Another operator|Resources)", rule, re.MULTILINE)
    assert f"runbook_url: {{{{ $runbooks }}}}/{alert}.md" in rule


def test_monitoring_page_lists_each_alert_with_its_severity() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    listed = re.findall(r"^\| (Aerie\w+) \| (\w+) \| .+ \| \[page\]\(runbooks/(\w+)\.md\) \|$", page, re.MULTILINE)
    severities = re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", RULES, re.DOTALL)
    assert sorted((alert, severity) for alert, severity, _ in listed) == sorted(severities)
    assert all(alert == file for alert, _, file in listed)
