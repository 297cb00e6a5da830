"""Charts of a report: SVG by matplotlib, whose colours are variables of the reader's theme.

Matplotlib draws with placeholder colours, which are replaced by `var(--name, default)`. So one picture serves light and dark
pages, and `with_theme` makes it stand alone. Colours are those of Okabe and Ito, which colour-blind readers can tell apart; line
styles and markers say the same.

Guarantees: the same contents give the same SVG. Text stays text. A chart without data is None. Not guaranteed: matplotlib, which
only the extra `report` installs; without it, `CommandError` names the extra.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aerie.cli.console import CommandError
from aerie.cli.report.contents import TOKENS_PER_STEP, Contents, Observation
from aerie.cli.report.markup import Markup, element
from aerie.cli.report.verdict import find_main_metric, percent, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "new": ("#0072b2", "#56b4e9"),
    "stable": ("#c25400", "#e69f00"),
    "band": ("#cfe3f1", "#1d3f57"),
    "text": ("#1b1f24", "#e6e9ed"),
    "muted": ("#57606a", "#9aa4ae"),
    "line": ("#d0d7de", "#3a424b"),
    "required": ("#8a1c5c", "#e58ac0"),
    "background": ("#ffffff", "#14181d"),
}
"""Colours by name, for light and dark pages."""
MAX_SHOWN_CHANGE = 0.5
"""Change at which an axis ends, however wide the bounds are at the beginning."""
_WIDTH = 8.2
_MAX_MARKERS = 60
_VERDICTS = {"Promoted": "accepted", "RolledBack": "rolled back"}
"""What the decision was, where the picture has its time."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLORS["line"][0],
    "axes.labelcolor": COLORS["muted"][0],
    "axes.titlecolor": COLORS["text"][0],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": COLORS["line"][0],
    "grid.linewidth": 0.6,
    "text.color": COLORS["text"][0],
    "xtick.color": COLORS["muted"][0],
    "ytick.color": COLORS["muted"][0],
    "xtick.labelcolor": COLORS["muted"][0],
    "ytick.labelcolor": COLORS["muted"][0],
    "legend.frameon": False,
    "legend.labelcolor": COLORS["text"][0],
    "savefig.transparent": True,
    "lines.linewidth": 1.8,
}
_ARMS = (("new", "new", "-", "o"), ("stable", "stable", "--", "s"))
"""Arms: name, colour, line style and marker."""


@dataclass(frozen=True)
class Chart:
    """A picture."""

    title: str
    description: str
    """What it shows, for readers who do not see it."""
    svg: Markup


def draw_decision(contents: Contents) -> Chart | None:
    """Return both arms over time and, below, the confidence sequence that narrows to the decision."""
    metric = find_main_metric(contents)
    points = [item for item in contents.observations if metric and metric in item.comparisons]
    decision = _find_decision(contents)
    points = [item for item in points if item.comparisons[metric][0] is not None and item.seconds <= (decision or math.inf)]
    if len(points) < 2:
        return None
    unit, scale = _time_axis(contents)
    analyzed = [item for item in contents.observations if points[0].seconds <= item.seconds <= points[-1].seconds]
    level = _find_level(analyzed)
    with _draw("decision", 4.6 if level else 3.2) as figure:
        rows = figure.subplots(2 if level else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 3] if level else [1])
        axes = [row[0] for row in rows]
        if level:
            _draw_arms(axes[0], analyzed, level[0], scale)
            axes[0].set_title(f"{level[1]} of both drafters")
        _draw_sequence(axes[-1], contents, points, metric, scale)
        axes[-1].set_xlabel(f"{unit} since the start of the rollout")
        last = points[-1].comparisons[metric]
        text = (
            f"{title_of(metric)} of the new drafter relative to the stable one. The estimate ends at {percent(last[0])}, with "
            f"bounds {percent(last[1])} to {percent(last[2])}, after {len(points)} observations."
        )
        return _finish(figure, "decision", "How the decision came about", text)


def draw_positions(contents: Contents) -> Chart | None:
    """Return the share of drafts accepted up to each position, of both arms."""
    shares = {name: _mean_positions(contents.observations, name) for name, *_ in _ARMS}
    if not all(shares.values()):
        return None
    with _draw("positions", 2.7) as figure:
        axes = figure.subplots()
        for index, (name, color, _, _) in enumerate(_ARMS):
            places = [number + 1 + (index - 0.5) * 0.36 for number in range(len(shares[name]))]
            hatch = "" if name == "new" else "///"
            background = COLORS["background"][0]
            bars = axes.bar(
                places,
                [100 * share for share in shares[name]],
                0.34,
                color=COLORS[color][0],
                label=name,
                hatch=hatch,
                edgecolor=background,
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=2)
        axes.set_xticks(range(1, max(map(len, shares.values())) + 1))
        axes.set_ylim(0, 108)
        axes.set_xlabel("draft token")
        axes.set_ylabel("accepted drafts, %")
        axes.grid(visible=False, axis="x")
        axes.legend(loc="upper right", ncols=2)
        texts = [f"{name}: {', '.join(f'{100 * share:.0f} %' for share in shares[name])}" for name, *_ in _ARMS]
        return _finish(figure, "positions", "Acceptance by position", f"Drafts accepted up to each token. {'. '.join(texts)}.")


def draw_latencies(contents: Contents) -> Chart | None:
    """Return both arms' time per output token and time to first token over time."""
    metrics = (("timePerOutputToken", "Time per output token, ms"), ("timeToFirstToken", "Time to first token, ms"))
    shown = [item for item in metrics if all(len(_arm_points(contents.observations, name, item[0])) > 1 for name, *_ in _ARMS)]
    if not shown:
        return None
    unit, scale = _time_axis(contents)
    with _draw("latencies", 1.5 + 1.3 * len(shown)) as figure:
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
        for (axes,), (field, title) in zip(rows, shown, strict=True):
            _draw_arms(axes, contents.observations, field, scale, factor=1000)
            axes.set_title(title)
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        rows[-1][0].set_xlabel(f"{unit} since the start of the rollout")
        texts = [
            f"{title}: new {1000 * _arm_points(contents.observations, 'new', field)[-1][1]:.1f}, "
            f"stable {1000 * _arm_points(contents.observations, 'stable', field)[-1][1]:.1f} at the end"
            for field, title in shown
        ]
        return _finish(figure, "latencies", "Latencies", f"{'. '.join(texts)}.")


def draw_traffic(contents: Contents) -> Chart | None:
    """Return phases, events and, between pods, the traffic share of the new drafter, on one time axis."""
    if not contents.phases:
        return None
    unit, scale = _time_axis(contents)
    weights = [(item.seconds, item.weight) for item in contents.observations if item.weight is not None]
    weights = weights if any(weight for _, weight in weights) else []
    end = max(_list_times(contents), default=1.0) or 1.0
    with _draw("traffic", 3.4 if weights else 1.9) as figure:
        rows = figure.subplots(2 if weights else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2] if weights else [1])
        if weights:
            axes = rows[0][0]
            weights = [*weights, (end, weights[-1][1])]
            times, values = [time / scale for time, _ in weights], [value for _, value in weights]
            axes.step(times, values, where="post", color=COLORS["new"][0])
            axes.fill_between(times, values, step="post", color=COLORS["band"][0])
            axes.set_ylim(-3, 105)
            axes.set_title("Traffic on the new pods, %")
        _draw_phases(rows[-1][0], contents, end, scale)
        rows[-1][0].set_xlabel(f"{unit} since the start of the rollout")
        phases = ", ".join(f"{item.phase} after {item.seconds / scale:.1f} {unit}" for item in contents.phases)
        return _finish(figure, "traffic", "Traffic, phases and events", f"Phases: {phases}.")


def draw_trials(contents: Contents) -> Chart | None:
    """Return the predicted and the measured gain of each trial of draft tokens."""
    trials = [item for item in contents.trials if item.predicted or item.measured]
    if not trials:
        return None
    with _draw("trials", 1.1 + 0.55 * len(trials)) as figure:
        axes = figure.subplots()
        for name, color, marker, shift in (("predicted", "stable", "s", 0.16), ("measured", "new", "o", -0.16)):
            for index, trial in enumerate(trials):
                gain = getattr(trial, name)
                if gain is None:
                    continue
                estimate, lower, upper = gain
                label = name if index == next(i for i, item in enumerate(trials) if getattr(item, name)) else None
                axes.plot([100 * estimate], [index + shift], marker, color=COLORS[color][0], label=label)
                if lower is not None and upper is not None:
                    axes.plot(
                        [100 * lower, 100 * upper],
                        [index + shift] * 2,
                        color=COLORS[color][0],
                        linestyle="-" if name == "measured" else "--",
                    )
        axes.axvline(0, color=COLORS["muted"][0], linewidth=1)
        axes.set_yticks(range(len(trials)), [f"K {trial.settings}, {trial.result}" for trial in trials])
        axes.set_ylim(len(trials) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("gain in tokens per second, %")
        axes.legend(loc="upper left", bbox_to_anchor=(0, 1.0 + 0.5 / len(trials)), ncols=2)
        texts = [
            f"K {trial.settings}: predicted {percent(trial.predicted and trial.predicted[0])}, "
            f"measured {percent(trial.measured and trial.measured[0])}"
            for trial in trials
        ]
        return _finish(figure, "trials", "Trials of draft tokens (K)", f"{'. '.join(texts)}.")


def build_theme(selector: str = ":root") -> Markup:
    """Return the style that gives the colours of charts their values on light and dark pages."""
    light, dark = (" ".join(f"--{name}: {pair[index]};" for name, pair in COLORS.items()) for index in (0, 1))
    dark_theme = f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    return Markup(f"{selector} {{ {light} }}\n{dark_theme}")


def with_theme(svg: Markup) -> Markup:
    """Return a chart as a file of its own: with the theme and a background."""
    style = element("style", build_theme("svg"))
    start = svg.index(">") + 1
    background = Markup('<rect width="100%" height="100%" style="fill: var(--background)"/>')
    return Markup(f"{svg[:start]}{style}{background}{svg[start:]}\n")


# ----------------------------------------------------------------------------------------------------------------------- parts
@contextmanager
def _draw(name: str, height: float) -> Iterator[Figure]:
    """Provide a figure under the style of reports; it is finished under it, too. `height`: in inches."""
    try:
        import matplotlib as mpl  # of the extra `report`
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError(
            "a report needs matplotlib, which is not installed: pip install 'aerie-operator[report]'; or read the decision with: "
            "kubectl aerie history."
        ) from None
    style: Any = {**_STYLE, "svg.hashsalt": f"aerie-{name}"}
    with mpl.rc_context(style):
        yield Figure(figsize=(_WIDTH, height), layout="constrained")


def _finish(figure: Figure, name: str, title: str, description: str) -> Chart:
    """Return the chart of a figure."""
    stream = io.StringIO()
    metadata: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(stream, format="svg", metadata=metadata)
    return Chart(title, description, _finish_svg(stream.getvalue(), name, title, description))


def _finish_svg(text: str, name: str, title: str, description: str) -> Markup:
    """Return matplotlib's SVG for a page: with variables for colours, names of its own, and a text for screen readers."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(id|xlink:href|clip-path)="(url\()?(#?)', rf'\1="\2\3{name}-', text)
    text = re.sub(r"url\(#(?!" + name + "-)", f"url(#{name}-", text)
    text = re.sub(r"(font: )(?:\d+ )?([\d.]+px) [^;\"]+", rf"\1\2 {_FONT}", text)
    for color, (light, _) in COLORS.items():
        text = re.sub(light, f"var(--{color}, {light})", text, flags=re.IGNORECASE)
    labels = f"{name}-title {name}-description"
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None, "matplotlib writes it"
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    start = f'<svg {spaces} {size[0]} role="img" aria-labelledby="{labels}">'
    head = element("title", title, id=f"{name}-title") + element("desc", description, id=f"{name}-description")
    return Markup(start + head + text[text.index(">") + 1 :].strip())


def _time_axis(contents: Contents) -> tuple[str, float]:
    """Return the unit of the time axis, and its seconds."""
    seconds = max(_list_times(contents), default=0.0)
    return ("hours", 3600.0) if seconds > 5 * 3600 else ("minutes", 60.0)


def _list_times(contents: Contents) -> list[float]:
    """Return the seconds of all that has a time."""
    times = [item.seconds for item in contents.observations]
    return [*times, *(item.seconds for item in contents.phases), *(item.seconds for item in contents.events)]


def _find_level(observations: Sequence[Observation]) -> tuple[str, str] | None:
    """Return the metric by which both arms are drawn, and its title; None where neither was measured."""
    metrics = (("tokensPerStep", "Tokens per step"), ("acceptanceLength", "Acceptance length"))
    counts = {metric: min(len(_arm_points(observations, name, metric[0])) for name, *_ in _ARMS) for metric in metrics}
    metric = max(metrics, key=lambda item: counts[item])
    return metric if counts[metric] > 1 else None


def _arm_points(observations: Sequence[Observation], arm: str, field: str) -> list[tuple[float, float]]:
    points = [(item.seconds, item.arms.get(arm, {}).get(field)) for item in observations]
    return [(seconds, float(value)) for seconds, value in points if isinstance(value, int | float)]


def _draw_arms(axes: Axes, observations: Sequence[Observation], field: str, scale: float, *, factor: float = 1.0) -> None:
    for name, color, line, marker in _ARMS:
        points = _arm_points(observations, name, field)
        times, values = [time / scale for time, _ in points], [factor * value for _, value in points]
        shown = marker if len(points) <= _MAX_MARKERS else None
        axes.plot(times, values, linestyle=line, marker=shown, markersize=3.5, color=COLORS[color][0], label=name)
    axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), borderaxespad=0.1)


def _split_by_design(points: Sequence[Observation]) -> Iterator[list[Observation]]:
    """Yield the points of one design after the other: their bounds do not continue each other."""
    group: list[Observation] = []
    for point in points:
        if group and point.design != group[-1].design:
            yield group
            group = []
        group.append(point)
    yield group


def _draw_sequence(axes: Axes, contents: Contents, points: Sequence[Observation], metric: str, scale: float) -> None:
    """Draw estimate and bounds over time, the required bound, and the decision."""
    limit = _find_shown_limit(points, metric)
    for index, group in enumerate(_split_by_design(points)):
        times = [item.seconds / scale for item in group]
        values = [item.comparisons[metric] for item in group]
        lowers = [max(-100 * limit, 100 * low) if low is not None else -100 * limit for _, low, _ in values]
        uppers = [min(100 * limit, 100 * high) if high is not None else 100 * limit for _, _, high in values]
        estimates = [min(max(100 * (estimate or 0.0), -100 * limit), 100 * limit) for estimate, _, _ in values]
        labels = ("bounds, valid at every moment", "estimate") if index == 0 else (None, None)
        axes.fill_between(times, lowers, uppers, color=COLORS["band"][0], linewidth=0, label=labels[0])
        marker = "o" if len(points) <= _MAX_MARKERS else None
        axes.plot(times, estimates, color=COLORS["new"][0], marker=marker, markersize=3.5, label=labels[1])
        if index:
            axes.axvline(times[0], color=COLORS["muted"][0], linewidth=1, linestyle=":")
    axes.axhline(0, color=COLORS["muted"][0], linewidth=1.2)
    required = contents.required_change if metric == TOKENS_PER_STEP else None
    if required:
        label = f"an acceptance needs the lower bound above {percent(required)}"
        axes.axhline(100 * required, color=COLORS["required"][0], linewidth=1.4, linestyle="-.", label=label)
    decision = _find_decision(contents)
    if decision is not None:
        axes.axvline(decision / scale, color=COLORS["text"][0], linewidth=1.2)
        axes.annotate(
            f"{_VERDICTS.get(contents.result, contents.result)} ",
            (decision / scale, 100 * limit),
            ha="right",
            va="top",
            color=COLORS["text"][0],
            fontweight="bold",
        )
    axes.set_ylim(-102 * limit, 102 * limit)
    axes.set_title(f"{title_of(metric)}, new against stable, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3, fontsize=9, columnspacing=1.2, handlelength=1.8)


def _find_shown_limit(points: Sequence[Observation], metric: str) -> float:
    """Return the change at which the axis ends: that of the latest third of the bounds, and of all estimates."""
    later = points[2 * len(points) // 3 :]
    values = [abs(value) for item in later for value in item.comparisons[metric] if value is not None]
    values += [abs(item.comparisons[metric][0] or 0.0) for item in points]
    return min(MAX_SHOWN_CHANGE, max(0.03, 1.15 * max(values)))


def _find_decision(contents: Contents) -> float | None:
    """Return the seconds after which the rollout has left its analysis for its decision; None while there is none."""
    if not contents.result:
        return None
    analyzed = [item.seconds for item in contents.observations if item.phase in ("Analyzing", "Evaluating")]
    if not analyzed:
        return None
    return next((item.seconds for item in contents.phases if item.seconds >= analyzed[-1] and item.phase != "Analyzing"), None)


def _mean_positions(observations: Sequence[Observation], arm: str) -> list[float]:
    """Return the mean acceptance by position over all observations with as many positions as the last has."""
    values = [item.arms.get(arm, {}).get("acceptanceByPosition") for item in observations]
    lists = [value for value in values if isinstance(value, list) and value and all(isinstance(x, int | float) for x in value)]
    lists = [value for value in lists if len(value) == len(lists[-1])]
    return [sum(column) / len(lists) for column in zip(*lists, strict=True)] if lists else []


def _draw_phases(axes: Axes, contents: Contents, end: float, scale: float) -> None:
    """Draw phases as bars with their names, and events as marks below."""
    starts = [item.seconds for item in contents.phases]
    for index, (phase, stop) in enumerate(zip(contents.phases, [*starts[1:], end], strict=True)):
        width = (stop - phase.seconds) / scale
        color = COLORS["band" if index % 2 == 0 else "line"][0]
        axes.barh(1, width, left=phase.seconds / scale, height=0.6, color=color, edgecolor=COLORS["muted"][0], linewidth=0.6)
        if width > 0.13 * end / scale:
            axes.text((phase.seconds + stop) / 2 / scale, 1, phase.phase, ha="center", va="center", fontsize=9)
    for kind, marker, color in (("Normal", "|", "muted"), ("Warning", "v", "required")):
        times = [item.seconds / scale for item in contents.events if (item.kind == "Warning") == (kind == "Warning")]
        if times:
            axes.plot(
                times,
                [0.2] * len(times),
                marker,
                color=COLORS[color][0],
                markersize=8,
                linestyle="",
                label=f"{kind.lower()} events",
            )
    axes.set_ylim(-0.2, 1.6)
    axes.set_xlim(0, 1.01 * end / scale)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_title("Phases and events")
    if contents.events:
        axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1, 1), borderaxespad=0.1)
