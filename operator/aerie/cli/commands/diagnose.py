"""`aerie diagnose`: one engine in numbers and words. Exit status 1: a finding needs action.

A URL needs no cluster. A pod is read by kubectl: its command line (`get pods`), and its engine's answers (`get pods/proxy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import CommandError, out
from aerie.cli.diagnosis.acceptance import measure_acceptance
from aerie.cli.diagnosis.engine_reader import HttpEngineReader, PodEngineReader
from aerie.cli.diagnosis.findings import Severity, find_problems
from aerie.cli.diagnosis.observation import EngineObservation, observe_engine
from aerie.cli.diagnosis.screen import build_document, render_diagnosis
from aerie.cli.fleet.kubectl import Kubectl
from aerie.cli.fleet.options import with_kubectl
from aerie.cli.fleet.output import Output, OutputOption, write_document
from aerie.cli.inputs.workload import find_workloads
from aerie.engine.arguments import ArgumentError
from aerie.engine.serve_command import parse_serve_command
from aerie.manifests import naming

_POD_PREFIXES = ("pod/", "pods/", "po/")
_DEFAULT_PORT = 8000
_TLS_FLAG, _PORT_FLAG = "--ssl-certfile", "--port"


@with_kubectl
def diagnose(
    kubectl: Kubectl,
    engine: Annotated[str, typer.Argument(metavar="URL|pod/NAME", help="Address of the engine, such as http://127.0.0.1:8000.")],
    duration: Annotated[float, typer.Option("--duration", help="Seconds between the first and the last read.", min=1)] = 30.0,
    since_start: Annotated[
        bool, typer.Option("--since-start", help="Read it once: all traffic since the engine's start.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the API key, for a URL that requests one.", show_default=False)
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="CA certificates of an https:// address, PEM.", show_default=False)
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Diagnose one engine: whether its drafter is useful, which K fits, what it lacks."""
    if not math.isfinite(duration):
        raise CommandError(f"--duration is {duration}: set a number of seconds.")
    seconds = 0.0 if since_start else duration
    if engine.startswith(_POD_PREFIXES):
        pod = read_pod(kubectl, engine.partition("/")[2])
        reader = PodEngineReader(kubectl, pod.namespace, pod.name, pod.port, has_tls=pod.has_tls)
        observation = observe_engine(reader, seconds, pod.speculative_config)
    else:
        with HttpEngineReader(engine, key_file, ca_file) as http_reader:
            observation = observe_engine(http_reader, seconds)
    if _report(observation, output):
        raise typer.Exit(EXIT_REJECTED)


def _report(observation: EngineObservation, output: Output) -> bool:
    """Print the diagnosis, and return whether it needs action."""
    acceptance = measure_acceptance(observation.counters, observation.setting, observation.request_count)
    findings = find_problems(observation, acceptance)
    if output in (Output.JSON, Output.YAML):
        content = build_document(observation, acceptance, findings)
        write_document(output, "EngineDiagnosis", content)
    else:
        out.print(render_diagnosis(observation, acceptance, findings), soft_wrap=False)
    return any(finding.severity is Severity.ACTION for finding in findings)


@dataclass(frozen=True)
class EnginePod:
    """Where the engine of a pod answers, and how it drafts."""

    namespace: str
    name: str
    port: int
    has_tls: bool
    speculative_config: Mapping[str, Any] | None
    """None: the command line is not readable."""


def read_pod(kubectl: Kubectl, name: str) -> EnginePod:
    """Return a pod's engine. Raises CommandError: there is no such pod."""
    try:
        document = kubectl.find("pods", name)
    except CommandError as error:
        if "forbidden" not in str(error).lower():
            raise
        raise CommandError(f"{str(error).split(': ask for')[0]}: ask for get on pods, as the ClusterRole view has it.") from None
    if document is None:
        raise CommandError(f"there is no pod {name}: set its namespace with -n, or list them with: kubectl get pods -A.")
    namespace = str(document["metadata"]["namespace"])
    try:
        arguments = _find_serve_arguments(document)
        config = None if arguments is None else parse_serve_command(arguments).speculative_config
    except (CommandError, ArgumentError):
        return EnginePod(namespace, name, _DEFAULT_PORT, False, None)
    arguments = arguments or []
    has_tls = any(argument.partition("=")[0] == _TLS_FLAG for argument in arguments)
    return EnginePod(namespace, name, _find_port(arguments), has_tls, config)


def _find_serve_arguments(document: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the arguments of `vllm serve` of a pod; None where they are not visible. Raises CommandError."""
    if naming.NAME_LABEL in (document["metadata"].get("labels") or {}):  # a pod of Aerie, whatever its image's name
        containers = document["spec"]["containers"]
        return next((item.get("args") for item in containers if item["name"] == naming.ENGINE_CONTAINER), None)
    workloads = find_workloads([{"kind": "Pod", **document}])
    return workloads[0].serve_arguments if workloads else None


def _find_port(arguments: Sequence[str]) -> int:
    """Return the engine's port: of its command line, else vLLM's default."""
    for index, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        text = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        if flag == _PORT_FLAG and text.isdecimal():
            return int(text)
    return _DEFAULT_PORT
