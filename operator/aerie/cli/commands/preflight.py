"""`aerie preflight`: every check on one resource, or on a workload that runs vLLM, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from aerie.api import KIND, ResourceError
from aerie.api.rollout import PreflightSpec
from aerie.boundary import EXIT_FAILED
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import (
    CATALOG_HELP,
    display_file_name,
    parse_deployment,
    parse_memory_bytes,
    read_catalog,
    read_objects,
)
from aerie.cli.inputs.hub import read_hub_checkpoint
from aerie.cli.inputs.model_location import parse_model_location
from aerie.cli.inputs.preflight_input import PreflightOverrides, build_input_from_deployment, build_input_from_models
from aerie.cli.inputs.workload import build_input_from_workload, find_workloads
from aerie.engine.preflight import Finding, PreflightInput, PreflightReport, Severity, run_preflight
from aerie.terminal import print_error, sanitize_text


class OutputFormat(Enum):
    """Output format of a report."""

    TEXT = "text"
    JSON = "json"


_SEVERITY_COLOURS = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
    Severity.PASS: "green",
    Severity.SKIP: "dim",
}


_MODEL_LOCATION_HELP = "{} instead of the manifest's: a folder, or a repository as OWNER/NAME@COMMIT."


def preflight(
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", help="Manifest of a SpeculativeDeployment, or of a workload that runs vLLM; -: standard input."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the object to check, if the file contains several.")] = None,
    target: Annotated[str | None, typer.Option(help=_MODEL_LOCATION_HELP.format("Target"))] = None,
    drafter: Annotated[str | None, typer.Option(help=_MODEL_LOCATION_HELP.format("Drafter"))] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB.")] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM version instead of the image's.")] = None,
    catalog_file: Annotated[str | None, typer.Option("--catalog", help=CATALOG_HELP)] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List passed and inapplicable checks too.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
) -> None:
    """Check target, drafter and engine of a SpeculativeDeployment, or of a Deployment that runs vLLM, before it is applied.

    Reads only configs and weight headers, from folders or the Hugging Face Hub (HF_TOKEN, HF_ENDPOINT). Exit status: 0 without
    errors, or with errors that spec.rollout.preflight overrides; 1 with errors; 2 if preflight could not run, for example because
    the API server would reject the manifest.
    """
    overrides = PreflightOverrides(
        None if target is None else parse_model_location(target, "--target"),
        None if drafter is None else parse_model_location(drafter, "--drafter"),
        parse_memory_bytes(gpu_memory) if gpu_memory else None,
        vllm,
    )
    notes: tuple[str, ...] = ()
    preflight_spec = PreflightSpec()
    if file is not None:
        try:
            preflight_input, notes, preflight_spec = _read_input_file(file, name, overrides, catalog_file)
        except ResourceError as error:
            _print_manifest_errors(error, output)
            raise typer.Exit(EXIT_FAILED) from None
    elif name is not None:
        raise CommandError("--name selects an object of a file: set the file with -f.")
    else:
        preflight_input = build_input_from_models(overrides, read_hub_checkpoint)
    report = run_preflight(preflight_input)
    failed_check_ids = list(dict.fromkeys(finding.id for finding in report.with_severity(Severity.ERROR)))
    is_allowed = report.passed or preflight_spec.allows(failed_check_ids)
    for note in notes:
        err.print(f"[yellow]note:[/] {sanitize_text(note)}")
    if output is OutputFormat.JSON:
        typer.echo(json.dumps({**_input_to_json(preflight_input), "allowed": is_allowed, **report.to_json()}, indent=2))
    else:
        _print_report(preflight_input, report, lists_all=verbose)
    if preflight_spec.mode == "Off":
        err.print("[yellow]note:[/] spec.rollout.preflight.mode is Off: the operator does not run preflight.")
    elif not report.passed and is_allowed:
        cause = "mode is Warn" if preflight_spec.mode == "Warn" else f"acceptedChecks contains {', '.join(failed_check_ids)}"
        err.print(
            f"[yellow]note:[/] spec.rollout.preflight.{sanitize_text(cause)}: the operator continues in spite of the errors."
        )
    raise typer.Exit(0 if is_allowed else 1)


def _read_input_file(
    file: str, name: str | None, overrides: PreflightOverrides, catalog_file: str | None
) -> tuple[PreflightInput, tuple[str, ...], PreflightSpec]:
    """Return the input of the file's resource, else of its one workload, with notes for the user and the resource's
    PreflightSpec.

    Raises CommandError, CheckpointError, ArgumentError; ResourceError: the API server would reject the resource.
    """
    objects = [document for document in read_objects(file) if name is None or _object_name(document) == name]
    resources = [document for document in objects if document.get("kind") == KIND]
    if len(resources) == 1:
        deployment = parse_deployment(resources[0])
        return *build_input_from_deployment(
            deployment, overrides, read_catalog(catalog_file), read_hub_checkpoint
        ), deployment.spec.rollout.preflight
    workloads = [] if resources else find_workloads(objects)
    if len(workloads) == 1:
        return *build_input_from_workload(workloads[0], overrides, read_hub_checkpoint), PreflightSpec()
    candidates = [f"{KIND}/{_object_name(document)}" for document in resources] or [workload.name for workload in workloads]
    if candidates:
        candidate_list = ", ".join(candidates[:10]) + (f" and {len(candidates) - 10} more" if len(candidates) > 10 else "")
        have_different_names = len({label.partition(",")[0] for label in candidates}) > 1
        fix = "select one with --name" if have_different_names and name is None else "set a file with one of them"
        raise CommandError(f"{display_file_name(file)} contains {candidate_list}, but preflight checks one at a time: {fix}.")
    name_suffix = "" if name is None else f" with the name {name}"
    raise CommandError(
        f"{display_file_name(file)} must contain a {KIND}, or a workload with a container that runs `vllm serve`, "
        f"but contains none{name_suffix}: set a file with one."
    )


def _object_name(document: Mapping[str, Any]) -> object:
    metadata = document.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _print_manifest_errors(error: ResourceError, output: OutputFormat) -> None:
    """Print the errors of a manifest that the API server would reject; preflight then runs no checks."""
    if output is OutputFormat.JSON:
        typer.echo(json.dumps({"allowed": False, "passed": False, "errors": str(error).splitlines()}, indent=2))
    print_error(error)


def _input_to_json(preflight_input: PreflightInput) -> dict[str, str | None]:
    return {
        "target": preflight_input.target.name,
        "drafter": preflight_input.drafter.name if preflight_input.drafter else None,
        "vllm": str(preflight_input.version),
    }


def _print_report(preflight_input: PreflightInput, report: PreflightReport, *, lists_all: bool) -> None:
    """Print the verdict, the errors and warnings, then the notes. `lists_all`: then the other checks too."""
    drafter_line = f"drafter  {preflight_input.drafter.name}\n" if preflight_input.drafter else ""
    out.print(sanitize_text(f"target   {preflight_input.target.name}\n{drafter_line}vLLM     {preflight_input.version}\n"))
    out.print(f"[bold {'green' if report.passed else 'red'}]{sanitize_text(report.summary)}[/]")
    notes = list(report.with_severity(Severity.INFO))
    passed, skipped = (list(report.with_severity(severity)) for severity in (Severity.PASS, Severity.SKIP))
    _print_group("", [*report.with_severity(Severity.ERROR), *report.with_severity(Severity.WARNING)])
    _print_group("Notes", [finding for finding in notes if not finding.is_general])
    _print_group("Notes for every deployment with speculation", [finding for finding in notes if finding.is_general])
    if lists_all:
        _print_group("Passed", passed)
        _print_group("Not applicable", skipped)
    else:
        counts = [f"{len(passed)} passed"] + ([f"{len(skipped)} not applicable"] if skipped else [])
        out.print(f"\n[dim]Not shown: {', '.join(counts)} (--verbose).[/]")


def _print_group(heading: str, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    out.print(f"\n[bold]{heading}[/]" if heading else "")
    for finding in findings:
        _print_finding(finding)


def _print_finding(finding: Finding) -> None:
    colour = _SEVERITY_COLOURS[finding.severity]
    label = f"[{colour}]{finding.severity.glyph} {finding.id:<3}[/]"
    out.print(f"{label} {sanitize_text(finding.title)}: {sanitize_text(finding.evidence)}.")
    if finding.fix:
        out.print(f"      [{colour}]->[/] {sanitize_text(finding.fix[:1].upper() + finding.fix[1:])}.")
