"""What an engine says of its context length."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aerie.engine.context_length import read_max_model_len
from aerie_lab.engine.api import build_models_response

ADAPTER = {"id": "chat", "object": "model", "root": "/adapter", "parent": "base"}


def listed(*cards: Any) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def test_the_model_that_is_served_by_the_name_counts() -> None:
    body = json.dumps(build_models_response(("chat", "again"), "/models/target", 1_700_000_000, 4096)).encode()
    assert (read_max_model_len(body, "chat"), read_max_model_len(body, "again"), read_max_model_len(body, "another")) == (
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
        listed(),
        listed("chat"),
        listed(ADAPTER),
        *(listed(ADAPTER | {"max_model_len": wrong}) for wrong in (None, "4096", 0, -1, True, 40.96)),
    ],
)
def test_what_says_nothing(body: bytes) -> None:
    assert read_max_model_len(body, "chat") is None
