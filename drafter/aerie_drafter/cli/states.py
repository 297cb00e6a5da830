"""`aerie-drafter states`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from aerie.terminal import err, out
from aerie_drafter import checkpoint
from aerie_drafter.errors import ConfigError
from aerie_drafter.train.create import build_drafter_config
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import load_parts_of_folder, prepare_data, resolve_layout
from aerie_drafter.train.state_server import HiddenStateServer, write_state_files


def command(
    settings: Annotated[Path, typer.Argument(help="YAML file of the training; target.hidden_states is the output folder.")],
    endpoint: Annotated[str, typer.Option(help="Address of a vLLM with extract_hidden_states.")],
    model: Annotated[str, typer.Option(help="Served model name at that address.")],
    shared_folder: Annotated[
        Path | None, typer.Option(help="Where this machine sees the server's shared_storage_path. Default: the same path.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 16,
) -> None:
    """Write the target's hidden states of a training's data, by a running vLLM; an interrupted run is resumed."""
    training = read_settings(settings)
    folder = training.target.hidden_states
    if folder is None:
        raise ConfigError(f"{settings}: target.hidden_states is not set, which is the folder to write to.")
    prepared = prepare_data(training, err.print)
    parts = load_parts_of_folder(training, torch.float32, torch.device("cpu"))
    initial = training.drafter.initial_checkpoint
    config = build_drafter_config(training.drafter, parts.config) if initial is None else checkpoint.read_drafter_config(initial)
    layout = resolve_layout(training, parts, config.aux_layer_ids)
    server = HiddenStateServer(endpoint, model, parts, layout, shared_folder=shared_folder)
    conversations = prepared.conversations
    with Progress(console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("extracted", total=len(conversations))
        written = write_state_files(
            server,
            folder,
            conversations,
            prepared.target_id,
            concurrency=concurrency,
            on_progress=lambda count: bar.update(task, completed=count),
        )
    out.print(f"{folder}: states of {len(conversations)} conversations, {written} files of them new", markup=False)
