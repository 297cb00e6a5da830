"""Draw what a command printed in a terminal as SVG, for the docs, in the reader's light or dark colours.

    script -qec "stty cols 100; kubectl aerie status chat" recording
    python -m scripts.terminal_picture recording "kubectl aerie status chat" > docs/pictures/status.svg

Guarantees: the text is the recording's, without spaces at the end of lines, below the command as the user typed it. A colour that
the picture lacks is an error. Not guaranteed: that the program still prints the same. `make crds` does not write the picture,
because it needs a rollout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS = 100
COLOURS = {
    "text": ("#24292f", "#e6edf3"),
    "dim": ("#57606a", "#9ea7b3"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#116329", "#3fb950"),
    "yellow": ("#825000", "#d29922"),
    "cyan": ("#1b7c83", "#39c5cf"),
}
"""Light and dark colour by name."""
_TERMINAL_COLOURS = {1: "red", 2: "green", 3: "yellow", 6: "cyan"}
"""Name by the terminal's number."""
_ADVANCE, _LINE, _MARGIN = 8.43, 19, 16
"""Pixels of a character of 14 pixels, of a line, and beside the text."""


def draw(recording: str, command: str) -> str:
    """Return the picture of a recording by script(1)."""
    output = re.sub(r"^Script (started|done) on .*$", "", recording.replace("\r", ""), flags=re.MULTILINE).strip("\n")
    lines = Text.from_ansi(f"$ {command}\n\n{output}").split("\n", allow_blank=True)
    width, height = round(COLUMNS * _ADVANCE) + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    texts = "\n".join(_draw_line(line, _MARGIN + (number + 0.75) * _LINE) for number, line in enumerate(lines))
    light, dark = ("\n".join(_draw_colours(theme)) for theme in (0, 1))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{escape(command)}</title>
<style>
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
.bold {{ font-weight: bold; }}
.page {{ fill: #ffffff; stroke: #8c959f; }}
{light}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #0d1117; stroke: #6e7681; }}
{dark}
}}
</style>
<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>
{texts}
</svg>
"""


def _draw_colours(theme: int) -> Iterator[str]:
    for name, colours in COLOURS.items():
        yield f".{name} {{ fill: {colours[theme]}; }}"


def _draw_line(line: Text, y: float) -> str:
    """Return a line as one element, whose width does not depend on the reader's font."""
    line.rstrip()
    if not line.plain:
        return ""
    parts = [
        f'<tspan class="{_find_classes(segment.style)}">{escape(segment.text)}</tspan>'
        for segment in line.render(Console())
        if segment.text.strip("\n")
    ]
    return (
        f'<text x="{_MARGIN}" y="{y:g}" textLength="{len(line.plain) * _ADVANCE:g}" xml:space="preserve">{"".join(parts)}</text>'
    )


def _find_classes(style: Style | None) -> str:
    """Return the classes of a style. Raises ValueError for a colour that the picture does not have."""
    style = style or Style()
    name = "dim" if style.dim else "text"
    if style.color:
        number = style.color.number
        if number not in _TERMINAL_COLOURS:
            raise ValueError(f"the recording has {style.color.name}: add its number to the colours")
        name = _TERMINAL_COLOURS[number]
    return f"{name} bold" if style.bold else name


if __name__ == "__main__":
    sys.stdout.write(draw(Path(sys.argv[1]).read_text(), sys.argv[2]))
