"""`aerie plan`: what a rollout in place would take at a given traffic, before it is applied and without a cluster.

Reads the resource, derives the stages of the rollout from its spec, and forecasts each by `aerie.analysis.planning`. Rollouts by
canary pods have no forecast: the command fails with a message that states it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aerie.analysis.planning import (
    EQUAL_REQUESTS_DEVIATION,
    REQUEST_SIZE_DISPERSION,
    RUNS,
    USERS_DEVIATION,
    PlannedTraffic,
    TurnsForecast,
    forecast_turns,
)
from aerie.analysis.switchback.design import MIN_WINDOW_SECONDS, WindowSchedule, schedule_windows
from aerie.analysis.switchback.plan import SwitchbackPlan
from aerie.api import KIND, SpeculativeDeployment
from aerie.cli.commands.preflight import OutputFormat
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import display_file_name, parse_deployment, read_objects
from aerie.rollout.in_place import evaluation
from aerie.rollout.in_place.trial import P90_PER_MEAN, SECONDS_PER_POD
from aerie.rollout.in_place.trial_pods import compute_growth_step, count_desired_pods

_DEFAULT_EFFECTS = (8.0, 3.0, 0.0, -2.0, -3.0, -10.0)
_SEED = "plan"
_ENGINE_REQUESTS = 4
"""Requests that the evaluator has at an engine at a time (docs/shadow-evaluation.md)."""
_P80_PER_MEAN = math.log(5)
"""80th percentile of exponentially distributed durations: no request is sent that would probably end after its window."""


@dataclass(frozen=True)
class _Stage:
    """A part of the rollout that can end it."""

    title: str
    serves_users: bool
    """Whether its requests are those of users."""
    forecasts: tuple[TurnsForecast, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "servesUsers": self.serves_users,
            "forecasts": [
                {
                    "effectPercent": round(100 * forecast.effect, 6),
                    "rollbackChance": forecast.rollback_chance,
                    "promotionChance": forecast.promotion_chance,
                    "inconclusiveChance": forecast.inconclusive_chance,
                    "medianSeconds": forecast.median_seconds,
                    "p90Seconds": forecast.p90_seconds,
                    "medianPairs": forecast.median_pairs,
                    "meanUserRequestsOnNewDrafter": forecast.mean_canary_requests if self.serves_users else 0.0,
                }
                for forecast in self.forecasts
            ],
        }


def plan(
    file: Annotated[str, typer.Option("-f", "--file", help="Manifest of a SpeculativeDeployment; -: standard input.")],
    requests_per_second: Annotated[float, typer.Option(help="Requests per second of one pod.")],
    request_seconds: Annotated[float, typer.Option(help="Mean duration of a request in seconds.")] = 5.0,
    effect: Annotated[
        list[float] | None,
        typer.Option(help="Gain of the new drafter in tokens per step, in percent, such as -3. May be repeated."),
    ] = None,
    deviation: Annotated[
        float, typer.Option(help="Standard deviation of steps per token between requests, relative to the mean.")
    ] = round(USERS_DEVIATION, 2),
    name: Annotated[str | None, typer.Option(help="Name of the object, if the file contains several.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
) -> None:
    """Forecast the verdict of a rollout in place: its chances, its time, and how many users meet the new drafter before it.

    Simulates trials under an assumed traffic with the tests that decide a rollout. Needs no cluster. Exit status 2: there is no
    forecast, for example because the rollout is by pods.
    """
    _require("--requests-per-second", requests_per_second, 0, 10_000)
    _require("--request-seconds", request_seconds, 0.01, 3600)
    _require("--deviation", deviation, 0.01, 10)
    effects = tuple(effect or _DEFAULT_EFFECTS)
    for value in effects:
        _require("--effect", value, -90, 1000)
    deployment = _read_deployment(file, name)
    if deployment.spec.rollout.in_place.mode == "Off":
        raise CommandError(
            "spec.rollout.inPlace.mode is Off, so the rollout is by canary pods, which have no forecast yet: write mode Auto, or "
            "see 'Time to a verdict' in docs/rollouts.md."
        )
    stages = _forecast_stages(deployment, requests_per_second, request_seconds, effects, deviation)
    if output is OutputFormat.JSON:
        assumptions = {"requestsPerSecond": requests_per_second, "requestSeconds": request_seconds, "deviation": deviation}
        document = {"method": "InPlace", "assumptions": {**assumptions, "simulatedTrials": RUNS}}
        typer.echo(json.dumps({**document, "stages": [stage.to_json() for stage in stages]}, indent=2))
    else:
        for stage in stages:
            _print_stage(stage)
    for note in _notes(deployment, requests_per_second):
        err.print(f"[yellow]note:[/] {note}")


def _require(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise CommandError(f"{option} is {value:g}: set a number from {low:g} to {high:g}.")


def _read_deployment(file: str, name: str | None) -> SpeculativeDeployment:
    """Return the file's resource. Raises CommandError, ResourceError."""
    documents = [document for document in read_objects(file) if document.get("kind") == KIND]
    if name is not None:
        documents = [document for document in documents if (document.get("metadata") or {}).get("name") == name]
    if len(documents) != 1:
        suffix = "" if name is None else f" named '{name[:80]}'"
        remedy = "set its name with --name" if documents and name is None else "give a file with one"
        raise CommandError(f"{display_file_name(file)} has {len(documents)} objects of kind {KIND}{suffix}: {remedy}.")
    return parse_deployment(documents[0])


def _forecast_stages(
    deployment: SpeculativeDeployment, rate: float, seconds: float, effects: tuple[float, ...], deviation: float
) -> list[_Stage]:
    """Return the stages in their order: shadow evaluation where it takes place, and turns under the traffic of users."""
    spec = deployment.spec
    rollout, analysis = spec.rollout, spec.rollout.analysis
    stages = []
    if analysis.shadow.source != "None" and spec.replicas >= evaluation.MIN_READY_PODS:
        length = evaluation.REQUEST_DURATIONS_PER_WINDOW * seconds
        length = float(round(min(max(evaluation.MIN_WINDOW_SECONDS, length), evaluation.MAX_WINDOW_SECONDS)))
        schedule = WindowSchedule(length, evaluation.WASHOUT_SECONDS)
        engine_rate = _ENGINE_REQUESTS / seconds
        source_rate = engine_rate if analysis.shadow.source == "Prompts" else min(rate * spec.replicas, engine_rate)
        counted = schedule.window(0).counted_seconds
        sending_share = max(0.0, counted - _P80_PER_MEAN * seconds) / counted
        shadow_plan = SwitchbackPlan(
            _SEED,
            schedule,
            analysis.goal,
            analysis.margin,
            analysis.shadow.max_duration.total_seconds(),
            excludes_failures=False,
        )
        traffic = PlannedTraffic(source_rate * sending_share, EQUAL_REQUESTS_DEVIATION, 0.0, lambda _: 1)
        forecasts = tuple(forecast_turns(shadow_plan, traffic, effect / 100) for effect in effects)
        stages.append(_Stage(f"Shadow evaluation ({analysis.shadow.source}), in one isolated pod", False, forecasts))
    windows = schedule_windows(rate, P90_PER_MEAN * seconds)
    shortest = max(windows.first_window_seconds, MIN_WINDOW_SECONDS + SECONDS_PER_POD * spec.replicas)
    users_schedule = WindowSchedule(float(round(shortest)), float(round(windows.carryover_seconds)))

    def count_pods(elapsed: float) -> int:
        return count_desired_pods(rollout, spec.replicas, compute_growth_step(rollout, timedelta(seconds=elapsed)))

    max_seconds = analysis.max_duration.total_seconds()
    users_plan = SwitchbackPlan(_SEED, users_schedule, analysis.goal, analysis.margin, max_seconds)
    min_seconds = min(rollout.in_place.min_duration.total_seconds(), max_seconds)
    traffic = PlannedTraffic(rate, deviation, REQUEST_SIZE_DISPERSION * seconds / 2, count_pods)
    forecasts = tuple(forecast_turns(users_plan, traffic, effect / 100, min_seconds) for effect in effects)
    title = f"By turns, under the traffic of users; pods on trial: {count_pods(0)}, later {count_pods(max_seconds)}"
    return [*stages, _Stage(title, True, forecasts)]


def _print_stage(stage: _Stage) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", title=stage.title, title_justify="left")
    passed = "PROMOTED" if stage.serves_users else "ACCEPTED"
    for column in ("EFFECT", "ROLLED BACK", passed, "INCONCLUSIVE", "MEDIAN", "P90", "PAIRS", "USER REQUESTS"):
        table.add_column(column, justify="right")
    for forecast in stage.forecasts:
        chances = (forecast.rollback_chance, forecast.promotion_chance, forecast.inconclusive_chance)
        table.add_row(
            f"{100 * forecast.effect:+g} %" if forecast.effect else "0 %",
            *(f"{100 * chance:.1f} %" for chance in chances),
            _format_minutes(forecast.median_seconds),
            _format_minutes(forecast.p90_seconds),
            "-" if forecast.median_pairs is None else str(forecast.median_pairs),
            f"{forecast.mean_canary_requests:.0f}" if stage.serves_users else "0",
        )
    (out if out.is_terminal else Console(width=160)).print(table)


def _format_minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 60:.1f} min"


def _notes(deployment: SpeculativeDeployment, rate: float) -> list[str]:
    rollout = deployment.spec.rollout
    simulated = (
        f"Chances are those of {RUNS} simulated trials: the standard error is up to 3.5 percentage points. Tenants, drift and "
        "failures are not in them; docs/in-place.md has the guarantees."
    )
    notes = [simulated]
    if rate == 0:
        notes.append("Without requests, a trial under the traffic of users has no verdict.")
    if rollout.in_place.mode == "Auto":
        notes.append("What running engines cannot change is rolled out by canary pods, for which this is no forecast.")
    if rollout.analysis.shadow.source != "None":
        if deployment.spec.replicas < evaluation.MIN_READY_PODS:
            notes.append("Shadow evaluation is skipped: it needs two ready pods.")
        else:
            notes.append("What shadow evaluation does not roll back continues by turns. The second table is for those.")
    return notes
