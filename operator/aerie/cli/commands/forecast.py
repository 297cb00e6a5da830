"""`aerie forecast`: what a rollout would take at a given traffic, before it is applied and without a cluster.

Reads the resource, and forecasts the stages of its rollout (`aerie.forecast`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aerie.api import KIND, SpeculativeDeployment
from aerie.cli.commands.preflight import OutputFormat
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import display_file_name, parse_deployment, read_objects
from aerie.forecast.assumptions import DEVIATION, STEP_TIME_DEVIATION, Requests

if TYPE_CHECKING:
    from aerie.forecast.outcomes import Summary
    from aerie.forecast.stages import RolloutForecast, Stage

_DEFAULT_EFFECTS = (8.0, 3.0, 0.0, -2.0, -3.0, -10.0)
_DEFAULT = Requests(1.0)


def forecast(
    file: Annotated[str, typer.Option("-f", "--file", help="Manifest of a SpeculativeDeployment; -: standard input.")],
    requests_per_second: Annotated[float, typer.Option(help="Users' requests per second of one pod.")],
    request_seconds: Annotated[float, typer.Option(help="Mean duration of a request in seconds.")] = _DEFAULT.seconds,
    output_tokens: Annotated[float, typer.Option(help="Mean tokens of an answer.")] = _DEFAULT.tokens,
    effect: Annotated[
        list[float] | None,
        typer.Option(help="Gain of the new drafter in tokens per step, in percent, such as -3. May be repeated."),
    ] = None,
    history: Annotated[
        bool, typer.Option(help="Whether stable pods have run for a day before an analysis of canary pods.")
    ] = False,
    deviation: Annotated[
        float, typer.Option(help="Standard deviation of steps per token between requests, relative to the mean.")
    ] = round(DEVIATION, 3),
    pair_deviation: Annotated[
        float, typer.Option(help="Standard deviation of the ratio of steps of two answers to one request; sampled: 0.14.")
    ] = _DEFAULT.pair_deviation,
    step_time_deviation: Annotated[
        float, typer.Option(help="Standard deviation of the mean time of a step in a window, relative to the mean.")
    ] = round(STEP_TIME_DEVIATION, 3),
    name: Annotated[str | None, typer.Option(help="Name of the object, if the file contains several.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
) -> None:
    """Forecast the rollout of a new drafter: its chances, its time, and how many users meet the drafter before the verdict.

    Simulates rollouts under an assumed traffic with the rules that decide them. Needs no cluster. Exit status 2: there is no
    forecast, because an option or the manifest is wrong.
    """
    from aerie.forecast.stages import ForecastError, forecast_rollout  # imports numpy, which no other command needs

    _require("--requests-per-second", requests_per_second, 0, 1000)
    _require("--request-seconds", request_seconds, 0.05, 3600)
    _require("--output-tokens", output_tokens, 2, 100_000)
    _require("--deviation", deviation, 0, 10)
    _require("--pair-deviation", pair_deviation, 0, 10)
    _require("--step-time-deviation", step_time_deviation, 0, 10)
    effects = tuple(effect or _DEFAULT_EFFECTS)
    for value in effects:
        _require("--effect", value, -90, 1000)
    requests = Requests(
        requests_per_second,
        request_seconds,
        output_tokens,
        deviation,
        pair_deviation,
        step_time_deviation=step_time_deviation,
    )
    deployment = _read_deployment(file, name)
    try:
        result = forecast_rollout(deployment, requests, [value / 100 for value in effects], has_history=history)
    except ForecastError as error:
        raise CommandError(str(error)) from error
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(_to_json(result, requests), indent=2))
    else:
        for stage in result.stages:
            _print_table(stage.title, stage.summaries, stage)
        if len(result.stages) > 1:
            _print_table("All stages", result.total, None)
    for note in (_describe_runs(result), *result.notes):
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


def _to_json(forecast: RolloutForecast, requests: Requests) -> dict[str, Any]:
    return {
        "method": forecast.method,
        "assumptions": {
            "requestsPerSecond": requests.per_second,
            "requestSeconds": requests.seconds,
            "outputTokens": requests.tokens,
            "deviation": requests.deviation,
            "pairDeviation": requests.pair_deviation,
            "stepTimeDeviation": requests.step_time_deviation,
            "podDeviation": requests.pod_deviation,
        },
        "stages": [
            {
                "title": stage.title,
                "samples": stage.samples,
                "servesUsers": stage.serves_users,
                "forecasts": [_summary_to_json(summary) for summary in stage.summaries],
            }
            for stage in forecast.stages
        ],
        "total": [_summary_to_json(summary) for summary in forecast.total],
        "notes": list(forecast.notes),
    }


def _summary_to_json(summary: Summary) -> dict[str, Any]:
    return {
        "effectPercent": round(100 * summary.effect, 6),
        "simulatedRollouts": summary.runs,
        "rollbackChance": summary.rollback_chance,
        "promotionChance": summary.promotion_chance,
        "inconclusiveChance": summary.inconclusive_chance,
        "medianSeconds": summary.median_seconds,
        "p90Seconds": summary.p90_seconds,
        "medianSamples": summary.median_samples,
        "meanUserRequestsOnNewDrafter": summary.mean_user_requests,
    }


def _print_table(title: str, summaries: tuple[Summary, ...], stage: Stage | None) -> None:
    """Print a table of a stage, or of all stages where it is None."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    passed = "ACCEPTED" if stage is not None and not stage.serves_users else "PROMOTED"
    samples = [stage.samples.upper()] if stage is not None else []
    for column in ("EFFECT", "ROLLED BACK", passed, "INCONCLUSIVE", "MEDIAN", "P90", *samples, "USER REQUESTS"):
        table.add_column(column, justify="right")
    for summary in summaries:
        chances = (summary.rollback_chance, summary.promotion_chance, summary.inconclusive_chance)
        digits = 1 if summary.runs >= 500 else 0
        counts = ["-" if summary.median_samples is None else str(summary.median_samples)] if stage is not None else []
        table.add_row(
            f"{100 * summary.effect:+g} %" if summary.effect else "0 %",
            *(f"{100 * chance:.{digits}f} %" for chance in chances),
            _format_minutes(summary.median_seconds),
            _format_minutes(summary.p90_seconds),
            *counts,
            f"{summary.mean_user_requests:.0f}",
        )
    console = out if out.is_terminal else Console(width=160)
    console.print(title, table, sep="\n")


def _format_minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 60:.1f} min"


def _describe_runs(forecast: RolloutForecast) -> str:
    """Return how many rollouts were simulated, with the largest standard error of a chance."""
    parts = []
    for stage in forecast.stages:
        summary = stage.summaries[0]
        parts.append(f"{summary.runs} ({stage.samples}): up to {100 * summary.standard_error(0.5):.1f} percentage points")
    return f"Simulated rollouts of each effect, and the standard error of a chance: {'; '.join(parts)}."
