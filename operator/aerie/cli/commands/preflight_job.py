"""`aerie preflight-job`: preflight as a Job of the operator runs it, with its result where Kubernetes reads it.

The result is the container's termination message, of which Kubernetes keeps 4 KiB. `passed` is true or false, or null where
the Hub could not be read, so that there is no result. `hubRejected` is true as well where the Hub has rejected the request, which
an immediate retry would not change. `inPlaceProblems` lists why the drafter cannot replace that of the running engines in place,
and `inPlaceRunning` is the revision of these engines; both are absent where nothing was compared. The exit status is 0, 1 or 2
accordingly, and 3 if the Hub has rejected the request. Files that cannot be read as a checkpoint are a result: an engine could
not read them either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.source import HuggingFaceSource
from aerie.checkpoints import HubError, HubRejectionError, read_repository
from aerie.cli.console import CommandError
from aerie.cli.inputs.files import read_deployment
from aerie.cli.inputs.preflight_input import PreflightOverrides, build_input_from_deployment, read_drafter
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import Checkpoint, CheckpointError
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.engine.preflight import PreflightInput, PreflightReport, Severity, run_preflight
from aerie.engine.preflight.in_place import find_cache_problem, find_in_place_problems
from aerie.manifests.pod.drafter_plugin import HUB_CACHE_VARIABLES
from aerie_vllm.worker_protocol import Problem

HUB_REJECTED_EXIT_STATUS = 3
"""Exit status of a Job whose request the Hub has rejected."""
_DEFECTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that unforeseen content of files may cause."""
_MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Bytes of a termination message that Kubernetes keeps."""


def preflight_job(
    file: Annotated[str, typer.Option(help="File with the resource.")],
    report: Annotated[Path, typer.Option(help="File for the result.")],
    target: Annotated[Path | None, typer.Option(help="Folder where the target's source is mounted.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder where the drafter's source is mounted.")] = None,
    running_file: Annotated[Path | None, typer.Option(help="File with the resource of the running engines.")] = None,
    running_drafter: Annotated[Path | None, typer.Option(help="Folder where their drafter's source is mounted.")] = None,
    running_revision: Annotated[str, typer.Option(help="Revision of the running engines.")] = "",
    promoted_drafter: Annotated[str, typer.Option(help="OWNER/NAME@COMMIT of the drafter that they were promoted to.")] = "",
) -> None:
    """Run preflight in a Job of the operator."""
    try:
        deployment = read_deployment(file)
        preflight_input, notes = build_input_from_deployment(
            deployment, PreflightOverrides(target, drafter), DrafterCatalog(()), read_repository
        )
        result = run_preflight(preflight_input)
        in_place = _compare_with_running_drafter(
            deployment, preflight_input, running_file, running_drafter, running_revision, promoted_drafter
        )
    except HubRejectionError as error:
        report.write_bytes(encode_termination_message({"passed": None, "hubRejected": True, "error": str(error)}))
        typer.echo(str(error))
        raise typer.Exit(HUB_REJECTED_EXIT_STATUS) from None
    except HubError as error:
        report.write_bytes(encode_termination_message({"passed": None, "error": str(error)}))
        raise
    except (CommandError, CheckpointError, ResourceError, ArgumentError) as error:
        report.write_bytes(encode_termination_message(_build_error_result(str(error))))
        typer.echo(str(error))
        raise typer.Exit(1) from None
    except _DEFECTS as error:
        # Unforeseen content of the files: after a crash, the Job would be retried for ever with the same outcome.
        message = f"these files caused a defect of Aerie ({type(error).__name__}: {str(error)[:200]}): report it."
        report.write_bytes(encode_termination_message(_build_error_result(message)))
        typer.echo(message)
        raise typer.Exit(1) from error
    report.write_bytes(encode_termination_message(build_preflight_result(result, notes) | in_place))
    for finding in result.findings:
        if finding.severity is not Severity.SKIP:
            typer.echo(finding.message)
    typer.echo(result.summary)
    raise typer.Exit(0 if result.passed else 1)


def build_preflight_result(report: PreflightReport, warnings: tuple[str, ...]) -> dict[str, object]:
    """Return the document that the operator reads."""
    return {
        "passed": report.passed,
        "summary": report.summary + ".",
        "failedChecks": list(dict.fromkeys(finding.id for finding in report.with_severity(Severity.ERROR))),
        "errors": [finding.message for finding in report.with_severity(Severity.ERROR)],
        "warnings": [*(finding.message for finding in report.with_severity(Severity.WARNING)), *warnings],
    }


def _compare_with_running_drafter(
    deployment: SpeculativeDeployment,
    preflight_input: PreflightInput,
    running_file: Path | None,
    folder: Path | None,
    revision: str,
    promoted: str,
) -> dict[str, object]:
    """Return the fields about a change in place. Empty where the running drafter cannot be read: the pods check the
    desired one again."""
    if running_file is None or preflight_input.drafter is None or preflight_input.method is None:
        return {}
    try:
        running_deployment = read_deployment(str(running_file))
        running = read_drafter(running_deployment, folder, read_repository)
        vocabulary_size = preflight_input.target_model.vocab_size
        problems = find_in_place_problems(running, preflight_input.drafter, preflight_input.method, vocabulary_size)
        problems += _check_cache(deployment, running_deployment, preflight_input, running, promoted)
    except (CommandError, CheckpointError, HubError, ResourceError, *_DEFECTS) as error:
        typer.echo(f"The drafter cannot be compared with that of the running engines: {error}")
        return {}
    return {"inPlaceRunning": revision, "inPlaceProblems": [problem["message"] for problem in problems]}


def _check_cache(
    deployment: SpeculativeDeployment,
    running_deployment: SpeculativeDeployment,
    preflight_input: PreflightInput,
    running: Checkpoint,
    promoted: str,
) -> tuple[Problem, ...]:
    """Return the problem if a drafter of the Hub does not fit into the pods' own cache, beside what they have fetched."""
    from kubernetes.utils.quantity import parse_quantity  # the package takes as long to import as the command to run

    engine = deployment.spec.engine
    limit = engine.cache.size_limit if engine.cache is not None and engine.cache.claim_name is None else None
    if limit is None or any(variable.name in HUB_CACHE_VARIABLES for variable in engine.env):
        return ()
    models = (
        (deployment.spec.drafter, preflight_input.drafter),
        (running_deployment.spec.drafter, running),
        (deployment.spec.model, preflight_input.target),
    )
    cached = [
        checkpoint
        for model, checkpoint in models
        if model is not None and checkpoint is not None and isinstance(model.source.variant, HuggingFaceSource)
    ]
    if promoted:
        repository, _, commit = promoted.rpartition("@")
        cached.append(read_repository(repository, commit))
    problem = find_cache_problem(int(parse_quantity(limit)), cached)  # type: ignore[no-untyped-call]
    return () if problem is None or preflight_input.drafter not in cached else (problem,)


def _build_error_result(message: str) -> dict[str, object]:
    """Return the document of a preflight that ended with an error instead of a report."""
    return {"passed": False, "summary": message, "failedChecks": [], "errors": [message], "warnings": []}


def encode_termination_message(document: dict[str, object]) -> bytes:
    """Return the document within Kubernetes' limit: lists lose entries from their end first, then strings are cut.

    Lone surrogates, which JSON of a checkpoint may have, become question marks.
    """
    while len(text := json.dumps(document, ensure_ascii=False).encode(errors="replace")) > _MAX_TERMINATION_MESSAGE_BYTES:
        names = ("warnings", "inPlaceProblems", "errors")
        lists = [value for value in (document.get(name) for name in names) if isinstance(value, list)]
        longest = next((value for value in lists if len(value) > 1 or (value and value is lists[0])), None)
        if longest:
            longest.pop()
            continue
        document = {key: _truncate(value) for key, value in document.items()}
    return text


def _truncate(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= 400 else value[:399] + "…"
    return [_truncate(item) for item in value] if isinstance(value, list) else value
