"""`aerie preflight`: every check on one resource, or on a workload that runs vLLM, from a laptop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from aerie.api import KIND, ResourceError
from aerie.api.rollout import PreflightSpec
from aerie.boundary import EXIT_FAILED
from aerie.checkpoints import read_repository
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import (
    CATALOG_HELP,
    display_file_name,
    parse_deployment,
    parse_memory_bytes,
    read_catalog,
    read_objects,
)
from aerie.cli.inputs.model_location import parse_model_location
from aerie.cli.inputs.preflight_input import PreflightOverrides, build_input_from_deployment, build_input_from_models
from aerie.cli.inputs.workload import build_input_from_workload, find_workloads
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.preflight import Finding, PreflightInput, PreflightReport, Severity, run_preflight
from aerie.terminal import print_error, sanitize_text


class OutputFormat(Enum):
    """How to print a report."""

    TEXT = "text"
    JSON = "json"


_SEVERITY_COLOURS = {
    Severity.REFUSE: "bold red",
    Severity.WARN: "yellow",
    Severity.NOTE: "cyan",
    Severity.PASS: "green",
    Severity.SKIP: "dim",
}


_MODEL_LOCATION_HELP = "The {}, instead of the manifest's: a folder, or a repository as OWNER/NAME@COMMIT."


def preflight(
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", help="Manifest of a SpeculativeDeployment, or of a workload that runs vLLM; -: standard input."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the one to check, where the file holds several.")] = None,
    target: Annotated[str | None, typer.Option(help=_MODEL_LOCATION_HELP.format("target"))] = None,
    drafter: Annotated[str | None, typer.Option(help=_MODEL_LOCATION_HELP.format("drafter"))] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB.")] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM version, instead of the image's.")] = None,
    catalog_file: Annotated[str | None, typer.Option("--catalog", help=CATALOG_HELP)] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="How to print the report.")] = OutputFormat.TEXT,
) -> None:
    """Check target, drafter and engine of a SpeculativeDeployment, or of a Deployment that runs vLLM, before it is applied.

    Reads configs and weight headers only, from folders or the Hugging Face Hub (HF_TOKEN, HF_ENDPOINT). Exit status: 0 nothing
    is refused but what spec.rollout.preflight lets pass, 1 something is, 2 it could not be checked, such as a manifest that the
    API server would refuse.
    """
    given = PreflightOverrides(
        None if target is None else parse_model_location(target, "--target"),
        None if drafter is None else parse_model_location(drafter, "--drafter"),
        parse_memory_bytes(gpu_memory) if gpu_memory else None,
        vllm,
    )
    remarks: tuple[str, ...] = ()
    allowance = PreflightSpec()
    if file is not None:
        try:
            subject, remarks, allowance = _read_input_file(file, name, given, catalog_file)
        except ResourceError as error:
            _print_manifest_errors(error, output)
            raise typer.Exit(EXIT_FAILED) from None
    elif name is not None:
        raise CommandError("--name chooses from a file, and there is none: give it with -f.")
    else:
        subject = build_input_from_models(given, _read_hub_checkpoint)
    report = run_preflight(subject)
    refused = list(dict.fromkeys(finding.id for finding in report.with_severity(Severity.REFUSE)))
    allowed = report.ok or allowance.allows(refused)
    for remark in remarks:
        err.print(f"[yellow]note:[/] {sanitize_text(remark)}")
    if output is OutputFormat.JSON:
        typer.echo(json.dumps({**_input_to_json(subject), "allowed": allowed, **report.to_json()}, indent=2))
    else:
        _print_report(subject, report)
    if allowance.mode == "Off":
        err.print("[yellow]note:[/] spec.rollout.preflight.mode is Off: the operator does not run this.")
    elif not report.ok and allowed:
        how = "mode is Warn" if allowance.mode == "Warn" else f"accept has {', '.join(refused)}"
        err.print(f"[yellow]note:[/] spec.rollout.preflight.{sanitize_text(how)}: the operator goes on all the same.")
    raise typer.Exit(0 if allowed else 1)


def _read_input_file(
    file: str, name: str | None, overrides: PreflightOverrides, catalog_file: str | None
) -> tuple[PreflightInput, tuple[str, ...], PreflightSpec]:
    """What the resource of the file runs, else its one workload, with what is said about it and what is let pass.

    Raises CommandError, CheckpointError, ArgumentError; ResourceError: the API server would refuse the resource.
    """
    objects = [found for found in read_objects(file) if name is None or _object_name(found) == name]
    resources = [found for found in objects if found.get("kind") == KIND]
    if len(resources) == 1:
        deployment = parse_deployment(resources[0])
        return *build_input_from_deployment(
            deployment, overrides, read_catalog(catalog_file), _read_hub_checkpoint
        ), deployment.spec.rollout.preflight
    workloads = [] if resources else find_workloads(objects)
    if len(workloads) == 1:
        return *build_input_from_workload(workloads[0], overrides, _read_hub_checkpoint), PreflightSpec()
    several = [f"{KIND}/{_object_name(found)}" for found in resources] or [found.name for found in workloads]
    if several:
        listed = ", ".join(several[:10]) + (f" and {len(several) - 10} more" if len(several) > 10 else "")
        differ = len({label.partition(",")[0] for label in several}) > 1
        way_out = "choose one with --name" if differ and name is None else "give a file with the one to check"
        raise CommandError(f"{display_file_name(file)} holds {listed}, and one is checked at a time: {way_out}.")
    called = "" if name is None else f" called {name}"
    raise CommandError(
        f"{display_file_name(file)} must hold a {KIND}, or a workload with a container that runs `vllm serve`, and holds none{called}: "
        "give a file with the one to check."
    )


def _object_name(document: Mapping[str, Any]) -> object:
    metadata = document.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _print_manifest_errors(error: ResourceError, output: OutputFormat) -> None:
    """The API server's answer to a manifest, which preflight then has nothing to add to."""
    if output is OutputFormat.JSON:
        typer.echo(json.dumps({"allowed": False, "ok": False, "refused": str(error).splitlines()}, indent=2))
    print_error(error)


def _read_hub_checkpoint(repository: str, revision: str | None) -> Checkpoint:
    err.print(f"[dim]reading headers of {sanitize_text(repository)}[/]")
    found = read_repository(repository, revision)
    commit = found.name.rpartition("@")[2]
    if commit != revision:
        at = f"{repository} at {revision or 'main'}"
        moves = "a branch can move, and a resource names the commit"
        err.print(f"[yellow]note:[/] {sanitize_text(at)} is commit {sanitize_text(commit)} now; {moves}.")
    return found


def _input_to_json(subject: PreflightInput) -> dict[str, str | None]:
    return {
        "target": subject.target.name,
        "drafter": subject.drafter.name if subject.drafter else None,
        "vllm": str(subject.version),
    }


def _print_report(subject: PreflightInput, report: PreflightReport) -> None:
    drafter = f"drafter  {subject.drafter.name}\n" if subject.drafter else ""
    out.print(sanitize_text(f"target   {subject.target.name}\n{drafter}vLLM     {subject.version}\n"))
    for finding in report.findings:
        if finding.severity is not Severity.SKIP:
            _print_finding(finding)
    skipped = [finding.id for finding in report.with_severity(Severity.SKIP)]
    if skipped:
        out.print(f"[dim]{Severity.SKIP.glyph} does not apply: {', '.join(skipped)}[/]")
    out.print(f"\n[bold {'green' if report.ok else 'red'}]{sanitize_text(report.summary)}[/]")


def _print_finding(finding: Finding) -> None:
    colour = _SEVERITY_COLOURS[finding.severity]
    out.print(
        f"[{colour}]{finding.severity.glyph} {finding.id:<3}[/] {sanitize_text(finding.title)}: {sanitize_text(finding.evidence)}."
    )
    if finding.fix:
        out.print(f"      [{colour}]->[/] {sanitize_text(finding.fix[:1].upper() + finding.fix[1:])}.")
