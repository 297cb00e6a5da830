"""What the command lines here print with: two consoles, text of others made safe, and `--version`.

Guarantee: text that went through `plain` neither is markup nor moves the terminal's cursor, whoever wrote it.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
"""What was asked for."""
err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Notes for a person."""


def sanitize_text(text: str) -> str:
    """Text as it is to be seen: no markup, and no control character but the end of a line."""
    return escape("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text))


def print_error(error: Exception) -> None:
    """Say why something cannot be done."""
    err.print(f"[bold red]error:[/] {sanitize_text(str(error))}")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version  # not needed otherwise

        typer.echo(f"aerie {version('aerie')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
]
"""An option of a whole command line."""
