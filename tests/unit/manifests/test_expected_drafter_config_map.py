"""The ConfigMap with the drafter that was promoted in place: the plugin reads it, and a lost status is recovered from it."""

from __future__ import annotations

import json

import pytest

from aerie.api.status import DrafterLocation, InPlaceDrafter
from aerie.engine.drafter_endpoint.calls import compute_digest
from aerie.manifests import naming
from aerie.manifests.expected_drafter_config_map import IN_PLACE_KEY, build_expected_drafter_config_map, read_in_place_drafter
from aerie_vllm.requests import parse_expected

FILES = {"config.json": "0" * 64, "model.safetensors": "1" * 64}
ON_CLAIM = DrafterLocation(folder="/models/drafters/eagle31")
ON_HUB = DrafterLocation(repository="me/eagle31", commit="a" * 40)


def drafter(location: DrafterLocation = ON_CLAIM) -> InPlaceDrafter:
    return InPlaceDrafter(
        revision="0123456789", drafter="models/eagle31", digest=compute_digest(FILES), files=FILES, location=location
    )


def test_the_plugin_reads_a_folder() -> None:
    config_map = build_expected_drafter_config_map("chat", "abc", drafter())
    expected = parse_expected(config_map["data"][naming.EXPECTED_DRAFTER_KEY].encode())
    assert (expected.source.folder, expected.files) == (ON_CLAIM.folder, FILES)
    assert config_map["metadata"]["name"] == naming.expected_drafter_config_map_name("chat", "abc")


def test_a_repository_has_its_commit() -> None:
    config_map = build_expected_drafter_config_map("chat", "abc", drafter(ON_HUB))
    assert json.loads(config_map["data"][naming.EXPECTED_DRAFTER_KEY]) == {
        "repository": "me/eagle31",
        "revision": "a" * 40,
        "files": FILES,
    }


@pytest.mark.parametrize("location", [ON_CLAIM, ON_HUB])
def test_the_operator_reads_what_it_wrote(location: DrafterLocation) -> None:
    assert read_in_place_drafter(build_expected_drafter_config_map("chat", "abc", drafter(location))["data"]) == drafter(location)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "{}", '{"revision": 1}', "null"])
def test_an_edited_config_map_has_no_drafter(text: str) -> None:
    assert read_in_place_drafter({IN_PLACE_KEY: text}) is None
    assert read_in_place_drafter({}) is None
