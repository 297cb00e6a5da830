"""A resource's status as rows of a table that grows as the status changes: what `aerie-lab demo` shows of a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import out

Json = dict[str, Any]


class StatusTable:
    """A table of a status as it changes; a row that repeats the one before is left out."""

    COLUMN_WIDTHS = {"TIME": 6, "PHASE": 13, "SERVING": 8, "TRAFFIC IN %": 36, "BLOCKS": 8, "AL-CONTROL": 12, "AL-CANARY": 11}  # noqa: RUF012

    def __init__(self, *columns: str) -> None:
        self._columns, self._last_cells = columns, [""]
        self._start_time = 0.0

    def print_header(self) -> None:
        """The headings; time counts from here."""
        self._start_time = time.monotonic()
        out.print(self._format_line("TIME", list(self._columns)))

    def print_row(self, status: Json) -> None:
        """A row, where the status has moved in what the columns show."""
        cells = [COLUMN_RENDERERS[name](status) for name in self._columns]
        if cells != self._last_cells:
            out.print(sanitize_text(self._format_line(f"{time.monotonic() - self._start_time:.0f} s", cells)))
        self._last_cells = cells

    def _format_line(self, time: str, cells: list[str]) -> str:
        widths = [self.COLUMN_WIDTHS.get(name, 0) for name in self._columns]
        return "".join(cell.ljust(width) for cell, width in zip([time, *cells], [6, *widths], strict=True)).rstrip()


def _list_arms(status: Json) -> dict[str, Json]:
    """The arms that there are, by name."""
    canary = status.get("canary") or {}
    found = {"stable": status.get("stable"), "canary": canary or None, "control": canary.get("control")}
    return {name: arm for name, arm in found.items() if arm}


def _render_traffic(status: Json) -> str:
    return ", ".join(f"{name} {arm['weight']}" for name, arm in _list_arms(status).items() if arm.get("weight"))


def _acceptance_length_renderer(name: str) -> Callable[[Json], str]:
    def shown(status: Json) -> str:
        length = _list_arms(status).get(name, {}).get("acceptanceLength")
        return "" if length is None else f"{length:.2f}"

    return shown


def _find_drafting_comparison(status: Json) -> Json:
    """The comparison of what drafts give, while there is a canary that is compared."""
    running = status.get("analysis") or {} if (status.get("canary") or {}).get("readyTime") else {}
    judged = ("TokensPerStep", "AcceptanceLength")  # the latter stands first only where it decides
    return next((one for one in running.get("comparisons") or [] if one["metric"] in judged), {})


def _render_bounds(status: Json) -> str:
    one = _find_drafting_comparison(status)
    if "lower" not in one or "upper" not in one:
        return ""
    return f"{one['estimate']:+.1%}, certainly {one['lower']:+.1%} to {one['upper']:+.1%}".replace("%", " %")


COLUMN_RENDERERS: dict[str, Callable[[Json], str]] = {
    "PHASE": lambda status: str(status["phase"]),
    "SERVING": lambda status: f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)}",
    "TRAFFIC IN %": _render_traffic,
    "BLOCKS": lambda status: str(_find_drafting_comparison(status).get("blocks", "")),
    "AL-CONTROL": _acceptance_length_renderer("control"),
    "AL-CANARY": _acceptance_length_renderer("canary"),
    "CANARY/CONTROL": _render_bounds,
}
