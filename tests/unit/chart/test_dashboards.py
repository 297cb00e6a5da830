"""Dashboards of the chart as Grafana imports them, and the list of metrics in the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from aerie.api.status import Status
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.rollout_metrics import RolloutMetrics
from aerie.controller.work_queue import NamespacedName
from scripts import dashboards
from scripts.reference.metrics import list_metric_families
from tests.unit.rollout.world import world_in_phase

ROOT = Path(__file__).resolve().parents[3]
FILES = dict(dashboards.files())
DASHBOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in FILES.items()}
UNITS = {"none", "s", "percentunit", "ops", "reqps"}


@pytest.mark.parametrize("name", FILES)
def test_file_is_up_to_date(name: str) -> None:
    assert (ROOT / "charts" / "aerie" / "files" / "dashboards" / name).read_text() == FILES[name]


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_ids_units_descriptions_and_places(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert len(panel["description"].split()) >= 2
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_queries_use_only_defined_variables(dashboard: dict[str, Any]) -> None:
    defined = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [panel["title"] for panel in dashboard["panels"]]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert {name for query in queries for name in re.findall(r"\$(\w+)", query)} <= defined


def test_queries_name_only_exported_metrics() -> None:
    names = {name for family in list_metric_families() for name in family.series_names}
    labels = {"aerie_dev_name", "aerie_dev_revision", "aerie_dev_control"}
    rules = (ROOT / "charts" / "aerie" / "templates" / "prometheusrule.yaml").read_text()
    texts = [*FILES.values(), *re.findall(r"expr: .*?for: |expr: .*\n", rules, re.DOTALL)]
    used_names = {name for text in texts for name in re.findall(r"\baerie_\w+", text)}
    assert used_names - labels <= names


def test_dashboards_are_linked() -> None:
    uids = {dashboard["uid"] for dashboard in DASHBOARDS.values()}
    assert uids == {"aerie-fleet", "aerie-deployment", "aerie-operator"}
    for dashboard in DASHBOARDS.values():
        (link,) = dashboard["links"]
        assert set(link["tags"]) <= set(dashboard["tags"])
    tables = [panel for panel in DASHBOARDS["fleet.json"]["panels"] if panel["type"] == "table"]
    assert tables
    for table in tables:
        (link,) = table["fieldConfig"]["defaults"]["links"]
        assert re.findall(r"/d/([\w-]+)", link["url"]) == ["aerie-deployment"]


def test_reference_lists_each_exported_metric() -> None:
    metrics, rollouts = OperatorMetrics(), RolloutMetrics()
    metrics.registry.register(rollouts)
    world, _ = world_in_phase("Analyzing")
    world.measure(3, +0.1)
    rollouts.update(NamespacedName("default", "chat"), Status.from_dict(world.status))
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().partition("## The operator")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(aerie_\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    listed = {name: (kind, labels) for name, kind, labels in rows}
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", generate_latest(metrics.registry).decode(), re.MULTILINE))
    exported = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    assert {name: kind for name, (kind, _) in listed.items()} == exported
    for family in list_metric_families():
        name = family.series_names[0] if family.type == "counter" else family.name
        assert listed[name][1] == ", ".join(family.labels)


def test_descriptions_state_the_labels_of_the_exposition() -> None:
    metrics, rollouts = OperatorMetrics(), RolloutMetrics()
    world, _ = world_in_phase("Analyzing")
    rollouts.update(NamespacedName("default", "chat"), Status.from_dict(world.status))
    metrics.registry.register(rollouts)
    labels_by_series = {name: set(family.labels) for family in list_metric_families() for name in family.series_names}
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    assert samples
    for sample in samples:
        if not sample.name.endswith("_created"):
            assert set(sample.labels) - {"le"} == labels_by_series[sample.name]
