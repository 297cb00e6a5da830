"""What `list`, `status` and `history` show of resources, as text for a terminal of any width.

    list      a line for each resource, and what waits for a user
    status    are clients served; what is in progress; what it still needs; what can be done now
    history   past rollouts and trials

Guarantees: pure; text of the cluster is shown as text, without markup or control characters. Colour adds nothing that the text
does not say. Nothing is wider than the terminal, except a list with `-o wide` or long names: it is
not cut, and the terminal continues its lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aerie.cli.fleet.attention import State, find_attention_reason, find_state, is_extensible, list_possible_actions
from aerie.cli.fleet.resource_view import CANDIDATE_PHASES, ArmView, Object, ResourceView, format_age, format_setting, parse_time

METRIC_TITLES = {
    "TokensPerStep": "tokens per step",
    "AcceptanceLength": "acceptance length",
    "TimePerOutputToken": "time per output token",
    "SlowTimePerOutputToken": "slow output tokens",
    "TokensPerBusySecond": "tokens per busy second",
    "TimeToFirstToken": "time to first token",
    "SlowTimeToFirstToken": "slow first tokens",
    "FailedRequests": "failed requests",
    "OutputLength": "output length",
    "TruncatedRequests": "truncated requests",
    "Preemptions": "preemptions",
    "AbandonedRequests": "abandoned requests",
    "OutputEquivalence": "greedy answers",
    "Answers": "answers",
    "AnswerTokens": "answer length",
}
"""Titles of the compared metrics."""
BAR_RANGE = 0.10
"""Change that a bar shows to each side of 0."""
_BAR_CELLS = 21
_WIDE_COLUMNS = 118
"""Columns of a terminal from which on bars are shown."""
_MIN_DRAFTER_CHARACTERS = 12
"""Characters of a drafter that the narrowest terminal shows."""
_MIN_LIST_CHARACTERS = {"NEXT": 14, "DRAFTER": _MIN_DRAFTER_CHARACTERS}
"""Characters in a line of the columns that may be narrower than their cells. 14: the longest word of NEXT."""
_MIN_WIDE_NEXT_CHARACTERS = 40
_LEFT_OUT_FIRST = ("K", "DRAFTER", "AL", "CANARY", "SERVED")
"""Columns of the list that are left out in this order, where the terminal is too narrow for all."""
_COLUMN_GAP = 2
_WRAPPED_COLUMNS = ("NEXT", "REQUIRED")
"""Columns whose cells continue on the next line."""
_OBSTACLE_SEPARATOR = ", by pods: "
"""What a change has between its description and why it is not made in place."""
_ARROWS = ("◂", "▸")
_ABOUT = re.compile(r"in about \d[\w ]*?(?= at|[.,;]|$)")
"""What a verdict says of the time that it still needs."""
_NEXT_BY_PHASE = {
    "Preflight": "then pods start",
    "Queued": "other rollouts end first",
    "Starting": "pods start",
    "Staging": "pods read the drafter",
    "Evaluating": "shadow evaluation",
    "WarmingUp": "then the analysis",
    "Analyzing": "verdict",
    "Ramping": "then the promotion",
    "Promoting": "all pods follow",
    "RollingBack": "the stable revision serves",
}
_STATE_STYLES = {State.SERVING: "green", State.IN_PROGRESS: "cyan", State.WAITING: "yellow", State.FAILED: "red"}
_HISTORY_STYLES = {"Promoted": "green", "RolledBack": "red", "Failed": "red"}


# ------------------------------------------------------------------------------------------------------------------------ list
def render_list(
    views: Sequence[ResourceView], now: datetime, *, width: int, is_wide: bool, with_namespace: bool
) -> RenderableType:
    """Return a line for each resource, and a summary. `width`: of the terminal; a narrow one gets fewer columns.

    Print it without cropping.
    """
    shows_drafter = is_wide or width >= _WIDE_COLUMNS
    all_columns = [
        *(["NAMESPACE"] if with_namespace else []),
        *("NAME", "SERVED", "STATE"),
        *(["PHASE"] if is_wide else []),
        *(["DRAFTER", "K"] if shows_drafter else []),
        *("AL", "CANARY", "NEXT"),
        *(["REVISION"] if is_wide else []),
    ]
    rows = [_build_row(view, now) for view in views]
    widths = {column: _min_list_width(column, [row[column] for row in rows], is_wide=is_wide) for column in all_columns}
    if not is_wide:
        for column in _LEFT_OUT_FIRST:
            if column in widths and sum(widths.values()) - _COLUMN_GAP > width:
                del widths[column]
    columns = list(widths)
    table = _table()
    table.width = max(width, sum(widths.values()) - _COLUMN_GAP)
    for column in columns:
        cells = [row[column] for row in rows]
        _add_column(table, column, cells, is_flexible=column in ("DRAFTER", "NEXT"), min_width=widths[column] - _COLUMN_GAP)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    waiting, unserved = sum(bool(find_attention_reason(view)) for view in views), sum(not view.is_serving for view in views)
    summary = f"{len(views)} {'resource' if len(views) == 1 else 'resources'}"
    summary += f", {waiting} {'waits' if waiting == 1 else 'wait'} for a user" if waiting else ", none waits for a user"
    return Group(table, Text(summary + (f", {unserved} not fully served" if unserved else "") + ".", "dim"))


def _min_list_width(column: str, cells: Sequence[Text], *, is_wide: bool) -> int:
    """Return the least columns of the terminal that a column of the list needs, with the gap after it."""
    full = max(map(len, (column, *(cell.plain for cell in cells))))
    limits = {"NEXT": _MIN_WIDE_NEXT_CHARACTERS} if is_wide else _MIN_LIST_CHARACTERS
    return min(full, limits.get(column, full)) + _COLUMN_GAP


def _build_row(view: ResourceView, now: datetime) -> dict[str, Text]:
    stable = _find_arm(view, "stable")
    reason = find_attention_reason(view)
    return {
        "NAMESPACE": _plain(view.namespace),
        "NAME": _plain(view.name),
        "SERVED": Text(f"{view.serving_replicas}/{view.desired_replicas}", "" if view.is_serving else "red"),
        "STATE": Text(find_state(view), _STATE_STYLES[find_state(view)]),
        "PHASE": _phase(view),
        "DRAFTER": _plain(stable.drafter if stable else ""),
        "K": _plain(stable.setting if stable else ""),
        "AL": _number(stable.acceptance_length if stable else None),
        "CANARY": _candidate_summary(view, now),
        "NEXT": Text(f"! {clean(reason)}", "yellow") if reason else _plain(_summarize_next(view)),
        "REVISION": _plain(view.served_revision),
    }


def _candidate_summary(view: ResourceView, now: datetime) -> Text:
    if not view.candidate:
        return Text("-", "dim")
    tokens = next((item for item in view.comparisons if item.get("metric") == "TokensPerStep"), {})
    estimate = tokens.get("estimate") if view.candidate_phase not in ("Starting", "Staging") else None
    return _plain(" ".join([*([_percent(estimate)] if estimate is not None else []), format_age(view.rollout_start_time, now)]))


def _summarize_next(view: ResourceView) -> str:
    if view.candidate:
        match = _ABOUT.search(str(view.condition("Progressing").get("message", "")))
        return f"verdict {match[0]}" if match else _NEXT_BY_PHASE.get(view.candidate_phase, "")
    if find_state(view) is State.IN_PROGRESS:
        return _NEXT_BY_PHASE.get(view.phase, view.phase)
    tuned = view.condition("SpeculationTuned")
    return f"tuning: {tuned['reason']}" if tuned else ""


# ---------------------------------------------------------------------------------------------------------------------- status
def render_status(view: ResourceView, now: datetime, *, width: int, shows_all: bool) -> RenderableType:
    """Return the screen of a resource."""
    parts: list[RenderableType] = [*_render_head(view, now), Text(), _render_arms(view, width=width)]
    if view.comparisons and (view.candidate or shows_all):
        parts += [Text(), render_comparisons(view, width=width, shows_all=shows_all)]
    for title, lines in (("NEXT", list(_list_next(view))), ("YOU CAN", list(_list_commands(view)))):
        if lines:
            parts += [Text(), _labelled(title, lines)]
    return Group(*parts)


def _render_head(view: ResourceView, now: datetime) -> Iterator[Text]:
    clients = "clients are served" if view.is_serving else "NOT ALL CLIENTS ARE SERVED"
    yield Text.assemble(
        (f"{clean(view.namespace)}/{clean(view.name)}", "bold"),
        "  ",
        (f"{clients}: {_served(view)}", "green" if view.is_serving else "bold red"),
    )
    age = format_age(view.rollout_start_time, now)
    change, _, obstacle = clean(str(view.candidate.get("change") or "")).partition(_OBSTACLE_SEPARATOR)
    parts = [part for part in (change, f"for {age}" if age else "") if part]
    yield Text.assemble(_phase(view), f"  {', '.join(parts)}" if parts else "")
    if obstacle:
        yield Text(f"by pods, not in place: {obstacle}", "dim")
    if view.metadata.get("deletionTimestamp"):
        yield Text("It is being deleted.", "yellow")
    if not view.is_observed:
        yield Text("The operator has not seen the latest change of the spec yet.", "yellow")
    if reason := find_attention_reason(view):
        yield Text(f"! {clean(reason)}", "yellow")


def _render_arms(view: ResourceView, *, width: int) -> Table:
    rows = [
        {
            "ARM": _plain(arm.role),
            "PODS": _plain(f"{arm.ready_replicas}/{arm.replicas}" if arm.role != "trial" else f"{arm.replicas} on trial"),
            "TRAFFIC": _plain("" if arm.weight is None else f"{arm.weight} %"),
            "DRAFTER": _plain((arm.drafter.rpartition("/")[2] if width < _WIDE_COLUMNS else arm.drafter) or "none"),
            "K": _plain(arm.setting),
            "AL": _number(arm.acceptance_length),
            "TPOT": _plain(_milliseconds(arm.time_per_output_token)),
            "TTFT": _plain(_milliseconds(arm.time_to_first_token)),
        }
        for arm in view.arms
    ]
    table = _table()
    columns = ("ARM", "PODS", "TRAFFIC", "DRAFTER", "K", "AL", "TPOT", "TTFT")
    others = sum(max(map(len, (column, *(row[column].plain for row in rows)))) + 2 for column in columns if column != "DRAFTER")
    for row in rows:
        row["DRAFTER"].truncate(max(width - others, _MIN_DRAFTER_CHARACTERS), overflow="ellipsis")
    for column in columns:
        is_text = column in ("ARM", "DRAFTER", "K")
        _add_column(table, column, [row[column] for row in rows], is_flexible=False, is_number=not is_text)
    for row in rows:
        table.add_row(*row.values())
    return table


def render_comparisons(view: ResourceView, *, width: int, shows_all: bool) -> RenderableType:
    """Return the compared metrics. `width`: of the terminal; a narrow one gets no bars.

    `shows_all`: also those that decide nothing.
    """
    with_bars = width >= _WIDE_COLUMNS
    shown = [item for item in view.comparisons if item.get("requirement") or item.get("message") or shows_all]
    rows = [_build_comparison_row(item, with_bar=with_bars) for item in shown if not item.get("message")]
    table = _table()
    edge = f"{100 * BAR_RANGE:.0f} %"
    columns = ["", "CRITERION", "CHANGE", "BOUNDS", "REQUIRED"]
    columns += [f"-{edge}{'0':^{_BAR_CELLS - 2 * len(edge) - 2}}+{edge}"] if with_bars else []
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        _add_column(table, column, cells, is_flexible=column == "REQUIRED", is_number=column in ("CHANGE", "BOUNDS"))
    for row in rows:
        table.add_row(*row)
    notes = [f"{view.analysis.get('design', 'BetweenPods')}, {_samples(view)}. Changes: the new drafter against the stable one."]
    if hidden := len(view.comparisons) - len(shown):
        notes.append(f"{hidden} more without a requirement (--all).")
    messages = [
        Text(clean(f"{_title(item).capitalize()}: {item['message']}")) for item in shown if item.get("message")
    ]  # results that no number expresses
    return Group(table, *messages, Text(" ".join(notes), "dim"))


def _build_comparison_row(item: Object, *, with_bar: bool) -> list[Text]:
    estimate, lower, upper = (item.get(name) for name in ("estimate", "lower", "upper"))
    row = [
        _mark(item),
        _plain(_title(item)),
        _plain("-" if estimate is None else _percent(estimate)),
        _plain("" if lower is None and upper is None else f"{_percent(lower)} to {_percent(upper)}"),
        _plain(str(item.get("requirement") or "")),
    ]
    return [*row, _plain(draw_interval(estimate, lower, upper))] if with_bar else row


def _title(item: Object) -> str:
    metric = str(item.get("metric") or "unknown")
    return METRIC_TITLES.get(metric, metric)


def draw_interval(estimate: float | None, lower: float | None, upper: float | None, reach: float = BAR_RANGE) -> str:
    """Return an interval as a bar from -`reach` to +`reach`; arrows mark what is beyond.

    >>> draw_interval(0.03, 0.01, 0.05)
    '          │├─●─┤     '
    """
    if estimate is None:
        return ""
    if lower is None and upper is None:
        lower = upper = estimate  # a number without bounds is a point
    center = _BAR_CELLS // 2

    def cell(value: float) -> int:
        return center + round(value / reach * center) if math.isfinite(value) else _BAR_CELLS * (1 if value > 0 else -1)

    first, last = cell(-math.inf if lower is None else lower), cell(math.inf if upper is None else upper)
    cells = [" "] * _BAR_CELLS
    cells[center] = "│"
    for index in range(max(first, 0), min(last, _BAR_CELLS - 1) + 1):
        cells[index] = "┼" if index == center else "─"
    for index, end in ((first, "├"), (last, "┤")):
        if 0 <= index < _BAR_CELLS:
            cells[index] = end
    if first < 0:
        cells[0] = _ARROWS[0]
    if last >= _BAR_CELLS:
        cells[-1] = _ARROWS[1]
    cells[min(max(cell(estimate), 0), _BAR_CELLS - 1)] = "●"
    return "".join(cells)


def _mark(item: Object) -> Text:
    if not item.get("requirement"):
        return Text(" ")
    return Text("✓", "green") if item.get("met") else Text("…", "yellow")


def _samples(view: ResourceView) -> str:
    units = {"BetweenPods": "blocks", "ByTurns": "pairs of windows", "EqualRequests": "pairs of answers"}
    count = max((int(item.get("sampleCount") or 0) for item in view.comparisons if not item.get("message")), default=0)
    unit = units.get(view.analysis.get("design", "BetweenPods"), "samples")
    first_word, *other_words = unit.split(" ")
    return " ".join([f"{count}", first_word.removesuffix("s") if count == 1 else first_word, *other_words])


def _list_next(view: ResourceView) -> Iterator[str]:
    for name in ("Progressing", "Ready", "PreflightPassed", "Degraded"):
        condition = view.condition(name)
        is_bad = condition.get("status") == ("True" if name == "Degraded" else "False")
        if condition.get("message") and (is_bad or (name == "Progressing" and view.phase in CANDIDATE_PHASES)):
            yield clean(f"{condition['message']}")
    if not view.candidate and (tuned := view.condition("SpeculationTuned")):
        yield clean(f"Tuning ({tuned.get('reason')}): {tuned.get('message')}")


def _list_commands(view: ResourceView) -> Iterator[str]:
    actions = [action for action in list_possible_actions(view) if action != "pause" or view.candidate]
    where = f"{clean(view.name)} -n {clean(view.namespace)}"
    if actions:
        yield f"kubectl aerie {'|'.join(actions)} {where}"
    if is_extensible(view):
        yield f"kubectl aerie resume --for 30m {where}"
    yield f"kubectl aerie explain {where}"


# --------------------------------------------------------------------------------------------------------------------- history
def render_history(view: ResourceView) -> RenderableType:
    """Return the past rollouts, newest first, and the trials of tuning."""
    parts: list[RenderableType] = []
    if not view.history:
        parts.append(Text("No rollout has ended yet."))
    for record in view.history:
        start, end = parse_time(record["startTime"]), parse_time(record["completionTime"])
        assert end is not None
        change, _, obstacle = clean(record["change"]).partition(_OBSTACLE_SEPARATOR)
        parts.append(
            Text.assemble(
                (f"{record['result']:<10}", _HISTORY_STYLES.get(record["result"], "")),
                f"  {end:%Y-%m-%d %H:%M} UTC  after {format_age(start, end):<10}  ",
                (clean(record["revision"]), "dim"),
            )
        )
        details = [Text(change), Text(clean(record["message"]))]
        if obstacle:
            details.append(Text(f"by pods, not in place: {obstacle}", "dim"))
        parts += [Padding(line, (0, 0, 0, 12)) for line in details]
    trials = (view.status.get("speculation") or {}).get("trials") or ()
    if trials:
        parts += [Text(), Text("Trials of tuning", "bold")]
    for trial in trials:
        settings = f"K={format_setting(trial['fromSetting'])} to K={format_setting(trial['toSetting'])}"
        gains = ", ".join(
            f"{title} {format_gain(trial.get(name))}" for title, name in (("predicted", "predicted"), ("measured", "measured"))
        )
        end = parse_time(trial["completionTime"])
        parts.append(Text(f"{trial['result']:<12} {end:%Y-%m-%d %H:%M} UTC  {settings} ({trial['purpose']}): {gains}"))
    return Group(*parts)


def format_gain(gain: Object | None) -> str:
    """Return a predicted or measured gain, with its bounds."""
    if not gain:
        return "unknown"
    lower, upper = gain.get("lower"), gain.get("upper")
    return _percent(gain["estimate"]) + (f" ({_percent(lower)} to {_percent(upper)})" if None not in (lower, upper) else "")


# ----------------------------------------------------------------------------------------------------------------------- parts
def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0), header_style="bold")


def _add_column(
    table: Table,
    title: str,
    cells: Sequence[Text],
    *,
    is_flexible: bool,
    min_width: int | None = None,
    is_number: bool = False,
) -> None:
    """Add a column. Only a flexible one is cut, or continues on the next line, where the terminal is too narrow.

    `min_width`: that of a flexible one.
    """
    if not is_flexible:
        min_width = max(map(len, (title, *(cell.plain for cell in cells))))
    table.add_column(
        title,
        no_wrap=title not in _WRAPPED_COLUMNS,
        overflow="ellipsis",
        min_width=min_width,
        justify="right" if is_number else "left",
    )


def _labelled(title: str, lines: Sequence[str]) -> Table:
    table = _table()
    table.show_header = False
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for index, line in enumerate(lines):
        table.add_row(title if index == 0 else "", Text(line))
    return table


def _find_arm(view: ResourceView, role: str) -> ArmView | None:
    return next((arm for arm in view.arms if arm.role == role), None)


def _served(view: ResourceView) -> str:
    if view.serving_replicas > view.desired_replicas:  # a canary with traffic
        return f"{view.serving_replicas} pods, {view.desired_replicas} desired"
    return f"{view.serving_replicas} of {view.desired_replicas} pods"


def _phase(view: ResourceView) -> Text:
    style = {"Ready": "green", "RolledBack": "yellow", "Failed": "red", "Held": "yellow", "AwaitingApproval": "yellow"}
    return Text(clean(view.phase), style.get(view.phase, "cyan"))


def _number(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:.2f}")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def _percent(change: float | None) -> str:
    return "?" if change is None else f"{100 * change:+z.1f} %"


def _plain(text: str) -> Text:
    return Text(clean(text))


def clean(text: str) -> str:
    """Return the text without control characters, which could move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
