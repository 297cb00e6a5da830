"""Queries of the dashboards and alerts of the rendered chart, evaluated by a real Prometheus over real metrics: those that the
operator exports of statuses from its own rollouts, and those of a simulated engine. Needs Helm and Prometheus, and no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import start_http_server

from aerie.api.status import Status
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.rollout_metrics import RolloutMetrics
from aerie.controller.work_queue import NamespacedName
from aerie_lab.testing import agreement, prometheus, wait_until
from scripts.reference.metrics import list_metric_families
from tests.unit.rollout import tuned_world
from tests.unit.rollout.world import monitored_world, serving_world, world_in_phase

Objects = Callable[..., list[dict[str, Any]]]
SPECULATION = ("--speculative-config", agreement.build_speculative_config(agreement.BUNDLE_FOLDER / "eagle31"))
CHAT = NamespacedName("team", "chat")
VARIABLES = {"namespace": "team", "name": "chat", "criterion": "TokensPerStep", "__rate_interval": "1m"}
ENGINE_LABELS = {"namespace": "team", "aerie_dev_name": "chat", "aerie_dev_revision": "r", "aerie_dev_control": "false"}


class ExportedOperator:
    """Metrics of an operator with resources in several phases, as it exports them."""

    def __init__(self) -> None:
        self.metrics, self.rollouts = OperatorMetrics(), RolloutMetrics()
        self.metrics.registry.register(self.rollouts)
        analyzing, _ = world_in_phase("Analyzing")
        analyzing.measure(30, +0.005)
        analyzing.status["canary"]["acceptanceLength"] = analyzing.status["stable"]["acceptanceLength"] = 2.4
        analyzing.status["stable"]["referenceAcceptanceLength"] = 2.5
        for arm in ("canary", "stable"):
            analyzing.status[arm] |= {"timePerOutputToken": 0.02, "timeToFirstToken": 0.3}
        tuned = tuned_world.tuned_world()
        tuned_world.run_trial(tuned, -0.1)
        self.speculation = tuned.status["speculation"]
        analyzing.status["speculation"] |= {key: value for key, value in self.speculation.items() if key in ("trials", "savings")}
        self.analyzing = Status.from_dict(analyzing.status)
        held, _ = world_in_phase("Analyzing")
        held.measure(2, 0.0)
        held.now = held.now.replace(day=held.now.day + 1)
        held.step()
        monitored, _ = monitored_world()
        self.statuses = {
            CHAT: self.analyzing,
            NamespacedName("team", "held"): Status.from_dict(held.status),
            NamespacedName("team", "promoted"): Status.from_dict(monitored.status),
            NamespacedName("team", "idle"): Status.from_dict(serving_world().status),
            NamespacedName("team", "tuned"): Status.from_dict(tuned.status),
        }
        assert {status.phase for status in self.statuses.values()} == {"Analyzing", "Held", "Monitoring", "Ready"}

    def work(self) -> None:
        """Record what an operator records all the time; a rollout of another resource ends each time."""
        for key, status in self.statuses.items():
            self.rollouts.update(key, status)
        outcome = self.statuses[NamespacedName("team", "promoted")].rollout_history[0]
        history = [outcome.model_copy(update={"revision": f"r{number}"}) for number in range(self.finished_count)]
        self.rollouts.update(CHAT, self.analyzing.model_copy(update={"rollout_history": history[-10:]}))
        self.finished_count += 1
        metrics = self.metrics
        metrics.set_leader(True)
        for seconds in (0.01, 0.2):
            metrics.record_api_call("GET", "200", seconds)
            metrics.record_queue_wait(seconds)
            metrics.record_reconcile("done", seconds)
            metrics.record_scrape("timeout", seconds)
            metrics.record_tuning_decision("hold", seconds)
        metrics.record_drafter_call("load", "done")
        metrics.record_notification("team", "sent")
        metrics.set_list_failure("Pod", "team", failed=False)
        metrics.set_hold_reason("team/chat", "")
        metrics.set_rollout_counts({("Rollout", "Active"): 2})

    finished_count = 0


async def _work_once(operator: ExportedOperator) -> None:
    monitor = asyncio.create_task(operator.metrics.monitor_event_loop(lambda: 0))
    operator.work()
    await asyncio.sleep(0.6)  # the monitor observes every half second
    monitor.cancel()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ExportedOperator]]:
    """A Prometheus that scrapes the operator as the ServiceMonitor says, and an engine as the PodMonitor says."""
    folder = tmp_path_factory.mktemp("monitoring")
    operator = ExportedOperator()
    httpd, thread = start_http_server(0, "127.0.0.1", operator.metrics.registry)
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(httpd.server_close)
        stack.callback(httpd.shutdown)
        engine = stack.enter_context(agreement.start_engine("simulated", Path(), folder, *SPECULATION))
        operator_labels = {"namespace": "aerie-system", "service": "aerie-metrics", "pod": "aerie-0", "container": "operator"}
        jobs: list[dict[str, Any]] = [
            {
                "job_name": "aerie",
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{httpd.server_port}"], "labels": operator_labels}],
            },
            {
                "job_name": "engines-by-resource",
                "static_configs": [{"targets": [engine.url.removeprefix("http://")], "labels": ENGINE_LABELS}],
            },
        ]
        url = stack.enter_context(prometheus.run_prometheus(folder, {}, further_jobs=jobs))
        yield url, operator


def query(url: str, expression: str) -> list[float]:
    """Return the values of an instant query. Raises AssertionError with Prometheus's message."""
    response = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60)
    document = response.json()
    assert document["status"] == "success", f"{expression}: {document.get('error')}"
    result = document["data"]["result"]
    return [float(series["value"][1]) for series in result]


def list_selected_metrics(url: str, expression: str) -> set[str]:
    """Return the names of the metrics that Prometheus's own parser finds in the expression."""
    document = httpx.get(f"{url}/api/v1/parse_query", params={"query": expression}, timeout=60).json()
    assert document["status"] == "success", f"{expression}: {document.get('error')}"

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if node.get("type") in ("vectorSelector", "matrixSelector"):
                yield node["name"]
            for child in node.values():
                yield from walk(child)
        elif isinstance(node, list):
            for child in node:
                yield from walk(child)

    return set(walk(document["data"]))


def expand(expression: str) -> str:
    return re.sub(r"\$(\w+)", lambda match: VARIABLES[match[1]], expression)


@pytest.fixture(scope="module")
def dashboards(objects: Objects) -> dict[str, dict[str, Any]]:
    """Dashboards of the rendered chart, by file name."""
    (item,) = objects("--set", "metrics.dashboard.enabled=true", "--show-only", "templates/dashboard.yaml")
    assert item["data"].keys() == {"aerie-fleet.json", "aerie-deployment.json", "aerie-operator.json"}
    return {name: json.loads(text) for name, text in item["data"].items()}


def list_expressions(dashboards: dict[str, dict[str, Any]]) -> list[str]:
    """Return the queries of all panels, with values for their variables."""
    panels = [panel for dashboard in dashboards.values() for panel in dashboard["panels"]]
    return [expand(target["expr"]) for panel in panels for target in panel["targets"]]


@pytest.fixture(scope="module")
def alert_expressions(objects: Objects) -> list[str]:
    """Expressions of all alerts of the rendered chart."""
    enabled = "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true"
    (rule,) = objects("--set", enabled, "--show-only", "templates/prometheusrule.yaml")
    return [alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]]


@pytest.mark.timeout(600)
def test_every_panel_shows_data(server: tuple[str, ExportedOperator], dashboards: dict[str, dict[str, Any]]) -> None:
    url, operator = server
    expressions = list_expressions(dashboards)
    assert len(expressions) > 50
    recommended = operator.analyzing.speculation
    assert recommended is not None
    gain = {"estimate": 0.04, "lower": 0.01, "upper": 0.08}
    operator.analyzing = operator.analyzing.model_copy(
        update={"speculation": type(recommended).from_dict({**recommended.to_dict(), "predicted": gain})}
    )
    pending = set(expressions)

    def all_have_data() -> bool:
        asyncio.run(_work_once(operator))
        for expression in sorted(pending):
            values = query(url, expression)
            if values and all(math.isfinite(value) for value in values):
                pending.discard(expression)
        return not pending

    with contextlib.suppress(AssertionError):  # the next line names the queries
        wait_until(all_have_data, "every query has data")
    assert pending == set()


def test_queries_select_only_exported_metrics(
    server: tuple[str, ExportedOperator], dashboards: dict[str, dict[str, Any]], alert_expressions: list[str]
) -> None:
    url, _ = server
    families = {name for family in list_metric_families() for name in family.series_names}
    wait_until(lambda: query(url, "vllm:num_requests_running"), "the engine was scraped")
    names = httpx.get(f"{url}/api/v1/label/__name__/values", timeout=60).json()["data"]
    engine_metrics = {name for name in names if name.startswith("vllm:")}
    for expression in [*list_expressions(dashboards), *alert_expressions]:
        query(url, expression)
        assert list_selected_metrics(url, expression) <= families | engine_metrics | {"up"}, expression


def test_labels_of_queries_are_those_of_the_families(
    server: tuple[str, ExportedOperator], dashboards: dict[str, dict[str, Any]], alert_expressions: list[str]
) -> None:
    """Prometheus accepts any label; a misspelt one selects nothing."""
    url, _ = server
    labels_by_series = {name: set(family.labels) | {"le"} for family in list_metric_families() for name in family.series_names}
    scraped = {"namespace", "service", "pod", "container", "job", "instance"}
    for expression in [*list_expressions(dashboards), *alert_expressions]:
        for name, matchers in re.findall(r"(aerie_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers)) <= labels_by_series[name] | scraped, expression
    assert query(url, "up") == [1.0, 1.0]


def test_resource_keeps_its_own_namespace(server: tuple[str, ExportedOperator], objects: Objects) -> None:
    url, operator = server
    asyncio.run(_work_once(operator))
    wait_until(lambda: query(url, 'aerie_resource_phase{namespace="team",name="held",phase="Held"}') == [1.0], "it is scraped")
    assert query(url, "aerie_leader{namespace='aerie-system',service='aerie-metrics'}") == [1.0]
    (monitor,) = objects("--set", "metrics.serviceMonitor.enabled=true", "--show-only", "templates/servicemonitor.yaml")
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True


def test_deleted_resource_disappears(server: tuple[str, ExportedOperator]) -> None:
    url, operator = server
    gone = NamespacedName("team", "gone")
    operator.rollouts.update(gone, operator.statuses[NamespacedName("team", "idle")])
    wait_until(lambda: query(url, 'aerie_replicas{name="gone"}'), "it is scraped")
    operator.rollouts.forget(gone)
    wait_until(lambda: not query(url, '{name="gone"}'), "its series have ended")
