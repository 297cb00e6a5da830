"""`aerie-drafter generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter import files
from aerie_drafter.chat_template import TemplateArguments, parse_template_kwargs, read_template_arguments
from aerie_drafter.errors import ConfigError
from aerie_drafter.train.answers import GenerationParameters, TemperatureMix
from aerie_drafter.train.conversations import read_conversations
from aerie_drafter.train.endpoint import EndpointOptions, Rejection, generate_from_endpoint
from aerie_drafter.train.generate import generate_answers
from aerie_drafter.train.identity import identify_target
from aerie_drafter.train.states import load_model, load_tokenizer


def command(
    source: Annotated[Path, typer.Argument(help="Conversations: a file, or hub:NAME:SPLIT. Assistant's turns are replaced.")],
    output: Annotated[Path, typer.Argument(help="Output file, JSON Lines; an interrupted run is resumed.")],
    target: Annotated[str, typer.Option(help="Folder or Hugging Face repository of the target, to run it here.")] = "",
    revision: Annotated[str | None, typer.Option(help="Commit of the repository.")] = None,
    endpoint: Annotated[str, typer.Option(help="Address of a running vLLM that answers instead; with --model.")] = "",
    model: Annotated[str, typer.Option(help="Served model name at that address.")] = "",
    rows: Annotated[int, typer.Option(min=1, help="Batch size with --target.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests to the endpoint.")] = 32,
    retry_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds without a successful request after which the endpoint counts as gone.")
    ] = 600,
    max_rejected: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the conversations that the endpoint may reject.")
    ] = 0.05,
    retry_rejected: Annotated[
        bool, typer.Option("--retry-rejected", help="Try conversations again that the endpoint rejected in an earlier run.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 1024,
    temperature: Annotated[
        str, typer.Option(help="Sampling temperature, or TEMPERATURE:SHARE,... such as 0:0.5,0.7:0.25,1:0.25; 0 is greedy.")
    ] = "0",
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling. Default: 1; of an endpoint, its own.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    tools: Annotated[Path | None, typer.Option(help="JSON file with the tools of conversations that have none.")] = None,
    template_kwargs: Annotated[str, typer.Option(help="JSON object: arguments of the chat template.")] = "{}",
) -> None:
    """Generate training data: the target's answers to the prompts of a file, with their exact tokens."""
    parameters = GenerationParameters(max_tokens, TemperatureMix.parse(temperature), top_p, seed)
    template = read_template_arguments(tools, parse_template_kwargs(template_kwargs))
    if bool(target) == bool(endpoint) or bool(endpoint) != bool(model):
        raise ConfigError("expected: --target TARGET, or --endpoint URL with --model NAME.")
    total = sum(1 for _ in read_conversations(source))
    rejected: tuple[Rejection, ...] = ()
    with files.reserve_output(output, is_folder=False), Progress(console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("answered", total=total)

        def show_progress(count: int) -> None:
            bar.update(task, completed=count)

        if endpoint:
            options = EndpointOptions(concurrency, retry_timeout, max_rejected, retry_rejected)
            answers = asyncio.run(
                generate_from_endpoint(
                    endpoint,
                    model,
                    source,
                    output,
                    parameters=parameters,
                    template=template,
                    options=options,
                    on_progress=show_progress,
                )
            )
            written, rejected = answers.written, answers.rejected
        else:
            written = _generate_here(target, revision, source, output, parameters, template, rows, show_progress)
    if rejected:
        reason = sanitize_text(f"{rejected[0].location}: {rejected[0].reason}")
        err.print(
            f"the endpoint rejects {len(rejected)} conversations, which have no answer; the first is {reason}", markup=False
        )
    out.print(f"{output}: {total} conversations, {written} of them new", markup=False)


def _generate_here(
    target: str,
    revision: str | None,
    source: Path,
    output: Path,
    parameters: GenerationParameters,
    template: TemplateArguments,
    rows: int,
    on_progress: Callable[[int], None],
) -> int:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(target, revision)
    if not tokenizer.chat_template:
        raise ConfigError(f"{target}: its tokenizer has no chat template; add one to the target's folder.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return generate_answers(
        load_model(target, revision, torch.bfloat16 if device.type == "cuda" else torch.float32, device).eval(),
        tokenizer,
        source,
        output,
        parameters=parameters,
        target_id=identify_target(target, revision),
        template=template,
        batch_size=rows,
        on_progress=on_progress,
        log=lambda line: err.print(line, markup=False),
    )
