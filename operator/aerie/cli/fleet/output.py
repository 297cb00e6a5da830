"""Documents that commands about resources write for programs.

Guarantee: each has a version and a kind, and a later release of the version only adds fields.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

API_VERSION = "cli.aerie.dev/v1"
"""Version of the documents that `-o json` and `-o yaml` write."""


class Output(StrEnum):
    """Form of the output."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Form of the output.")]


def write_document(output: str, kind: str, content: dict[str, Any]) -> None:
    """Write a document to standard output. `output`: json or yaml."""
    document = {"apiVersion": API_VERSION, "kind": kind, **content}
    if output == Output.JSON:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    import yaml  # not needed otherwise

    typer.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)
