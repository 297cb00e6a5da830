"""Table of a resource's status with a row for each change, for `aerie-lab demo`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import out

Json = dict[str, Any]


class StatusTable:
    """Prints a row for each change of a status that its columns show."""

    COLUMN_WIDTHS = {"TIME": 6, "PHASE": 13, "SERVING": 8, "TRAFFIC IN %": 36, "BLOCKS": 8, "AL-CONTROL": 12, "AL-CANARY": 11}  # noqa: RUF012

    def __init__(self, *columns: str) -> None:
        self._columns, self._last_cells = columns, [""]
        self._start_time = 0.0

    def print_header(self) -> None:
        """Print the headings; time counts from here."""
        self._start_time = time.monotonic()
        out.print(self._format_line("TIME", list(self._columns)))

    def print_row(self, status: Json) -> None:
        """Print a row, unless it would repeat the last one."""
        cells = [COLUMN_RENDERERS[name](status) for name in self._columns]
        if cells != self._last_cells:
            out.print(sanitize_text(self._format_line(f"{time.monotonic() - self._start_time:.0f} s", cells)))
        self._last_cells = cells

    def _format_line(self, elapsed: str, cells: list[str]) -> str:
        widths = [self.COLUMN_WIDTHS.get(name, 0) for name in self._columns]
        return "".join(cell.ljust(width) for cell, width in zip([elapsed, *cells], [6, *widths], strict=True)).rstrip()


def _list_arms(status: Json) -> dict[str, Json]:
    """Return the existing arms by name."""
    canary = status.get("canary") or {}
    arms = {"stable": status.get("stable"), "canary": canary or None, "control": canary.get("control")}
    return {name: arm for name, arm in arms.items() if arm}


def _render_traffic(status: Json) -> str:
    return ", ".join(f"{name} {arm['weight']}" for name, arm in _list_arms(status).items() if arm.get("weight"))


def _acceptance_length_renderer(name: str) -> Callable[[Json], str]:
    def render(status: Json) -> str:
        length = _list_arms(status).get(name, {}).get("acceptanceLength")
        return "" if length is None else f"{length:.2f}"

    return render


def _find_drafting_comparison(status: Json) -> Json:
    """Return the comparison of tokens per step or acceptance length, while a canary is analyzed; otherwise an empty one."""
    analysis = status.get("analysis") or {} if (status.get("canary") or {}).get("readyTime") else {}
    metrics = ("TokensPerStep", "AcceptanceLength")  # the latter is first only where it decides
    return next((comparison for comparison in analysis.get("comparisons") or [] if comparison["metric"] in metrics), {})


def _render_bounds(status: Json) -> str:
    comparison = _find_drafting_comparison(status)
    if "lower" not in comparison or "upper" not in comparison:
        return ""
    estimate, lower, upper = (f"{comparison[name]:+.1%}".replace("%", " %") for name in ("estimate", "lower", "upper"))
    return f"{estimate}, bounds {lower} to {upper}"


COLUMN_RENDERERS: dict[str, Callable[[Json], str]] = {
    "PHASE": lambda status: str(status["phase"]),
    "SERVING": lambda status: f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)}",
    "TRAFFIC IN %": _render_traffic,
    "BLOCKS": lambda status: str(_find_drafting_comparison(status).get("sampleCount", "")),
    "AL-CONTROL": _acceptance_length_renderer("control"),
    "AL-CANARY": _acceptance_length_renderer("canary"),
    "CANARY/CONTROL": _render_bounds,
}
