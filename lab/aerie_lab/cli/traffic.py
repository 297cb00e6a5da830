"""`aerie-lab traffic`: requests with a rate or a number of clients, each answer checked, and a table of what came back."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from aerie.boundary import EXIT_REJECTED
from aerie.terminal import sanitize_text
from aerie_lab.cli.console import err, out
from aerie_lab.engine.load_generation.traffic import TrafficReport, TrafficTarget, run_closed_loop, run_open_loop
from aerie_lab.engine.load_generation.workload import (
    DEFAULT_TRAFFIC_CLASSES,
    ArrivalProcess,
    BurstArrivals,
    DiurnalArrivals,
    LengthDistribution,
    PoissonArrivals,
    generate_turns,
)
from aerie_lab.errors import StateError

_CLASS_NAMES = [kind.name for kind in DEFAULT_TRAFFIC_CLASSES]


class ArrivalPattern(StrEnum):
    """Pattern of the arrival of requests."""

    poisson = "poisson"
    bursts = "bursts"
    day = "day"


def traffic(
    url: Annotated[str, typer.Argument(help="The server, as http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="The served model's name.")],
    seconds: Annotated[float, typer.Option(help="For how long requests start.")] = 30.0,
    rate: Annotated[float, typer.Option(help="Mean requests per second.")] = 2.0,
    arrivals: Annotated[
        ArrivalPattern, typer.Option(help="bursts: 8 times the rate in 10 s bursts; day: one day within --seconds.")
    ] = ArrivalPattern.poisson,
    clients: Annotated[int, typer.Option(help="A fixed number of clients instead of a rate; 0: use the rate.")] = 0,
    requests: Annotated[int, typer.Option(help="With --clients: how many requests in all.")] = 100,
    classes: Annotated[list[str] | None, typer.Option("--class", help=f"Of {', '.join(_CLASS_NAMES)}; default: all.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Median prompt tokens of every class.")] = None,
    answer: Annotated[int | None, typer.Option(help="Median answer tokens of every class.")] = None,
    host: Annotated[str | None, typer.Option(help="Host header, for the lab's gateway.")] = None,
    bytes_per_token: Annotated[float, typer.Option(help="Bytes of text per token of the server's tokenizer.")] = 4.0,
    stream: Annotated[bool, typer.Option(help="Request streaming responses.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which a client gives up.", min=0.001)] = 300.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Send requests to a server, and report errors and latencies. Exit status 1: an answer was wrong, or did not come."""
    for name in classes or []:
        if name not in _CLASS_NAMES:
            raise StateError(f"'{name}' is no class of traffic: one of {', '.join(_CLASS_NAMES)}.")
    kinds = [kind for kind in DEFAULT_TRAFFIC_CLASSES if kind.name in (classes or _CLASS_NAMES)]
    if prompt is not None:
        kinds = [
            replace(kind, prompt_lengths=LengthDistribution(prompt, 0.5), system_prompt_tokens=0, mean_turns=1.0)
            for kind in kinds
        ]
    if answer is not None:
        kinds = [replace(kind, answer_lengths=LengthDistribution(answer, 0.5)) for kind in kinds]
    process: ArrivalProcess = PoissonArrivals(rate)
    if arrivals is ArrivalPattern.bursts:
        process = BurstArrivals(rate / 2, 8 * rate, mean_calm_seconds=120.0, mean_burst_seconds=10.0)
    elif arrivals is ArrivalPattern.day:
        process = DiurnalArrivals(rate, day_seconds=seconds, peak_seconds=seconds * 15 / 24)
    target = TrafficTarget(url.rstrip("/"), model, host, bytes_per_token, stream, timeout_seconds=timeout)
    if clients:
        endless = generate_turns(kinds, PoissonArrivals(1.0), 0.0, float("inf"), seed)
        report = asyncio.run(run_closed_loop(target, itertools.islice(endless, requests), clients))
    else:
        report = asyncio.run(run_open_loop(target, generate_turns(kinds, process, 0.0, seconds, seed)))
    _print_report(report, as_json)
    if report.errors:
        err.print(sanitize_text(f"{report.errors.total()} of {len(report.outcomes)} requests failed: {dict(report.errors)}."))
        raise typer.Exit(EXIT_REJECTED)


def _print_report(report: TrafficReport, as_json: bool) -> None:
    summary = report.summary()
    if as_json:
        out.print_json(json.dumps(summary | {"failures": dict(report.errors)}))
        return
    table = Table(box=None, pad_edge=False)
    columns = (
        "requests",
        "errors",
        "requests_per_s",
        "tokens_per_s",
        "ttft_p50_ms",
        "ttft_p95_ms",
        "tpot_p50_ms",
        "tpot_p95_ms",
        "e2e_p95_ms",
    )
    table.add_column("CLASS")
    for column in columns:
        table.add_column(column.replace("_", " ").upper(), justify="right")
    for name, row in summary.items():
        table.add_row(
            name,
            *(
                f"{row[column]:,.0f}" if row[column] >= 100 or column in ("requests", "errors") else f"{row[column]:.2f}"
                for column in columns
            ),
        )
    out.print(table)
    err.print(f"{report.seconds:.1f} s")
