"""The drawn pictures: the phases and arrows of the state machine, all layers of the operator, and text that fits."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from aerie.rollout.canary.state_machine import TRANSITIONS, EndState, StateMachinePhase, Trigger
from scripts import pictures

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"
USER_REQUESTS = {Trigger.PROMOTE_REQUESTED, Trigger.EXTENDED}
TIMELINE = {
    "stages": [
        {"name": name, "begin": 60.0 * index, "end": 60.0 * (index + 1), "acceptance_length": length, "requests": 100}
        for index, (name, length) in enumerate(
            [
                ("questions, served drafter", 2.41),
                ("texts, served drafter", 1.9),
                ("other texts, drafters by turns", 2.2),
                ("other texts, refreshed drafter", 2.6),
            ]
        )
    ],
    "curve": [(20.0 + 20 * index, 1.9 + 0.06 * index) for index in range(12)],
}
DRAWINGS: dict[str, Callable[[], pictures.Picture]] = {
    "rollout": pictures.draw_rollout,
    "data flow": pictures.draw_data_flow,
    "phases": pictures.draw_phases,
    "refresh": lambda: pictures.draw_refresh(TIMELINE),
    "layers": lambda: pictures.draw_layers((ROOT / "pyproject.toml").read_text()),
}


def list_elements(picture: pictures.Picture, name: str) -> list[ET.Element]:
    return list(ET.fromstring(picture.render()).iter(f"{SVG}{name}"))  # noqa: S314 - written by this repository


def read_texts(picture: pictures.Picture) -> set[str]:
    return {element.text or "" for element in list_elements(picture, "text")}


def test_the_picture_has_every_phase_and_end() -> None:
    assert {*get_args(StateMachinePhase), *get_args(EndState)} <= read_texts(pictures.draw_phases())


def test_the_arrows_are_the_rows_of_the_transition_table() -> None:
    triggers: dict[tuple[str, str], set[Trigger]] = {}
    for (phase, trigger), target in TRANSITIONS.items():
        if target != phase:
            triggers.setdefault((phase, target), set()).add(trigger)
    # One box stands for the rollback from every phase.
    phases = set(get_args(StateMachinePhase))
    assert {phase for phase, target in triggers if target == "RolledBack"} == phases
    arrows = [element for element in list_elements(pictures.draw_phases(), "path") if "data-from" in element.attrib]
    drawn = {(element.attrib["data-from"], element.attrib["data-to"]): "user" in element.attrib["class"] for element in arrows}
    assert len(drawn) == len(arrows)
    assert drawn == {edge: causes <= USER_REQUESTS for edge, causes in triggers.items() if edge[1] != "RolledBack"}


def test_the_layers_are_those_of_the_import_contract() -> None:
    folders = set(itertools.chain(*pictures.read_layers((ROOT / "pyproject.toml").read_text())))
    packages = {path.parent.name for path in (ROOT / "operator/aerie").glob("*/__init__.py")}
    assert folders == packages - {"analysis"}, "analysis has a contract of its own"
    assert folders <= read_texts(DRAWINGS["layers"]())


def test_the_refresh_has_each_stage_in_its_place() -> None:
    picture = pictures.draw_refresh(TIMELINE)
    assert "2  texts, served drafter: 1.90, for 1.0 min" in read_texts(picture)
    bars = [element for element in list_elements(picture, "rect") if element.attrib["height"] == "4"]
    assert [bar.attrib["class"] for bar in bars] == ["stable", "stable", "wait", "canary"]
    heights = [float(bar.attrib["y"]) for bar in bars]
    assert sorted(range(4), key=heights.__getitem__) == [3, 0, 2, 1], "the longest is on top"


@pytest.mark.parametrize("name", DRAWINGS)
def test_everything_is_inside_the_picture(name: str) -> None:
    picture = DRAWINGS[name]()
    for element in list_elements(picture, "rect"):
        x, y, width, height = (float(element.attrib.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert x + width <= pictures.WIDTH
        assert y + height <= picture.height


def test_a_text_wider_than_its_box_is_an_error() -> None:
    picture = pictures.Picture("Picture", "", 100)
    picture.box(pictures.Box(0, 0, 100, 40), "fits")
    with pytest.raises(pictures.PictureError, match="'does not fit into it' is wider than its box of 100 pixels"):
        picture.box(pictures.Box(0, 0, 100, 40), "fits", "does not fit into it")
