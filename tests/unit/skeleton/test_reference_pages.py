"""The generated pages of the reference name what the code has, where no registry of the code guarantees it."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.reference import annotation_table, cli

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("operator/aerie/**/*.py", "lab/aerie_lab/**/*.py", "charts/aerie/templates/*.yaml")
KEY = re.compile(r"[\"'\s](?:labels\.)?((?:lab\.|notifications\.)?aerie\.dev/[a-z][a-z-]*)(?![\w/])")
OTHERS = {
    "aerie.dev/aerie": "the operator's image",
    "aerie.dev/catalog": "checksum on the operator's pods, by which a changed catalog replaces them",
    "aerie.dev/lab": "images of the lab",
    "aerie.dev/notifications": "checksum on the operator's pods, as for the catalog",
    "aerie.dev/operator": "reporting controller of events",
}
"""Names that are no annotation or label of the page, and what they are."""


def test_page_has_every_annotation_and_label_of_the_code() -> None:
    names = {name for pattern in SOURCES for path in ROOT.glob(pattern) for name in KEY.findall(path.read_text(encoding="utf-8"))}
    assert {"aerie.dev/promote", "aerie.dev/revision", "lab.aerie.dev/hub"} <= names
    page = annotation_table.page()
    assert [name for name in sorted(names - OTHERS.keys()) if f"| `{name}" not in page] == []


def test_commands_of_the_page_have_the_options_of_their_functions() -> None:
    commands = list(cli.iterate_aerie_commands())
    options = {option for command in commands for parameter in cli.list_parameters(command.function) for option in parameter.opts}
    assert {"--attention", "--namespace", "--gpu-memory"} <= options
    assert "aerie complete" not in {command.name for command in commands}  # hidden
