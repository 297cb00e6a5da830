"""`aerie preflight-job`: preflight as a Job of the operator runs it, with its result where Kubernetes reads it.

The result is the container's termination message, of which Kubernetes keeps 4 KiB. `passed` is true or false, or null where
the Hub could not be read, so that there is no result. `hubRejected` is true as well where the Hub has rejected the request, which
an immediate retry would not change. The exit status is 0, 1 or 2 accordingly, and 3 if the Hub has rejected the request. Files
that cannot be read as a checkpoint are a result: an engine could not read them either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aerie.api import ResourceError
from aerie.checkpoints import HubError, HubRejectionError, read_repository
from aerie.cli.console import CommandError
from aerie.cli.inputs.files import read_deployment
from aerie.cli.inputs.preflight_input import PreflightOverrides, build_input_from_deployment
from aerie.engine.arguments import ArgumentError
from aerie.engine.models.checkpoint import CheckpointError
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.engine.preflight import PreflightReport, Severity, run_preflight

HUB_REJECTED_EXIT_STATUS = 3
"""Exit status of a Job whose request the Hub has rejected."""
_MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Bytes of a termination message that Kubernetes keeps."""


def preflight_job(
    file: Annotated[str, typer.Option(help="File with the resource.")],
    report: Annotated[Path, typer.Option(help="File for the result.")],
    target: Annotated[Path | None, typer.Option(help="Folder where the target's source is mounted.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Folder where the drafter's source is mounted.")] = None,
) -> None:
    """Run preflight in a Job of the operator."""
    try:
        preflight_input, notes = build_input_from_deployment(
            read_deployment(file), PreflightOverrides(target, drafter), DrafterCatalog(()), read_repository
        )
        result = run_preflight(preflight_input)
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
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Unforeseen content of the files: after a crash, the Job would be retried for ever with the same outcome.
        message = f"these files caused a defect of Aerie ({type(error).__name__}: {str(error)[:200]}): report it."
        report.write_bytes(encode_termination_message(_build_error_result(message)))
        typer.echo(message)
        raise typer.Exit(1) from error
    report.write_bytes(encode_termination_message(build_preflight_result(result, notes)))
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


def _build_error_result(message: str) -> dict[str, object]:
    """Return the document of a preflight that ended with an error instead of a report."""
    return {"passed": False, "summary": message, "failedChecks": [], "errors": [message], "warnings": []}


def encode_termination_message(document: dict[str, object]) -> bytes:
    """Return the document within Kubernetes' limit: lists lose entries from their end first, then strings are cut."""
    while len(text := json.dumps(document, ensure_ascii=False).encode()) > _MAX_TERMINATION_MESSAGE_BYTES:
        lists = [value for value in (document.get("warnings"), document.get("errors")) if isinstance(value, list)]
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
