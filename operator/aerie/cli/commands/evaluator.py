"""`aerie evaluator`: shadow evaluation of a canary, as its pod runs it.

Its memory is bounded, so it imports none of the other commands.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from aerie.cli.console import CommandError
from aerie.cli.runner import run_app
from aerie.evaluator.admission import IN_FLIGHT, WAITING
from aerie.evaluator.requests import MAX_ANSWER_TOKENS, ReplayRules
from aerie.typer_app import App


def evaluator(
    canary: Annotated[list[str] | None, typer.Option(help="Base URL of an engine with the new drafter; repeatable.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Base URL of an engine with the stable drafter; repeatable.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token for /aerie/pairs.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Base URL of one isolated engine, which alternates between the drafters; instead of the three above."),
    ] = None,
    window_seconds: Annotated[float, typer.Option(min=4.0, help="Length of the isolated engine's windows.")] = 8.0,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key that the engines require. Default: no Authorization header.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of OpenAI chat or completion requests. Default: mirrored requests.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, max=MAX_ANSWER_TOKENS, help="Maximum tokens of an answer.")] = 256,
    priority: Annotated[
        int,
        typer.Option(help="Priority of the requests in the engines, higher is later. 0: engines without priority scheduling."),
    ] = 0,
    neutral_defaults: Annotated[
        bool,
        typer.Option(
            "--neutral-defaults",
            help="The engines sample at temperature 1 and without penalties by default, as with `--generation-config=vllm`.",
        ),
    ] = False,
    cluster_header: Annotated[
        str, typer.Option(help="Header that names a request's tenant or conversation; else its field `user` or `session_id`.")
    ] = "X-Session-ID",
    in_flight: Annotated[int, typer.Option(min=1, help="Maximum requests that the engines answer at the same time.")] = IN_FLIGHT,
    waiting: Annotated[int, typer.Option(min=0, help="Maximum requests that wait for that; further ones are dropped.")] = WAITING,
    timeout_seconds: Annotated[float, typer.Option(min=1.0, help="Maximum seconds of an answer.")] = 120.0,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    log_level: Annotated[str, typer.Option(help="Log level: DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Send requests to an engine with the new drafter and to one with the stable drafter, and count what their answers took.

    Reads mirrored requests, or a file of prompts. GET /aerie/pairs returns the counts. With --engine, send requests to one
    isolated engine and repeat them after its change of the drafter; the engine itself counts. No prompt or answer is stored or
    logged. SIGTERM stops it.
    """
    # Imported here: the list of commands needs no HTTP server.
    from aerie.evaluator.isolated import IsolatedEngine
    from aerie.evaluator.process import run_evaluator
    from aerie.evaluator.prompts import PromptError
    from aerie.evaluator.replay import Engines
    from aerie.evaluator.settings import MIN_TOKEN_CHARACTERS, EvaluatorSettings, SettingsError, parse_urls, read_secret

    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise CommandError(f"--log-level is {log_level}: set DEBUG, INFO, WARNING or ERROR.")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if engine is not None and (canary or control or token_file):
        raise CommandError("--engine is an isolated engine for both drafters: leave out --canary, --control and --token-file.")
    if engine is None and token_file is None:
        raise CommandError("--token-file is missing: name a file with the bearer token, or an isolated engine with --engine.")
    try:
        api_key = read_secret("--engine-key-file", engine_key_file) if engine_key_file else ""
        settings = EvaluatorSettings(
            engines=IsolatedEngine(parse_urls("--engine", [engine])[0], window_seconds, api_key, timeout_seconds)
            if engine is not None
            else Engines(
                canary=parse_urls("--canary", canary or ()),
                control=parse_urls("--control", control or ()),
                api_key=api_key,
                timeout_seconds=timeout_seconds,
            ),
            rules=ReplayRules(max_tokens, engine is None, priority, neutral_defaults),
            token=read_secret("--token-file", token_file, MIN_TOKEN_CHARACTERS) if token_file is not None else None,
            prompts=prompts,
            cluster_header=cluster_header,
            in_flight=in_flight,
            waiting=waiting,
            port=port,
        )
        asyncio.run(run_evaluator(settings))
    except (SettingsError, PromptError) as error:
        raise CommandError(str(error)) from None


def run_evaluator_command_line() -> int:
    """Return the exit status of the process's command line, which begins with `evaluator`."""
    app = App(no_args_is_help=False)
    app.callback()(lambda: None)  # a command of a group, so that its name is read
    app.command()(evaluator)
    return run_app(app, None, lambda error: isinstance(error, CommandError))
