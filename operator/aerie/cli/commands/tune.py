"""`aerie tune`: the tuner on recorded metrics, without the operator."""

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
from aerie.cli.commands.preflight import OutputFormat
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import read_deployment
from aerie.cli.inputs.prometheus import PrometheusQueryConfig, read_prometheus
from aerie.cli.inputs.recorded import ScrapeRecording, read_recording
from aerie.engine import arguments, command_line, releases
from aerie.engine.metrics.sample import CounterReset, Counters, Sample, diff_samples
from aerie.engine.speculation import (
    Adaptive,
    Off,
    Schedule,
    ScheduleTier,
    SpeculationSetting,
    SpeculationSettingError,
    Static,
    max_speculative_tokens,
)
from aerie.terminal import sanitize_text

if TYPE_CHECKING:  # imports numpy: only the tuning commands pay for that
    from aerie.tuning.decision.types import TuningContext
    from aerie.tuning.telemetry import TuningTelemetry

MIN_SCRAPE_WINDOW_SECONDS = 10.0
MAX_SCRAPE_WINDOW_SECONDS = 300.0
"""Bounds of the seconds between two scrapes that make one window."""

_PROMETHEUS_HELP_PANEL = "Metrics from a Prometheus server"


@dataclass(frozen=True)
class _EngineContext:
    """Facts about the engine that the metrics do not contain."""

    version: releases.Version
    arguments: arguments.EngineArguments
    method: str
    max_speculative_tokens: int
    time_per_output_token: timedelta | None = None
    time_to_first_token: timedelta | None = None
    percentile: int = 95


def tune(
    metrics: Annotated[
        Path | None, typer.Option(help="File with recorded metrics: JSON lines with scrapes, or a response of query_range.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="Manifest of the recorded SpeculativeDeployment; -: standard input."),
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM version instead of the image's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=15, help="Maximum number of draft tokens to consider.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of the recorded engines, such as 1-8:5,9-64:3.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="The recorded engines used adaptive verification.")] = False,
    experts: Annotated[bool | None, typer.Option("--experts/--dense", help="Whether the target is a mixture of experts.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
    seed: Annotated[int, typer.Option(help="Random seed: equal metrics and seed give equal results.")] = 1,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of the server, such as http://localhost:9090.", rich_help_panel=_PROMETHEUS_HELP_PANEL)
    ] = None,
    pods: Annotated[
        str | None,
        typer.Option(
            help="Regular expression for pod names. Default: from the manifest.", rich_help_panel=_PROMETHEUS_HELP_PANEL
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Namespace of the pods. Default: from the manifest, else any.", rich_help_panel=_PROMETHEUS_HELP_PANEL),
    ] = None,
    since: Annotated[str, typer.Option(help="Period before now, up to 24h.", rich_help_panel=_PROMETHEUS_HELP_PANEL)] = "24h",
    label: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: additional label of the series; repeatable.", rich_help_panel=_PROMETHEUS_HELP_PANEL),
    ] = None,
    pod_label: Annotated[
        str | None,
        typer.Option(help="Label with the name of the pod. Default: pod.", rich_help_panel=_PROMETHEUS_HELP_PANEL),
    ] = None,
    prometheus_token: Annotated[
        Path | None, typer.Option(help="File with a bearer token for the server.", rich_help_panel=_PROMETHEUS_HELP_PANEL)
    ] = None,
    prometheus_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file with CA certificates for the server.", rich_help_panel=_PROMETHEUS_HELP_PANEL),
    ] = None,
) -> None:
    """Recommend num_speculative_tokens with the expected gain, from metrics of running engines.

    The metrics come from a file (--metrics) or a Prometheus server (--prometheus), and contain the current fixed K. Exit status:
    0 with a recommendation, 1 if the metrics are insufficient, 2 after an error.
    """
    from aerie.tuning.decision.explain import decision_to_json, explain_decision
    from aerie.tuning.decision.policy import TuningPolicy
    from aerie.tuning.decision.recommend import decide_setting
    from aerie.tuning.decision.types import TuningAction

    if (metrics is None) == (prometheus is None):
        raise CommandError("exactly one source of metrics is needed: set --metrics FILE or --prometheus URL.")
    resource = read_deployment(file) if file is not None else None
    engine_context = _resolve_engine_context(resource, vllm, max_tokens)
    if prometheus is None:
        assert metrics is not None
        recording = read_recording(metrics)
    else:
        defaults = _query_config_from_manifest(prometheus, resource)
        query_config = replace(
            defaults,
            pod_pattern=_check_pod_pattern(pods or defaults.pod_pattern),
            namespace=namespace or defaults.namespace,
            labels={**defaults.labels, **dict(map(_parse_label, label or []))},
            pod_label=pod_label or defaults.pod_label,
            token_file=prometheus_token,
            ca_file=prometheus_ca,
        )
        recording = read_prometheus(query_config, _parse_since(since))
    telemetry, tuning_context = _build_tuning_inputs(recording, engine_context, schedule, adaptive, experts)
    policy = TuningPolicy()
    decision = decide_setting(telemetry, tuning_context, policy, seed)
    for reason, count in recording.skip_counts.most_common(3):
        err.print(f"[yellow]note:[/] {count} scrapes were skipped: {sanitize_text(reason)}")
    if output is OutputFormat.JSON:
        typer.echo(json.dumps(decision_to_json(decision), indent=2))
    else:
        out.print(sanitize_text(explain_decision(decision, telemetry, tuning_context, policy)), end="")
    raise typer.Exit(1 if decision.action is TuningAction.INSUFFICIENT else 0)


def _query_config_from_manifest(address: str, resource: SpeculativeDeployment | None) -> PrometheusQueryConfig:
    """Return the query of the manifest's pods, with the labels of its spec.metrics.source.prometheus."""
    if resource is None:
        return PrometheusQueryConfig(address, pod_pattern="")
    query_config = PrometheusQueryConfig(address, f"{re.escape(resource.metadata.name)}-.*", resource.metadata.namespace)
    if (source := resource.spec.metrics.source) is None:
        return query_config
    prometheus = source.prometheus
    return replace(
        query_config, labels=prometheus.match_labels, pod_label=prometheus.pod_label, namespace_label=prometheus.namespace_label
    )


def _check_pod_pattern(text: str) -> str:
    if not text:
        raise CommandError("--prometheus needs a selection of pods: set --pods 'chat-.*' or -f MANIFEST.")
    try:
        re.compile(text)
    except re.error as error:
        raise CommandError(f"--pods is {text}, which is not a regular expression ({error}): use the form 'chat-.*'.") from None
    return text


def _parse_label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
        raise CommandError(f"--label is {text}: use the form NAME=VALUE, such as job=vllm.")
    return name, value


def _parse_since(text: str) -> timedelta:
    try:
        return duration.parse_duration(text)
    except ValueError as error:
        raise CommandError(f"--since: {error}.") from None


def _resolve_engine_context(
    resource: SpeculativeDeployment | None, vllm: str | None, max_speculative_tokens: int | None
) -> _EngineContext:
    if resource is None:
        try:
            version = releases.Version.parse(vllm) if vllm else releases.NEWEST_VERIFIED_VERSION
        except releases.VersionError as error:
            raise CommandError(f"--vllm: {error}") from None
        return _EngineContext(version, arguments.EngineArguments(), "eagle3", max_speculative_tokens or 7)
    spec = resource.spec
    engine = releases.resolve_engine_version(spec.engine.image, vllm or spec.engine.version)
    if isinstance(engine, releases.UnknownVersion):
        raise CommandError(engine.message)
    if invalid_arguments := command_line.validate_user_arguments(spec.engine.args):
        raise CommandError(" ".join(invalid_arguments))
    tuning = spec.speculation.tuning
    context = _EngineContext(
        engine.version,
        arguments.parse_arguments(spec.engine.args),
        spec.drafter.method if spec.drafter is not None else "eagle3",
        max_speculative_tokens or max(tuning.max_speculative_tokens, spec.speculation.num_speculative_tokens),
    )
    if (slo := tuning.slo) is None:
        return context
    return _EngineContext(
        context.version,
        context.arguments,
        context.method,
        context.max_speculative_tokens,
        slo.time_per_output_token,
        slo.time_to_first_token,
        slo.percentile,
    )


def _build_tuning_inputs(
    recording: ScrapeRecording, engine_context: _EngineContext, schedule: str | None, adaptive: bool, experts: bool | None
) -> tuple[TuningTelemetry, TuningContext]:
    from aerie.tuning.decision.candidates import EngineConfig
    from aerie.tuning.decision.policy import LatencyObjectives, TrialHistory
    from aerie.tuning.decision.types import TuningContext
    from aerie.tuning.models.change_points import DAY, WEEK
    from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry

    telemetry = TuningTelemetry(WEEK + DAY, api_servers=engine_context.arguments.api_server_count)
    last_scrapes: dict[str, tuple[float, Sample]] = {}
    settings: dict[str, SpeculationSetting] = {}
    last_speculation_time: float | None = None
    last_time = 0.0
    for time, replica, sample in recording.scrapes:
        last_time = time
        setting = settings[replica] = _infer_setting(sample, schedule, adaptive)
        previous = last_scrapes.get(replica)
        if previous is not None and time - previous[0] < MIN_SCRAPE_WINDOW_SECONDS:
            continue
        last_scrapes[replica] = (time, sample)
        if previous is None:
            continue
        window = _diff_scrapes(previous, (time, sample))
        if isinstance(window, str):
            telemetry.excluded_windows[window] += 1
            continue
        if window.speculation is not None and window.speculation.drafts > 0:
            last_speculation_time = time
        age = previous[0] - sample.process_start_time if sample.process_start_time is not None else float("inf")
        telemetry.add(ReplicaWindow(replica, time, setting, window, age))
    live_replicas = [replica for replica, (time, _) in last_scrapes.items() if time > last_time - MAX_SCRAPE_WINDOW_SECONDS]
    current_setting = Counter(settings[replica] for replica in live_replicas).most_common(1)[0][0]
    context = TuningContext(
        engine=EngineConfig(engine_context.version, engine_context.arguments, engine_context.method, is_moe=experts),
        current_setting=current_setting,
        max_speculative_tokens=max(engine_context.max_speculative_tokens, max_speculative_tokens(current_setting)),
        replicas=len(live_replicas),
        now=last_time,
        objectives=LatencyObjectives(
            _to_seconds(engine_context.time_per_output_token),
            _to_seconds(engine_context.time_to_first_token),
            engine_context.percentile,
        ),
        history=TrialHistory(last_drafted_at=last_speculation_time),
        queued_requests=sum(last_scrapes[replica][1].gauges.waiting_requests or 0.0 for replica in live_replicas),
    )
    return telemetry, context


def _diff_scrapes(previous: tuple[float, Sample], current: tuple[float, Sample]) -> Counters | str:
    """Return the window between two scrapes (time, sample) of a replica, or why it is excluded."""
    if current[0] - previous[0] > MAX_SCRAPE_WINDOW_SECONDS:
        return f"more than {MAX_SCRAPE_WINDOW_SECONDS / 60:.0f} minutes between two scrapes."
    window = diff_samples(previous[1], current[1])
    return "the engine restarted between two scrapes." if isinstance(window, CounterReset) else window


def _infer_setting(sample: Sample, schedule: str | None, adaptive: bool) -> SpeculationSetting:
    """Return the engine's setting: the number of positions that it counts is its K."""
    if sample.counters.speculation is None:
        return Off()
    tokens = len(sample.counters.speculation.accepted_per_position)
    if schedule is not None:
        return _parse_schedule(schedule, tokens)
    return Adaptive(tokens) if adaptive else Static(tokens)


def _parse_schedule(text: str, max_speculative_tokens: int) -> Schedule:
    parts = [re.fullmatch(r"(\d+)-(\d+):(\d+)", part.strip()) for part in text.split(",")]
    try:
        tiers = tuple(ScheduleTier(int(match[1]), int(match[2]), int(match[3])) for match in parts if match)
        if len(tiers) != len(parts):
            raise SpeculationSettingError(f"'{text}' is not a schedule.")
        return Schedule(tiers, max_speculative_tokens)
    except SpeculationSettingError as error:
        raise CommandError(f"--schedule: {error} Use the form 1-8:5,9-64:3, with the values of the engines.") from None


def _to_seconds(time: timedelta | None) -> float | None:
    return time.total_seconds() if time is not None else None
