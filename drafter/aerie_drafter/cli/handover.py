"""`aerie-drafter handover`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.files import replace_file
from aerie_drafter.train.compatibility import check_settings, read_text_config, resolve_drafter_config
from aerie_drafter.train.handover import (
    OtherTrainer,
    build_drafter_json,
    build_specforge_config,
    build_torchspec_config,
    find_differences,
)
from aerie_drafter.train.settings import read_settings


def command(
    settings: Annotated[Path, typer.Argument(help="YAML file with the settings of a training.")],
    folder: Annotated[Path, typer.Argument(help="Folder for train.yaml and drafter.json.")],
    to: Annotated[OtherTrainer, typer.Option(help="Project whose trainer runs the training.")],
    chat_template: Annotated[str, typer.Option(help="Name of the chat template in that project, such as llama3 or qwen.")],
) -> None:
    """Write the configuration of TorchSpec or SpecForge for the same training."""
    training = read_settings(settings)
    check_settings(training)
    config = resolve_drafter_config(training, read_text_config(training.target.model, training.target.revision))
    drafter_json = folder / "drafter.json"
    build = build_torchspec_config if to is OtherTrainer.TORCHSPEC else build_specforge_config
    other = build(training, config, drafter_json.resolve(), chat_template)
    replace_file(drafter_json, json.dumps(build_drafter_json(config), indent=2) + "\n")
    replace_file(folder / "train.yaml", yaml.safe_dump(other, sort_keys=False))
    for difference in find_differences(training, to):
        err.print(sanitize_text(difference))
    out.print(f"{sanitize_text(str(folder / 'train.yaml'))}: for {to.value}; add its engines, devices and hosts")
