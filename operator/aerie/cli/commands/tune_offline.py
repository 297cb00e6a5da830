"""`aerie tune`: the tuner on recorded metrics, for whoever wants its opinion without the operator."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aerie.api import SpeculativeDeployment
from aerie.api.types import duration
from aerie.cli.commands.preflight import Output
from aerie.cli.commands.tune_explain import explain as explain_command
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import read_deployment
from aerie.cli.inputs.prometheus import Server, read_server
from aerie.cli.inputs.recorded import Recorded, read_recorded
from aerie.engine import arguments, command_line, releases
from aerie.engine.metrics.sample import Reset, Sample, between
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, SettingError, Static, Tier, max_tokens
from aerie.terminal import plain

if TYPE_CHECKING:  # numpy comes with it: only who tunes pays for that
    from aerie.tuning.decision.types import Situation
    from aerie.tuning.telemetry import Telemetry

SHORTEST_WINDOW = 10.0
LONGEST_WINDOW = 300.0
"""Seconds between two scrapes that are looked at together."""

_PANEL = "Metrics from a Prometheus server"

app = typer.Typer(no_args_is_help=True, help="What speculation setting an engine should have, from its metrics.")
app.command(name="explain")(explain_command)


@dataclass(frozen=True)
class _Given:
    """What is known besides the metrics."""

    version: releases.Version
    arguments: arguments.Arguments
    method: str
    most: int
    time_per_output_token: timedelta | None = None
    time_to_first_token: timedelta | None = None
    percentile: int = 95


@app.command()
def offline(
    metrics: Annotated[
        Path | None, typer.Option(help="Recorded metrics: lines of JSON with pages, or an answer of query_range.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="Manifest of the SpeculativeDeployment that was recorded; -: standard input."),
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM version, instead of the image's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=15, help="Most draft tokens to choose from.")] = None,
    schedule: Annotated[str | None, typer.Option(help="The engines ran a schedule, like 1-8:5,9-64:3.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="The engines ran with adaptive verification.")] = False,
    experts: Annotated[bool | None, typer.Option("--experts/--dense", help="Whether the target is a mixture of experts.")] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print the decision.")] = Output.TEXT,
    seed: Annotated[int, typer.Option(help="Seed of the draws: the same metrics and seed give the same answer.")] = 1,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of the server, such as http://localhost:9090.", rich_help_panel=_PANEL)
    ] = None,
    pods: Annotated[
        str | None, typer.Option(help="Regular expression of the pods' names. Default: the manifest's.", rich_help_panel=_PANEL)
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Their namespace. Default: the manifest's, else any.", rich_help_panel=_PANEL)
    ] = None,
    since: Annotated[str, typer.Option(help="How far to look back, up to 24h.", rich_help_panel=_PANEL)] = "24h",
    label: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: further label of the series; may be repeated.", rich_help_panel=_PANEL)
    ] = None,
    pod_label: Annotated[
        str | None, typer.Option(help="Label that holds the name of the pod. Default: pod.", rich_help_panel=_PANEL)
    ] = None,
    prometheus_token: Annotated[
        Path | None, typer.Option(help="File with a bearer token for the server.", rich_help_panel=_PANEL)
    ] = None,
    prometheus_ca: Annotated[
        Path | None, typer.Option(help="File with the authorities of a server with https.", rich_help_panel=_PANEL)
    ] = None,
) -> None:
    """Say what num_speculative_tokens should be, with the expected gain, from metrics of running engines.

    The metrics are a file's (--metrics) or a Prometheus server's (--prometheus). A fixed K is read off them. Exit status: 0 there
    is an answer, 1 the metrics do not identify one, 2 it could not be done.
    """
    from aerie.tuning.decision.explain import explain, to_json
    from aerie.tuning.decision.policy import Policy
    from aerie.tuning.decision.recommend import decide
    from aerie.tuning.decision.types import Action

    if (metrics is None) == (prometheus is None):
        raise CommandError("the metrics have to come from one place: give --metrics FILE or --prometheus URL.")
    resource = read_deployment(file) if file is not None else None
    given = _given(resource, vllm, max_tokens)
    if prometheus is None:
        assert metrics is not None
        recorded = read_recorded(metrics)
    else:
        told = _told(prometheus, resource)
        server = replace(
            told,
            pods=_pods(pods or told.pods),
            namespace=namespace or told.namespace,
            labels={**told.labels, **dict(map(_label, label or []))},
            pod_label=pod_label or told.pod_label,
            token=prometheus_token,
            authorities=prometheus_ca,
        )
        recorded = read_server(server, _duration(since))
    telemetry, situation = _observe(recorded, given, schedule, adaptive, experts)
    policy = Policy()
    decision = decide(telemetry, situation, policy, seed)
    for sentence, count in recorded.unreadable.most_common(3):
        err.print(f"[yellow]note:[/] {count} scrapes were left out: {plain(sentence)}")
    if output is Output.JSON:
        typer.echo(json.dumps(to_json(decision), indent=2))
    else:
        out.print(plain(explain(decision, telemetry, situation, policy)), end="")
    raise typer.Exit(1 if decision.action is Action.INSUFFICIENT else 0)


def _told(address: str, resource: SpeculativeDeployment | None) -> Server:
    """What the manifest, with its spec.metrics.source.prometheus, tells of what the server has."""
    if resource is None:
        return Server(address, pods="")
    named = Server(address, f"{re.escape(resource.metadata.name)}-.*", resource.metadata.namespace)
    if (source := resource.spec.metrics.source) is None:
        return named
    of = source.prometheus
    return replace(named, labels=of.match_labels, pod_label=of.pod_label, namespace_label=of.namespace_label)


def _pods(text: str) -> str:
    if not text:
        raise CommandError("--prometheus needs to be told whose metrics: give --pods 'chat-.*' or -f MANIFEST.")
    try:
        re.compile(text)
    except re.error as error:
        raise CommandError(f"--pods is {text}, which is no regular expression ({error}): write it like 'chat-.*'.") from None
    return text


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
        raise CommandError(f"--label is {text}: write it as NAME=VALUE, such as job=vllm.")
    return name, value


def _duration(text: str) -> timedelta:
    try:
        return duration.parse(text)
    except ValueError as error:
        raise CommandError(f"--since: {error}.") from None


def _given(resource: SpeculativeDeployment | None, vllm: str | None, most: int | None) -> _Given:
    if resource is None:
        try:
            version = releases.Version.parse(vllm) if vllm else releases.NEWEST_KNOWN
        except releases.VersionError as error:
            raise CommandError(f"--vllm: {error}") from None
        return _Given(version, arguments.Arguments(), "eagle3", most or 7)
    spec = resource.spec
    engine = releases.resolve(spec.engine.image, vllm or spec.engine.version)
    if isinstance(engine, releases.NoVersion):
        raise CommandError(engine.sentence)
    if refused := command_line.refused(spec.engine.args):
        raise CommandError(" ".join(refused))
    tuning = spec.speculation.tuning
    found = _Given(
        engine.version,
        arguments.read(spec.engine.args),
        spec.drafter.method if spec.drafter is not None else "eagle3",
        most or max(tuning.max_tokens, spec.speculation.tokens),
    )
    if (slo := tuning.slo) is None:
        return found
    return _Given(
        found.version,
        found.arguments,
        found.method,
        found.most,
        slo.time_per_output_token,
        slo.time_to_first_token,
        slo.percentile,
    )


def _observe(
    recorded: Recorded, given: _Given, schedule: str | None, adaptive: bool, experts: bool | None
) -> tuple[Telemetry, Situation]:
    from aerie.tuning.decision.candidates import Engine
    from aerie.tuning.decision.policy import History, Objectives
    from aerie.tuning.decision.types import Situation
    from aerie.tuning.models.change_points import DAY, WEEK
    from aerie.tuning.telemetry import Reading, Telemetry

    telemetry = Telemetry(WEEK + DAY, api_servers=given.arguments.api_servers)
    last: dict[str, tuple[float, Sample]] = {}
    running: dict[str, Setting] = {}
    speculated: float | None = None
    newest = 0.0
    for time, replica, sample in recorded.scrapes:
        newest = time
        setting = running[replica] = _setting(sample, schedule, adaptive)
        before = last.get(replica)
        if before is not None and time - before[0] < SHORTEST_WINDOW:
            continue
        last[replica] = (time, sample)
        if before is None:
            continue
        if time - before[0] > LONGEST_WINDOW:
            telemetry.left_out[f"more than {LONGEST_WINDOW / 60:.0f} minutes lay between two scrapes."] += 1
            continue
        window = between(before[1], sample)
        if isinstance(window, Reset):
            telemetry.left_out["the engine was restarted between two scrapes."] += 1
            continue
        if window.speculation is not None and window.speculation.drafts > 0:
            speculated = time
        age = before[0] - sample.started if sample.started is not None else float("inf")
        telemetry.add(Reading(replica, time, setting, window, age))
    alive = [replica for replica, (time, _) in last.items() if time > newest - LONGEST_WINDOW]
    current = Counter(running[replica] for replica in alive).most_common(1)[0][0]
    situation = Situation(
        engine=Engine(given.version, given.arguments, given.method, experts=experts),
        current=current,
        most=max(given.most, max_tokens(current)),
        replicas=len(alive),
        now=newest,
        objectives=Objectives(_seconds(given.time_per_output_token), _seconds(given.time_to_first_token), given.percentile),
        history=History(speculated=speculated),
        waiting=sum(last[replica][1].gauges.waiting or 0.0 for replica in alive),
    )
    return telemetry, situation


def _setting(sample: Sample, schedule: str | None, adaptive: bool) -> Setting:
    """What the engine runs: the positions that it counts are its K."""
    if sample.counters.speculation is None:
        return Off()
    tokens = len(sample.counters.speculation.accepted_per_position)
    if schedule is not None:
        return _schedule(schedule, tokens)
    return Adaptive(tokens) if adaptive else Static(tokens)


def _schedule(text: str, most: int) -> Schedule:
    parts = [re.fullmatch(r"(\d+)-(\d+):(\d+)", part.strip()) for part in text.split(",")]
    try:
        tiers = tuple(Tier(int(match[1]), int(match[2]), int(match[3])) for match in parts if match)
        if len(tiers) != len(parts):
            raise SettingError(f"'{text}' is no schedule.")
        return Schedule(tiers, most)
    except SettingError as error:
        raise CommandError(f"--schedule: {error} Write it like 1-8:5,9-64:3, as the engines have it.") from None


def _seconds(time: timedelta | None) -> float | None:
    return time.total_seconds() if time is not None else None
