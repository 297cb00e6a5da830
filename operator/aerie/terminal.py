"""Terminal output of every command line: two consoles, sanitised untrusted text, and `--version`.

Guarantee: text that `sanitize_text` returns contains no markup and no control character that moves the cursor, whoever wrote
it.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
"""Console for results, on standard output."""
err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Console for messages to the user, on standard error."""


def sanitize_text(text: str) -> str:
    """Return the text for display: without markup, and without control characters other than line feeds."""
    return escape("".join(character if character.isprintable() or character == "\n" else "?" for character in text))


def join_help_lines(docstring: str | None) -> str:
    """Return the help of a command, with the lines of each paragraph joined: typer would break them where the source does."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def print_error(error: Exception) -> None:
    """Print an error message to standard error."""
    err.print(f"[bold red]error:[/] {sanitize_text(str(error))}")


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version  # not needed otherwise

        typer.echo(f"aerie {version('aerie-operator')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
]
"""Option `--version` of a whole command line."""
