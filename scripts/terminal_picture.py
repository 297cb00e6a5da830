"""Draw what a terminal showed as SVG, for the docs: a recording by script(1) becomes a picture with light and dark colours.

script -qec "stty cols 100; kubectl aerie status chat" /dev/null > recording
python -m scripts.terminal_picture recording "kubectl aerie status chat" > docs/status.svg

The picture is of a recording, so `make crds` does not write it. Guarantee: its text is the recording's, character by
character. Not guaranteed: the font, which is the reader's own.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

_COLUMNS = 100
_DARK = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [
        (110, 118, 129),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)
_LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (130, 80, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131), (87, 96, 106)],
)
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.page {{ fill: #ffffff; stroke: #8c959f; }}
.title {{ font: 16px system-ui, "DejaVu Sans", sans-serif; fill: #57606a; text-anchor: middle; }}
{styles}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #0d1117; stroke: #6e7681; }}
.title {{ fill: #9ea7b3; }}
DARK
}}
</style>
<defs>{lines}</defs>
<rect class="page" x="1" y="1" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<text class="title" x="50%" y="28">TITLE</text>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def draw(recording: str, title: str) -> str:
    """Return the picture of a recording."""
    # script(1) records carriage returns; other control sequences than colours are no text.
    text = re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]|\r", "", recording).strip("\n")
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {title}\n"), Text.from_ansi(text), sep="\n", soft_wrap=True)
    light = console.export_svg(theme=_LIGHT, code_format=_FORMAT, unique_id="terminal", clear=False)
    dark = console.export_svg(theme=_DARK, code_format="{styles}", unique_id="terminal")
    return light.replace("DARK", dark, 1).replace("TITLE", title, 1)


if __name__ == "__main__":
    sys.stdout.write(draw(Path(sys.argv[1]).read_text(), sys.argv[2]))
