"""Terminal output of every command line: two consoles, and sanitised untrusted text.

Guarantee: text that `sanitize_text` returns contains no markup and no control character that moves the cursor, whoever wrote
it.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
"""Console for results, on standard output."""
err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Console for messages to the user, on standard error."""


def sanitize_text(text: str) -> str:
    """Return the text for display: without markup, and without control characters other than line feeds."""
    return escape("".join(character if character.isprintable() or character == "\n" else "?" for character in text))


def print_error(error: Exception) -> None:
    """Print an error message to standard error."""
    err.print(f"[bold red]error:[/] {sanitize_text(str(error))}")
