"""The picture of a terminal: its text is the recording's, and its colours are those of the page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.terminal_picture import COLOURS, COLUMNS, draw

ROOT = Path(__file__).resolve().parents[3]
RECORDING = """\
Script started on 2026-11-28 20:28:08+00:00 [COMMAND="kubectl aerie status chat"]
\x1b[1mdefault/chat\x1b[0m  \x1b[32mclients are served\x1b[0m\r
\r
\x1b[2mby pods\x1b[0m  a < b & c  \x1b[1m  \x1b[0m\r

Script done on 2026-11-28 20:28:09+00:00 [COMMAND_EXIT_CODE="0"]
"""


def read_lines(picture: str) -> list[str]:
    root = ET.fromstring(picture)  # noqa: S314 - written by this repository
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_text_is_the_recordings() -> None:
    picture = draw(RECORDING, "kubectl aerie status chat")
    assert read_lines(picture) == ["$ kubectl aerie status chat", "default/chat  clients are served", "by pods  a < b & c"]
    assert '<tspan class="green">clients are served</tspan>' in picture
    assert '<tspan class="text bold">default/chat</tspan>' in picture
    assert '<tspan class="dim">by pods</tspan>' in picture


def test_a_colour_without_an_entry_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the recording has color\(5\)"):
        draw("\x1b[35mtext\x1b[0m", "true")


def test_every_colour_is_readable_in_light_and_dark() -> None:
    for colours in COLOURS.values():
        assert contrast(colours[0], "#ffffff") >= 4.5
        assert contrast(colours[1], "#0d1117") >= 4.5


def test_the_picture_of_the_readme_fits() -> None:
    lines = read_lines((ROOT / "docs/pictures/status.svg").read_text())
    assert lines[0] == "$ kubectl aerie status chat"
    assert max(map(len, lines)) <= COLUMNS


def contrast(first: str, second: str) -> float:
    """Return the ratio of WCAG 2."""
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
