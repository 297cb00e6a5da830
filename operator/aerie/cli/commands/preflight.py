"""`aerie preflight`: every check on one resource, or on a workload that runs vLLM, from a laptop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from aerie.api import KIND, ResourceError
from aerie.api.rollout import Preflight
from aerie.boundary import FAILED
from aerie.checkpoints import read_repository
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import CATALOG, parse_deployment, read_catalog, read_memory, read_objects, shown
from aerie.cli.inputs.model_location import parse_place
from aerie.cli.inputs.preflight_input import Given, of_deployment, of_models
from aerie.cli.inputs.workload import find_workloads, of_workload
from aerie.engine.models.checkpoint import Checkpoint
from aerie.engine.preflight import Finding, Report, Severity, Subject, run
from aerie.terminal import plain, refuse


class Output(Enum):
    """How to print a report."""

    TEXT = "text"
    JSON = "json"


_COLOURS = {
    Severity.REFUSE: "bold red",
    Severity.WARN: "yellow",
    Severity.NOTE: "cyan",
    Severity.PASS: "green",
    Severity.SKIP: "dim",
}


_PLACE = "The {}, instead of the manifest's: a folder, or a repository as OWNER/NAME@COMMIT."


def preflight(
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", help="Manifest of a SpeculativeDeployment, or of a workload that runs vLLM; -: standard input."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the one to check, where the file holds several.")] = None,
    target: Annotated[str | None, typer.Option(help=_PLACE.format("target"))] = None,
    drafter: Annotated[str | None, typer.Option(help=_PLACE.format("drafter"))] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB.")] = None,
    vllm: Annotated[str | None, typer.Option(help="vLLM version, instead of the image's.")] = None,
    own: Annotated[str | None, typer.Option("--catalog", help=CATALOG)] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print the report.")] = Output.TEXT,
) -> None:
    """Check target, drafter and engine of a SpeculativeDeployment, or of a Deployment that runs vLLM, before it is applied.

    Reads configs and weight headers only, from folders or the Hugging Face Hub (HF_TOKEN, HF_ENDPOINT). Exit status: 0 nothing
    is refused but what spec.rollout.preflight lets pass, 1 something is, 2 it could not be checked, such as a manifest that the
    API server would refuse.
    """
    given = Given(
        None if target is None else parse_place(target, "--target"),
        None if drafter is None else parse_place(drafter, "--drafter"),
        read_memory(gpu_memory) if gpu_memory else None,
        vllm,
    )
    remarks: tuple[str, ...] = ()
    allowance = Preflight()
    if file is not None:
        try:
            subject, remarks, allowance = _of_file(file, name, given, own)
        except ResourceError as error:
            _refuse_manifest(error, output)
            raise typer.Exit(FAILED) from None
    elif name is not None:
        raise CommandError("--name chooses from a file, and there is none: give it with -f.")
    else:
        subject = of_models(given, _from_hub)
    report = run(subject)
    refused = list(dict.fromkeys(finding.id for finding in report.of(Severity.REFUSE)))
    allowed = report.ok or allowance.allows(refused)
    for remark in remarks:
        err.print(f"[yellow]note:[/] {plain(remark)}")
    if output is Output.JSON:
        typer.echo(json.dumps({**_subject(subject), "allowed": allowed, **report.to_json()}, indent=2))
    else:
        _print(subject, report)
    if allowance.mode == "Off":
        err.print("[yellow]note:[/] spec.rollout.preflight.mode is Off: the operator does not run this.")
    elif not report.ok and allowed:
        how = "mode is Warn" if allowance.mode == "Warn" else f"accept has {', '.join(refused)}"
        err.print(f"[yellow]note:[/] spec.rollout.preflight.{plain(how)}: the operator goes on all the same.")
    raise typer.Exit(0 if allowed else 1)


def _of_file(file: str, name: str | None, given: Given, own: str | None) -> tuple[Subject, tuple[str, ...], Preflight]:
    """What the resource of the file runs, else its one workload, with what is said about it and what is let pass.

    Raises CommandError, CheckpointError, ArgumentError; ResourceError: the API server would refuse the resource.
    """
    objects = [found for found in read_objects(file) if name is None or _name(found) == name]
    resources = [found for found in objects if found.get("kind") == KIND]
    if len(resources) == 1:
        deployment = parse_deployment(resources[0])
        return *of_deployment(deployment, given, read_catalog(own), _from_hub), deployment.spec.rollout.preflight
    workloads = [] if resources else find_workloads(objects)
    if len(workloads) == 1:
        return *of_workload(workloads[0], given, _from_hub), Preflight()
    several = [f"{KIND}/{_name(found)}" for found in resources] or [found.name for found in workloads]
    if several:
        listed = ", ".join(several[:10]) + (f" and {len(several) - 10} more" if len(several) > 10 else "")
        differ = len({label.partition(",")[0] for label in several}) > 1
        way_out = "choose one with --name" if differ and name is None else "give a file with the one to check"
        raise CommandError(f"{shown(file)} holds {listed}, and one is checked at a time: {way_out}.")
    called = "" if name is None else f" called {name}"
    raise CommandError(
        f"{shown(file)} must hold a {KIND}, or a workload with a container that runs `vllm serve`, and holds none{called}: "
        "give a file with the one to check."
    )


def _name(document: Mapping[str, Any]) -> object:
    metadata = document.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None


def _refuse_manifest(error: ResourceError, output: Output) -> None:
    """The API server's answer to a manifest, which preflight then has nothing to add to."""
    if output is Output.JSON:
        typer.echo(json.dumps({"allowed": False, "ok": False, "refused": str(error).splitlines()}, indent=2))
    refuse(error)


def _from_hub(repository: str, revision: str | None) -> Checkpoint:
    err.print(f"[dim]reading headers of {plain(repository)}[/]")
    found = read_repository(repository, revision)
    commit = found.name.rpartition("@")[2]
    if commit != revision:
        at = f"{repository} at {revision or 'main'}"
        moves = "a branch can move, and a resource names the commit"
        err.print(f"[yellow]note:[/] {plain(at)} is commit {plain(commit)} now; {moves}.")
    return found


def _subject(subject: Subject) -> dict[str, str | None]:
    return {
        "target": subject.target.name,
        "drafter": subject.drafter.name if subject.drafter else None,
        "vllm": str(subject.version),
    }


def _print(subject: Subject, report: Report) -> None:
    drafter = f"drafter  {subject.drafter.name}\n" if subject.drafter else ""
    out.print(plain(f"target   {subject.target.name}\n{drafter}vLLM     {subject.version}\n"))
    for finding in report.findings:
        if finding.severity is not Severity.SKIP:
            _print_finding(finding)
    skipped = [finding.id for finding in report.of(Severity.SKIP)]
    if skipped:
        out.print(f"[dim]{Severity.SKIP.glyph} does not apply: {', '.join(skipped)}[/]")
    out.print(f"\n[bold {'green' if report.ok else 'red'}]{plain(report.summary)}[/]")


def _print_finding(finding: Finding) -> None:
    colour = _COLOURS[finding.severity]
    out.print(f"[{colour}]{finding.severity.glyph} {finding.id:<3}[/] {plain(finding.title)}: {plain(finding.evidence)}.")
    if finding.way_out:
        out.print(f"      [{colour}]->[/] {plain(finding.way_out[:1].upper() + finding.way_out[1:])}.")
