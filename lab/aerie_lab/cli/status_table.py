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

    COLUMN_WIDTHS = {"TIME": 6, "PHASE": 13, "SERVING": 8, "USERS": 7, "PAIRS": 7}  # noqa: RUF012

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


def format_comparison(comparison: Json) -> str:
    """Return the estimate of a comparison with its bounds, as far as it has them."""
    percents = [f"{comparison[name]:+z.1%}".replace("%", " %") for name in ("estimate", "lower", "upper") if name in comparison]
    return f"{percents[0]}, bounds {percents[1]} to {percents[2]}" if len(percents) == 3 else "".join(percents[:1])


def find_tokens_per_step(comparisons: list[Json] | None) -> Json:
    """Return the comparison of tokens per step; an empty one before there is any."""
    return next((comparison for comparison in comparisons or [] if comparison["metric"] == "TokensPerStep"), {})


def find_canary_weight(status: Json) -> int:
    """Return the percentage of the users' requests that the new drafter answers."""
    return int((status.get("canary") or {}).get("weight") or 0)


def _find_current_comparison(status: Json) -> Json:
    """Return the comparison of the rollout in progress; an empty one without a rollout, and before its comparison has begun."""
    in_place, canary = status.get("inPlaceRollout") or {}, status.get("canary") or {}
    is_compared = "trialStartTime" in in_place or "startTime" in (canary.get("evaluation") or {})
    return find_tokens_per_step((status.get("analysis") or {}).get("comparisons") if is_compared else None)


COLUMN_RENDERERS: dict[str, Callable[[Json], str]] = {
    "PHASE": lambda status: str(status["phase"]),
    "SERVING": lambda status: f"{status.get('readyReplicas', 0)} of {status.get('replicas', 0)}",
    "USERS": lambda status: f"{find_canary_weight(status)} %",
    "PAIRS": lambda status: str(_find_current_comparison(status).get("sampleCount", "")),
    "TOKENS PER STEP, NEW DRAFTER TO OLD": lambda status: format_comparison(_find_current_comparison(status)),
}
