"""The report as one HTML file: for a browser in light and dark, for paper, and for screen readers.

Guarantees: the file loads nothing and runs nothing, which its content security policy enforces. The decision comes first; what
each later part adds is its heading. Not guaranteed: a size below 400 KiB where a resource has hundreds of long messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aerie.cli.report import charts
from aerie.cli.report.charts import Chart
from aerie.cli.report.contents import Contents, Observation
from aerie.cli.report.markup import Markup, element, json_block
from aerie.cli.report.verdict import (
    SAMPLES,
    describe_bounds,
    describe_decision_maker,
    describe_design,
    describe_duration,
    describe_met,
    describe_verdict,
    find_main_metric,
    percent,
    title_of,
)

DATA_ID = "aerie-report"
"""Identifier of the block with the raw numbers."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--background); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.3; margin: 0.2rem 0 0.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 0.6rem; border-bottom: 1px solid var(--line); padding-bottom: 0.25rem; }
p { margin: 0.4rem 0; overflow-wrap: anywhere; }
.muted, caption, footer { color: var(--muted); }
.verdict { border-left: 0.4rem solid var(--muted); padding-left: 1rem; }
.verdict.Promoted { border-color: var(--new); } .verdict.RolledBack, .verdict.Failed { border-color: var(--stable); }
.reason { white-space: pre-line; }
.scroll { overflow-x: auto; }
figure { margin: 0.8rem 0; } figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption { color: var(--muted); font-size: 0.9rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
caption { text-align: left; font-size: 0.9rem; padding-bottom: 0.3rem; }
caption span { display: block; max-width: calc(100vw - 2.5rem); }
th, td { text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } tbody th { white-space: nowrap; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { overflow-wrap: anywhere; min-width: 8rem; }
.raw td, .raw th { padding-right: 0.6rem; font-size: 0.8rem; }
summary { cursor: pointer; margin: 0.4rem 0; }
code { font-size: 0.9em; overflow-wrap: anywhere; }
@media (max-width: 40rem) { tbody th, td.number { white-space: normal; } }
@media print {
  body { font-size: 11px; } main { max-width: none; padding: 0; }
  h2 { break-after: avoid; } figure, tr { break-inside: avoid; } figure svg { min-width: 0; }
  .scroll { overflow: visible; } details { display: none; }
}
"""


def render_page(contents: Contents) -> str:
    """Return the report. Raises `CommandError` without matplotlib."""
    title = f"Rollout of {contents.namespace}/{contents.name}"
    head = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{title}: {contents.result or contents.phase}"),
        element("style", Markup(charts.build_theme() + _STYLE)),
    )
    body = element("body", element("main", *_list_parts(contents, title)))
    document = element("html", element("head", *head), body, lang="en")
    return f"<!doctype html>\n{document}\n"


def _list_parts(contents: Contents, title: str) -> Iterator[Markup]:
    verdict = [element("h1", describe_verdict(contents))]
    if contents.message:
        verdict.append(element("p", contents.message, class_="reason"))
    verdict.append(element("p", f"{describe_decision_maker(contents)} {describe_duration(contents)}", class_="muted"))
    yield element("p", title, class_="muted")
    yield element("section", *verdict, class_=f"verdict {contents.result or 'open'}", aria_label="Verdict")
    if contents.comparisons:
        yield element("h2", "Decision")
        yield _render_decision_table(contents)
    for chart in (charts.draw_decision(contents), charts.draw_positions(contents), charts.draw_latencies(contents)):
        yield from _render_chart(chart)
    traffic = charts.draw_traffic(contents)
    yield from _render_chart(traffic)
    if contents.phases or contents.events:
        yield from _render_timeline(contents)
    trials = charts.draw_trials(contents)
    yield from _render_chart(trials)
    if contents.trials:
        yield _render_trials(contents)
    yield element("h2", "What was compared, and by which rules")
    yield _render_pairs("Identity of both revisions", contents.identity)
    if contents.parameters:
        yield _render_pairs("Parameters of the analysis, frozen at its start", sorted(_flatten(contents.parameters)))
    if contents.notes:
        yield element("h2", "What this report lacks")
        yield element("ul", *(element("li", note) for note in contents.notes))
    yield element("h2", "Raw numbers")
    yield from _render_raw(contents)


def _render_chart(chart: Chart | None) -> Iterator[Markup]:
    if chart is not None:
        yield element("h2", chart.title)
        picture = element("div", chart.svg, class_="scroll", tabindex="0", role="region", aria_label=chart.title)
        yield element("figure", picture, element("figcaption", chart.description))


def _render_decision_table(contents: Contents) -> Markup:
    design = describe_design(contents)
    unit = SAMPLES.get(contents.design, "samples")
    has_requirements = any(item.requirement for item in contents.comparisons)
    caption = (
        f"New against stable{f', by {design}' if design else ''}. Bounds are anytime-valid: they hold however often they are "
        "evaluated. ? is a bound that does not exist yet."
    )
    rows = [
        (
            title_of(item.metric),
            "-" if item.estimate is None else percent(item.estimate),
            describe_bounds(item),
            *((item.requirement, describe_met(contents, item)) if has_requirements else ()),
            str(item.samples or ""),
        )
        for item in sorted(contents.comparisons, key=lambda item: not item.requirement)
        if not item.message
    ]
    messages = [
        element("p", f"{title_of(item.metric)}: {item.message}") for item in contents.comparisons if item.message
    ]  # results that no number expresses
    required = ("Required", "Met") if has_requirements else ()
    table = _render_table(caption, ("Criterion", "New against stable", "Bounds", *required, unit.capitalize()), rows)
    return element("div", table, *messages)


def _render_timeline(contents: Contents) -> Iterator[Markup]:
    phases = [(_minutes(item.seconds), item.phase, item.message) for item in contents.phases]
    if phases:
        yield _render_table("Phases", ("After", "Phase", "Message"), phases)
    events = [(_minutes(item.seconds), f"{item.kind} {item.reason}", item.message) for item in contents.events]
    if events:
        yield element(
            "details", element("summary", f"{len(events)} events"), _render_table("Events", ("After", "Event", "Message"), events)
        )


def _render_trials(contents: Contents) -> Markup:
    rows = [
        (item.completed_at, f"K {item.settings}", item.result, _describe_gain(item.predicted), _describe_gain(item.measured))
        for item in contents.trials
    ]
    caption = "Last trials of draft tokens of this resource: gain in tokens per second"
    return _render_table(caption, ("Ended (UTC)", "Change", "Result", "Predicted", "Measured"), rows)


def _describe_gain(gain: tuple[float, float | None, float | None] | None) -> str:
    if gain is None:
        return "not known"
    estimate, lower, upper = gain
    return percent(estimate) + (f" ({percent(lower)} to {percent(upper)})" if None not in (lower, upper) else "")


def _render_pairs(caption: str, pairs: Sequence[tuple[str, str]]) -> Markup:
    rows = [element("tr", element("th", name, scope="row"), element("td", value, class_="text")) for name, value in pairs]
    return element("table", element("caption", caption), element("tbody", *rows))


def _render_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "") -> Markup:
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = [element("tr", *(_render_cell(cell, index) for index, cell in enumerate(row))) for row in rows]
    table = element(
        "table", element("caption", element("span", caption)), element("thead", head), element("tbody", *body), class_=class_
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _render_cell(text: str, index: int) -> Markup:
    if index == 0:
        return element("th", text, scope="row")
    return element("td", text, class_="text" if len(text) > 40 else "number")


def _render_raw(contents: Contents) -> Iterator[Markup]:
    metric = find_main_metric(contents)
    if contents.observations:
        header = (
            "After",
            "Phase",
            "Samples",
            "Estimate",
            "Lower",
            "Upper",
            "AL new",
            "AL stable",
            "TPOT new",
            "TPOT stable",
            "Traffic",
        )
        rows = [_list_raw_cells(item, metric) for item in contents.observations]
        caption = (
            f"Observations{f': {title_of(metric).lower()}, new against stable' if metric else ''}; AL is the acceptance length"
        )
        summary = element("summary", f"Table of {len(rows)} observations")
        yield element("details", summary, _render_table(caption, header, rows, "raw"))
    yield element(
        "p",
        "All numbers, for a notebook: ",
        element("code", f"json.loads(re.search(r'id=\"{DATA_ID}\">(.*?)</script>', page, re.S)[1])"),
    )
    yield json_block(build_data(contents), DATA_ID)


def _list_raw_cells(item: Observation, metric: str) -> tuple[str, ...]:
    estimate, lower, upper = item.comparisons.get(metric, (None, None, None))
    changes = ("" if value is None else percent(value) for value in (estimate, lower, upper))
    lengths = (_format(item.arms.get(arm, {}).get("acceptanceLength"), 2, 1) for arm in ("new", "stable"))
    times = (_format(item.arms.get(arm, {}).get("timePerOutputToken"), 1, 1000, " ms") for arm in ("new", "stable"))
    weight = "" if item.weight is None else f"{item.weight:g} %"
    return (_minutes(item.seconds), item.phase, str(item.samples or ""), *changes, *lengths, *times, weight)


def _format(value: Any, digits: int, factor: float, unit: str = "") -> str:
    return f"{factor * value:.{digits}f}{unit}" if isinstance(value, int | float) else ""


def build_data(contents: Contents) -> dict[str, Any]:
    """Return the numbers of a report for programs."""
    return {
        "apiVersion": "cli.aerie.dev/v1",
        "kind": "RolloutReport",
        "namespace": contents.namespace,
        "name": contents.name,
        "revision": contents.revision,
        "result": contents.result or None,
        "phase": contents.phase,
        "startTime": contents.started_at.isoformat(),
        "completionTime": contents.ended_at.isoformat() if contents.ended_at is not None else None,
        "requestedBy": dict(contents.requested_by) or None,
        "parameters": dict(contents.parameters),
        "comparisons": [
            {
                "metric": item.metric,
                "estimate": item.estimate,
                "lower": item.lower,
                "upper": item.upper,
                "requirement": item.requirement or None,
                "met": item.is_met,
                "samples": item.samples,
            }
            for item in contents.comparisons
        ],
        "observations": [
            {
                "seconds": item.seconds,
                "design": item.design,
                "phase": item.phase,
                "samples": item.samples,
                "weight": item.weight,
                "comparisons": {name: list(values) for name, values in item.comparisons.items()},
                "arms": {name: dict(metrics) for name, metrics in item.arms.items()},
            }
            for item in contents.observations
        ],
        "phases": [{"seconds": item.seconds, "phase": item.phase} for item in contents.phases],
    }


def _flatten(parameters: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
