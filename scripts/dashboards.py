"""Grafana dashboards of the chart, as files that Grafana imports.

    fleet       all resources: who has to act, where rollouts are in progress, how drafters do
    deployment  one resource: its rollout, the comparison that decides, its arms, tuning
    operator    the operator itself

Each panel states its unit and its meaning, because its class requires both. Guarantees: equal sources give equal files; ids and
positions follow from the order. Not guaranteed: that a query is right. tests/lab/chart/test_monitoring.py evaluates each one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39
"""Version of Grafana's dashboard format: that of Grafana 10.4, which later releases read."""
ROW_WIDTH = 24
TAG = "aerie"
_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_DEPLOYMENT_URL = "/d/aerie-deployment?${datasource:queryparam}&var-namespace=%s&var-name=%s&${__url_time_range}"
_ARM = "{{aerie_dev_revision}} control={{aerie_dev_control}}"
_ENGINES = '{namespace="$namespace",aerie_dev_name="$name"}'


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    expression: str
    legend: str = ""
    """Name of a series, with labels in double braces."""


@dataclass(frozen=True)
class Panel:
    """One panel; `unit` is a name of Grafana's units."""

    kind: str
    """stat, timeseries, table or state-timeline."""
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    thresholds: tuple[tuple[str, float], ...] = ()
    """Colour and the value from which it applies, ascending."""
    base_color: str = "green"
    """Colour below the first threshold."""
    minimum: float | None = None
    decimals: int | None = None
    shows_name: bool = False
    """Whether a stat shows the name of its series instead of its value."""
    renamed_columns: tuple[tuple[str, str], ...] = ()
    """Columns of a table that get another name."""
    fills: bool = False
    """Whether the areas of a time series are stacked."""


@dataclass(frozen=True)
class Variable:
    """One variable: the values of a label."""

    name: str
    label: str
    query: str
    is_multiple: bool = False
    """Whether several values, or all, may be chosen."""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard."""

    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...] = field(default=())


def files() -> Iterator[tuple[str, str]]:
    """Yield (file name, JSON) of each dashboard."""
    for dashboard in DASHBOARDS:
        yield f"{dashboard.name}.json", json.dumps(build(dashboard), indent=2, ensure_ascii=False) + "\n"


def build(dashboard: Dashboard) -> Json:
    """Return the dashboard in Grafana's format."""
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
    return {
        "title": f"Aerie / {dashboard.title}",
        "uid": f"aerie-{dashboard.name}",
        "description": dashboard.description,
        "tags": [TAG, "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "Aerie",
                "tags": [TAG],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [*variables, *(_build_variable(variable) for variable in dashboard.variables)]},
        "panels": list(_build_panels(dashboard.panels)),
    }


def _build_variable(variable: Variable) -> Json:
    document: Json = {
        "name": variable.name,
        "type": "query",
        "label": variable.label,
        "datasource": _DATA_SOURCE,
        "query": {"query": variable.query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": variable.is_multiple,
        "includeAll": variable.is_multiple,
    }
    if variable.is_multiple:
        document |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return document


def _build_panels(panels: Sequence[Panel]) -> Iterator[Json]:
    """Yield the panels from left to right, in rows of their greatest height."""
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > ROW_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        yield _build_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": panel.height})
        x, row_height = x + panel.width, max(row_height, panel.height)


def _build_panel(number: int, panel: Panel, position: Json) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "thresholds": {
            "mode": "absolute",
            "steps": [
                {"color": panel.base_color, "value": None},
                *({"color": color, "value": value} for color, value in panel.thresholds),
            ],
        },
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
    }
    defaults |= {"min": panel.minimum} if panel.minimum is not None else {}
    defaults |= {"decimals": panel.decimals} if panel.decimals is not None else {}
    document: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATA_SOURCE,
        "gridPos": position,
        "targets": [_build_target(panel, index, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if panel.kind == "stat":
        mode = {"textMode": "name"} if panel.shows_name else {"textMode": "auto"}
        document["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none", **mode}
    elif panel.kind == "timeseries":
        document["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["custom"] = {
            "fillOpacity": 30 if panel.fills else 5,
            "stacking": {"mode": "normal" if panel.fills else "none"},
            "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
        }
    elif panel.kind == "state-timeline":
        document["options"] = {"mergeValues": True, "showValue": "never", "rowHeight": 0.8}
    elif panel.kind == "table":
        document |= _build_table(panel, defaults)
    return document


def _build_table(panel: Panel, defaults: Json) -> Json:
    """Return the transformations of a table, and set the links of its rows to the dashboard of the resource."""
    url = _DEPLOYMENT_URL % ("${__data.fields.namespace}", "${__data.fields.name}")
    if any("namespace, name" in query.expression for query in panel.queries):
        defaults["links"] = [{"title": "Open the deployment", "url": url}]
    values = {
        "Value" if len(panel.queries) == 1 else f"Value #{_ref(index)}": query.legend for index, query in enumerate(panel.queries)
    }
    organize = {"excludeByName": {"Time": True}, "renameByName": {**values, **dict(panel.renamed_columns)}}
    return {
        "options": {"cellHeight": "sm", "footer": {"show": False}},
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    }


def _ref(index: int) -> str:
    return chr(ord("A") + index)


def _build_target(panel: Panel, index: int, query: Query) -> Json:
    target: Json = {
        "refId": _ref(index),
        "datasource": _DATA_SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
    }
    if panel.kind in ("stat", "table"):
        target |= {"instant": True, "range": False}
    if panel.kind == "table":
        target["format"] = "table"
    return target


def _stat(title: str, description: str, unit: str, expression: str, *, legend: str = "", **options: Any) -> Panel:
    return Panel("stat", title, description, unit, (Query(expression, legend),), **{"width": 4, "height": 4, **options})


def _graph(title: str, description: str, unit: str, *queries: tuple[str, str], **options: Any) -> Panel:
    return Panel("timeseries", title, description, unit, tuple(Query(*query) for query in queries), **options)


def _quantiles(metric: str, labels: str = "") -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({quantile}, sum by (le) (rate({metric}_bucket{labels}[$__rate_interval])))", f"p{100 * quantile:g}")
        for quantile in (0.5, 0.99)
    )


def _fleet(metric: str, **labels: str) -> str:
    """Return the selector of a metric in the chosen namespaces."""
    return _select(metric, 'namespace=~"$namespace"', labels)


def _own(metric: str, **labels: str) -> str:
    """Return the selector of a metric of the chosen resource."""
    return _select(metric, 'namespace="$namespace",name="$name"', labels)


def _select(metric: str, scope: str, labels: Mapping[str, str]) -> str:
    return metric + "{" + ",".join([scope, *(f'{name}="{value}"' for name, value in labels.items())]) + "}"


_ACCEPTANCE_DESCRIPTION = "Mean acceptance length: 1 + accepted draft tokens / drafts. 1 means that no draft token is accepted."
_DRIFT_DESCRIPTION = (
    "Acceptance length of the stable pods against their reference. Below -15 % the condition Degraded is "
    "AcceptanceRegression: the requests have changed, or the drafter fits them less well."
)

FLEET = Dashboard(
    "fleet",
    "Fleet",
    "All SpeculativeDeployments: who has to act, where rollouts are in progress, and how the drafters do.",
    (
        _stat(
            "Resources that need a user",
            "Resources with at least one reason for a user to act (table below). Clients are served, except with NotServing.",
            "none",
            f"count(count by (namespace, name) ({_fleet('aerie_attention')})) or vector(0)",
            thresholds=(("orange", 1),),
        ),
        _stat(
            "Not serving",
            "Resources of which no pod that serves is ready: their clients get errors.",
            "none",
            "count(count by (namespace, name) (" + _fleet("aerie_attention", reason="NotServing") + ")) or vector(0)",
            thresholds=(("red", 1),),
        ),
        _stat(
            "Resources",
            "SpeculativeDeployments that the leader has reconciled.",
            "none",
            f"count(count by (namespace, name) ({_fleet('aerie_resource_phase')})) or vector(0)",
        ),
        _stat(
            "Rollouts in progress",
            "Rollouts and trials, from their start to the end of the post-promotion monitoring.",
            "none",
            f"count(count by (namespace, name) ({_fleet('aerie_rollout_info')})) or vector(0)",
        ),
        _stat(
            "Queued",
            "Rollouts that wait for a slot, because the operator's limit of concurrent rollouts is reached.",
            "none",
            "count(count by (namespace, name) (" + _fleet("aerie_resource_phase", phase="Queued") + ")) or vector(0)",
        ),
        _stat(
            "Ready pods",
            "Share of the desired pods of all arms that are ready.",
            "percentunit",
            "sum(" + _fleet("aerie_replicas", state="ready") + ") / (sum(" + _fleet("aerie_replicas", state="desired") + ") > 0)",
            decimals=1,
        ),
        Panel(
            "table",
            "What needs a user",
            "Reasons for a user to act. A row leads to its deployment. docs/how-to/monitoring.md explains the reasons.",
            "none",
            (Query(f"max by (namespace, name, reason) ({_fleet('aerie_attention')})", "active"),),
            width=12,
        ),
        Panel(
            "table",
            "Age of rollouts in progress",
            "Revision, method and purpose of each rollout, and the time since its start. A row leads to its deployment.",
            "s",
            (
                Query(
                    f"time() - max by (namespace, name) ({_fleet('aerie_rollout_start_time_seconds')})"
                    " * on (namespace, name) group_left (revision, method, purpose)"
                    f" max by (namespace, name, revision, method, purpose) ({_fleet('aerie_rollout_info')})",
                    "age",
                ),
            ),
            width=12,
        ),
        _graph(
            "Resources by phase",
            "Number of resources in each phase.",
            "none",
            (f"count by (phase) (max by (namespace, name, phase) ({_fleet('aerie_resource_phase')}))", "{{phase}}"),
            fills=True,
            minimum=0,
        ),
        _graph(
            "Finished rollouts per hour",
            "Rollouts that have ended in the last hour, by result.",
            "none",
            (f"sum by (result) (increase({_fleet('aerie_rollouts_finished_total')}[1h]))", "{{result}}"),
            fills=True,
            minimum=0,
        ),
        _graph(
            "Duration of rollouts",
            "Duration of the rollouts that have ended in the last day, in all namespaces. It includes the time that they waited "
            "for a user.",
            "s",
            ("histogram_quantile(0.5, sum by (le) (rate(aerie_rollout_duration_seconds_bucket[1d])))", "median"),
            ("histogram_quantile(0.9, sum by (le) (rate(aerie_rollout_duration_seconds_bucket[1d])))", "p90"),
            minimum=0,
        ),
        _graph(
            "Lowest acceptance lengths",
            f"{_ACCEPTANCE_DESCRIPTION} The ten lowest of all stable revisions.",
            "none",
            (
                f"bottomk(10, max by (namespace, name) ({_fleet('aerie_acceptance_length', arm='stable')}))",
                "{{namespace}}/{{name}}",
            ),
            minimum=1,
            decimals=2,
            base_color="red",
            thresholds=(("green", 1.05),),
        ),
        _graph(
            "Acceptance against the reference",
            f"{_DRIFT_DESCRIPTION} The ten lowest.",
            "percentunit",
            (
                (
                    f"bottomk(10, max by (namespace, name) ({_fleet('aerie_acceptance_length', arm='stable')})"
                    f" / max by (namespace, name) ({_fleet('aerie_promoted_acceptance_length')}) - 1)"
                ),
                "{{namespace}}/{{name}}",
            ),
            base_color="red",
            thresholds=(("green", -0.15),),
        ),
        _graph(
            "Present savings by tuning",
            "Replicas that the active speculation settings save at present, against those of the specs.",
            "none",
            (
                f"sum(max by (namespace, name) ({_fleet('aerie_tuning_savings_ratio')})"
                f" * on (namespace, name) max by (namespace, name) ("
                + _fleet("aerie_replicas", arm="stable", state="desired")
                + "))",
                "replicas",
            ),
            decimals=1,
        ),
    ),
    (Variable("namespace", "Namespace", "label_values(aerie_resource_phase, namespace)", is_multiple=True),),
)

DEPLOYMENT = Dashboard(
    "deployment",
    "Deployment",
    "One SpeculativeDeployment: its rollout, the comparison that decides, its arms, and tuning.",
    (
        _stat(
            "Phase",
            "Present phase. docs/how-to/on-call.md describes each phase and what to do.",
            "none",
            f"max by (phase) ({_own('aerie_resource_phase')})",
            legend="{{phase}}",
            shows_name=True,
        ),
        _stat(
            "Needs a user",
            "Why a user has to act; None if nobody has to.",
            "none",
            f"max by (reason) ({_own('aerie_attention')})"
            " or label_replace(vector(0) unless on () "
            f"{_own('aerie_attention')}"
            ', "reason", "None", "", "")',
            legend="{{reason}}",
            shows_name=True,
            thresholds=(("orange", 1),),
        ),
        _stat(
            "Verdict",
            "Verdict of the analysis in progress. Empty without an analysis.",
            "none",
            f"max by (verdict) ({_own('aerie_verdict')})",
            legend="{{verdict}}",
            shows_name=True,
        ),
        _stat(
            "In this phase for",
            "Time since the present phase or ramp step of a rollout began. Empty where the status does not have it.",
            "s",
            f"time() - max({_own('aerie_rollout_phase_start_time_seconds')})",
        ),
        _stat(
            "Draft tokens per step",
            "K of the stable pods: the maximum number of draft tokens per verification step. 0 without speculation.",
            "none",
            f"max({_own('aerie_speculative_tokens', arm='stable')})",
        ),
        _stat(
            "Ready pods",
            "Ready pods of the stable revision, as a share of the desired ones.",
            "percentunit",
            "max("
            + _own("aerie_replicas", arm="stable", state="ready")
            + ") / (max("
            + _own("aerie_replicas", arm="stable", state="desired")
            + ") > 0)",
        ),
        Panel(
            "state-timeline",
            "Phases",
            "Phases over time.",
            "none",
            (Query(f"max by (phase) ({_own('aerie_resource_phase')})", "{{phase}}"),),
            width=24,
            height=7,
        ),
        _graph(
            "Comparison: $criterion",
            "Canary against control, as a change: +5 % is 5 % more. The bounds are anytime-valid: a rollout is promoted or "
            "rolled back when one of them crosses its limit, not when the estimate does.",
            "percentunit",
            (f"max by (bound) ({_own('aerie_comparison_change_ratio', criterion='$criterion')})", "{{bound}}"),
            width=12,
            height=9,
            thresholds=(("transparent", 0),),
        ),
        Panel(
            "table",
            "Comparison: all criteria",
            "Present bounds of all criteria of the analysis in progress.",
            "percentunit",
            tuple(
                Query(f"max by (criterion) ({_own('aerie_comparison_change_ratio', bound=bound)})", bound)
                for bound in ("lower", "estimate", "upper")
            ),
            width=12,
            height=9,
        ),
        _graph(
            "Acceptance length",
            f"{_ACCEPTANCE_DESCRIPTION} The line `reference` is what the stable pods are compared with.",
            "none",
            (f"max by (arm) ({_own('aerie_acceptance_length')})", "{{arm}}"),
            (f"max({_own('aerie_promoted_acceptance_length')})", "reference"),
            minimum=1,
            decimals=2,
            base_color="red",
            thresholds=(("green", 1.05),),
        ),
        _graph(
            "Time per output token",
            "Seconds per output token after a request's first, by arm.",
            "s",
            (f"max by (arm) ({_own('aerie_time_per_output_token_seconds')})", "{{arm}}"),
            minimum=0,
        ),
        _graph(
            "Time to first token",
            "Seconds from a request's arrival to its first token, by arm.",
            "s",
            (f"max by (arm) ({_own('aerie_time_to_first_token_seconds')})", "{{arm}}"),
            minimum=0,
        ),
        _graph(
            "Pods",
            "Desired and ready pods by arm.",
            "none",
            (f"max by (arm, state) ({_own('aerie_replicas')})", "{{arm}} {{state}}"),
            minimum=0,
        ),
        _graph(
            "Traffic",
            "Share of the traffic by arm.",
            "percentunit",
            (f"max by (arm) ({_own('aerie_traffic_weight_ratio')})", "{{arm}}"),
            fills=True,
            minimum=0,
        ),
        _graph(
            "Requirements met",
            "1 while what an acceptance needs of a criterion is met. A promotion needs all of them.",
            "none",
            (f"max by (criterion) ({_own('aerie_comparison_met')})", "{{criterion}}"),
            minimum=0,
        ),
        _graph(
            "Counted samples",
            "Blocks, pairs of windows or pairs of answers that each criterion has counted. They grow with traffic.",
            "none",
            (f"max by (criterion) ({_own('aerie_comparison_samples')})", "{{criterion}}"),
            minimum=0,
        ),
        _graph(
            "Output tokens per second",
            "vLLM's output tokens per second, by revision. control=true: control pods.",
            "none",
            (
                (
                    "sum by (aerie_dev_revision, aerie_dev_control) "
                    f"(rate(vllm:generation_tokens_total{_ENGINES}[$__rate_interval]))"
                ),
                _ARM,
            ),
            minimum=0,
        ),
        _graph(
            "Requests in the engines",
            "Requests that vLLM runs, and those that wait in its queues.",
            "none",
            (f"sum(vllm:num_requests_running{_ENGINES})", "running"),
            (f"sum(vllm:num_requests_waiting{_ENGINES})", "waiting"),
            minimum=0,
        ),
        _graph(
            "Reachable engine pods",
            "Engine pods that Prometheus scrapes, by revision.",
            "none",
            (
                f"sum by (aerie_dev_revision, aerie_dev_control) (up{_ENGINES})",
                _ARM,
            ),
            minimum=0,
        ),
        _graph(
            "Gain by tuning",
            "Gain in tokens per second: of the recommended setting as predicted, and of the setting that was tested last as "
            "predicted and as measured.",
            "percentunit",
            (f"max({_own('aerie_tuning_recommended_gain_ratio')})", "recommended, predicted"),
            (f"max by (kind) ({_own('aerie_tuning_trial_gain_ratio')})", "last trial, {{kind}}"),
            width=12,
        ),
        _graph(
            "Finished rollouts",
            "Rollouts that have ended in the last day, by result.",
            "none",
            (f"sum by (result) (increase({_own('aerie_rollouts_finished_total')}[1d]))", "{{result}}"),
            width=12,
            minimum=0,
            fills=True,
        ),
    ),
    (
        Variable("namespace", "Namespace", "label_values(aerie_resource_phase, namespace)"),
        Variable("name", "Resource", 'label_values(aerie_resource_phase{namespace="$namespace"}, name)'),
        Variable(
            "criterion",
            "Criterion",
            'label_values(aerie_comparison_change_ratio{namespace="$namespace",name="$name"}, criterion)',
        ),
    ),
)

OPERATOR = Dashboard(
    "operator",
    "Operator",
    "The operator itself: leadership, work queue, API server, scrapes, notifications.",
    (
        _stat(
            "Reachable operators",
            "Operator pods that Prometheus can scrape.",
            "none",
            'sum(up{job="aerie",container="operator"}) or vector(0)',
            base_color="red",
            thresholds=(("green", 1),),
        ),
        _stat(
            "Leaders",
            "Operators that are the leader. It has to be 1.",
            "none",
            "sum(aerie_leader) or vector(0)",
            base_color="red",
            thresholds=(("green", 1), ("red", 2)),
        ),
        _stat(
            "Resources on hold",
            "Resources that cannot be read or listed.",
            "none",
            "sum(aerie_resources_held) or vector(0)",
            thresholds=(("orange", 1),),
        ),
        _stat(
            "Lists that fail",
            "Kinds that cannot be listed in a namespace.",
            "none",
            "sum(aerie_list_failed) or vector(0)",
            thresholds=(("orange", 1),),
        ),
        _stat(
            "Dropped status fields",
            "Fields of the status that the API server drops, because the CustomResourceDefinition is older than the operator.",
            "none",
            "max(aerie_status_fields_dropped) or vector(0)",
            thresholds=(("orange", 1),),
        ),
        _stat(
            "Version",
            "Version of each operator.",
            "none",
            "max by (version) (aerie_build_info)",
            legend="{{version}}",
            shows_name=True,
        ),
        _graph(
            "Work queue", "Resources that wait for a reconcile.", "none", ("sum(aerie_workqueue_depth)", "waiting"), minimum=0
        ),
        _graph(
            "Wait in the queue",
            "Time that a resource waits until its reconcile starts.",
            "s",
            *_quantiles("aerie_workqueue_queue_duration_seconds"),
            minimum=0,
        ),
        _graph(
            "Reconciles per second",
            "Finished reconciles by outcome. A conflict is repeated and harmless.",
            "ops",
            ("sum by (outcome) (rate(aerie_reconcile_duration_seconds_count[$__rate_interval]))", "{{outcome}}"),
            minimum=0,
        ),
        _graph(
            "Duration of reconciles",
            "Duration of reconciles, with their calls to the API server.",
            "s",
            *_quantiles("aerie_reconcile_duration_seconds"),
            minimum=0,
        ),
        _graph(
            "API requests per second",
            "Requests to the API server, by verb and status code.",
            "reqps",
            ("sum by (verb, code) (rate(aerie_kube_api_requests_total[$__rate_interval]))", "{{verb}} {{code}}"),
            minimum=0,
        ),
        _graph(
            "Duration of API requests",
            "Duration of requests to the API server.",
            "s",
            *_quantiles("aerie_kube_api_request_duration_seconds"),
            minimum=0,
        ),
        _graph(
            "Event-loop lag",
            "Delay with which the event loop runs a callback that is due. Above a second, liveness suffers.",
            "s",
            *_quantiles("aerie_event_loop_lag_seconds"),
            minimum=0,
        ),
        _graph(
            "Failed scrapes of engines per second",
            "Failed scrapes of engine metrics, by reason (docs/reference/engine-metrics.md).",
            "ops",
            ("sum by (reason) (rate(aerie_scrape_failures_total[$__rate_interval]))", "{{reason}}"),
            minimum=0,
        ),
        _graph(
            "Duration of scrapes",
            "Duration of scrapes of engine metrics.",
            "s",
            *_quantiles("aerie_scrape_duration_seconds"),
            minimum=0,
        ),
        _graph(
            "Rollouts and trials",
            "Rollouts and trials in progress (Active) or waiting for a slot (Queued).",
            "none",
            ("sum by (purpose, state) (aerie_rollouts)", "{{purpose}} {{state}}"),
            minimum=0,
        ),
        _graph(
            "Notifications per hour",
            "Notifications by receiver and outcome. All outcomes but sent are lost.",
            "none",
            ("sum by (receiver, outcome) (increase(aerie_notifications_total[1h]))", "{{receiver}} {{outcome}}"),
            minimum=0,
        ),
        _graph(
            "Changes of drafters per hour",
            "Calls that change a drafter in a running engine, by kind and outcome.",
            "none",
            ("sum by (call, outcome) (increase(aerie_drafter_calls_total[1h]))", "{{call}} {{outcome}}"),
            minimum=0,
        ),
        _graph(
            "Tuning decisions per hour",
            "Decisions on speculation settings, by outcome.",
            "none",
            ("sum by (outcome) (increase(aerie_tuning_decisions_total[1h]))", "{{outcome}}"),
            width=12,
            minimum=0,
        ),
        _graph(
            "Duration of tuning decisions",
            "Duration of decisions on speculation settings, with the start of their process.",
            "s",
            *_quantiles("aerie_tuning_decision_duration_seconds"),
            width=12,
            minimum=0,
        ),
    ),
)
DASHBOARDS = (FLEET, DEPLOYMENT, OPERATOR)
