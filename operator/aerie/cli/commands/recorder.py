"""`aerie recorder`: the capture of prompts, as its pod runs it.

Its memory is bounded, so it imports none of the other commands.
"""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from aerie.cli.console import CommandError
from aerie.cli.runner import run_app
from aerie.typer_app import App


def recorder(
    folder: Annotated[
        Path, typer.Option(help="Folder of the files; with --bucket, of those that wait for their upload. It is created.")
    ],
    rate: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the requests that are recorded.")] = 0.01,
    max_per_minute: Annotated[int, typer.Option(min=1, help="Maximum requests that are recorded in a minute.")] = 60,
    retention_seconds: Annotated[float, typer.Option(min=1.0, help="Seconds after which a file is deleted.")] = 604800.0,
    max_bytes: Annotated[int, typer.Option(min=64 * 2**20, help="Maximum size of all files; the oldest ones are deleted.")] = 5
    * 2**30,
    redact: Annotated[str, typer.Option(help="JSON list of objects with `pattern` (RE2) and `replacement` (literal).")] = "[]",
    hook_url: Annotated[
        str | None, typer.Option(help="URL that gets each prompt by POST, and returns it redacted. Default: none.")
    ] = None,
    hook_timeout_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds in which the hook has to answer.")] = 5.0,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket of an object store with the API of Amazon S3. Default: files stay in the folder.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Prefix of the objects' names, without / at its ends.")] = "",
    region: Annotated[str, typer.Option(help="Region of the bucket.")] = "us-east-1",
    endpoint: Annotated[str | None, typer.Option(help="URL of the object store. Default: that of Amazon S3.")] = None,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    log_level: Annotated[str, typer.Option(help="Log level: DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Record a share of mirrored requests, redacted, as files from which a drafter can be trained.

    Listens for copies of chat completion requests, and answers each immediately. Answers of engines, headers and users' names are
    not recorded. With --bucket, the key is in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. SIGTERM completes the last file and
    stops it.
    """
    # Imported here: the list of commands needs neither an HTTP server nor the packages of the extra `capture`.
    from aerie.recorder.hook import Hook
    from aerie.recorder.process import run_recorder
    from aerie.recorder.settings import RecorderSettings, SettingsError, parse_redaction, read_bucket
    from aerie.recorder.storage import Retention

    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise CommandError(f"--log-level is {log_level}: set DEBUG, INFO, WARNING or ERROR.")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = RecorderSettings(
            folder=folder,
            retention=Retention(timedelta(seconds=retention_seconds), max_bytes),
            rate=rate,
            max_per_minute=max_per_minute,
            redaction=parse_redaction("--redact", redact),
            hook=Hook(hook_url, hook_timeout_seconds) if hook_url is not None else None,
            bucket=read_bucket(bucket, prefix, region, endpoint, os.environ) if bucket is not None else None,
            port=port,
        )
    except SettingsError as error:
        raise CommandError(str(error)) from None
    asyncio.run(run_recorder(settings))


def run_recorder_command_line() -> int:
    """Return the exit status of the process's command line, which begins with `recorder`."""
    app = App(no_args_is_help=False)
    app.callback()(lambda: None)  # a command of a group, so that its name is read
    app.command()(recorder)
    return run_app(app, None, lambda error: isinstance(error, CommandError))
