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
DRAWINGS: dict[str, Callable[[], pictures.Picture]] = {
    "rollout": pictures.draw_rollout,
    "data flow": pictures.draw_data_flow,
    "phases": pictures.draw_phases,
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
