"""Selection of the endpoints that get a new connection."""

from __future__ import annotations

from typing import Any

import pytest

from aerie_lab.services.proxy import select_endpoints


def endpoint_slice(*endpoints: tuple[str, dict[str, bool | None]], ports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "ports": [{"name": "", "port": 8080}] if ports is None else ports,
        "endpoints": [{"addresses": [address], "conditions": conditions} for address, conditions in endpoints],
    }


READY: dict[str, bool | None] = {"ready": True, "serving": True, "terminating": False}
UNREADY: dict[str, bool | None] = {"ready": False, "serving": False, "terminating": False}
TERMINATING: dict[str, bool | None] = {"ready": False, "serving": True, "terminating": True}
TERMINATED: dict[str, bool | None] = {"ready": False, "serving": False, "terminating": True}


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        ([READY, READY], [0, 1]),
        ([READY, UNREADY], [0]),
        ([READY, TERMINATING], [0]),
        ([UNREADY, TERMINATING], [1]),
        ([TERMINATING, TERMINATED], [0]),
        ([UNREADY, TERMINATED], []),
        ([{}, UNREADY], [0]),  # unknown counts as ready
        ([{"ready": None}], [0]),
        ([], []),
    ],
)
def test_endpoints_are_selected_by_conditions(conditions: list[dict[str, bool | None]], chosen: list[int]) -> None:
    addresses = [f"10.0.0.{index}" for index in range(len(conditions))]
    endpoints = select_endpoints([endpoint_slice(*zip(addresses, conditions, strict=True))], "")
    assert endpoints == [(addresses[index], 8080) for index in chosen]


def test_ports_are_selected_by_name() -> None:
    ports = [{"name": "web", "port": 1}, {"name": "metrics", "port": 2}]
    slices = [
        endpoint_slice(("10.0.0.1", READY), ports=ports),
        endpoint_slice(("10.0.0.2", READY), ports=[{"name": "web", "port": 3}]),
    ]
    assert select_endpoints(slices, "web") == [("10.0.0.1", 1), ("10.0.0.2", 3)]
    assert select_endpoints(slices, "metrics") == [("10.0.0.1", 2)]
    assert select_endpoints(slices, "") == []


def test_the_same_endpoint_in_two_slices_counts_once() -> None:
    assert select_endpoints([endpoint_slice(("10.0.0.1", READY)), endpoint_slice(("10.0.0.1", READY))], "") == [
        ("10.0.0.1", 8080)
    ]


def test_slices_without_content_have_no_endpoints() -> None:
    assert select_endpoints([{"ports": None, "endpoints": None}], "") == []
