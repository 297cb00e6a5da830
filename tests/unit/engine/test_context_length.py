"""The context length in an engine's list of models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerie.engine.context_length import read_max_model_len
from aerie_lab.engine.api import build_models_response

ADAPTER = {"id": "chat", "object": "model", "root": "/adapter", "parent": "base"}


def build_listing(*cards: Any) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def test_the_length_is_that_of_the_served_name() -> None:
    body = json.dumps(build_models_response(("chat", "alias"), "/models/target", 1_700_000_000, 4096)).encode()
    assert (read_max_model_len(body, "chat"), read_max_model_len(body, "alias"), read_max_model_len(body, "another")) == (
        4096,
        4096,
        None,
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b'{"data": 3}',
        build_listing(),
        build_listing("chat"),
        build_listing(ADAPTER),
        *(build_listing(ADAPTER | {"max_model_len": value}) for value in (None, "4096", 0, -1, True, 40.96)),
    ],
)
def test_responses_without_a_length_give_none(body: bytes) -> None:
    assert read_max_model_len(body, "chat") is None
