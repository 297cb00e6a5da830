"""A Prometheus server's address, queries and responses, for the client's tests and the scraper's.

Guarantees: a query is read as the client sent it.
Not guaranteed: whether a real Prometheus accepts the query. `tests/lab/test_prometheus.py` shows that.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from aerie.api.metrics import PrometheusSource

URL = "http://prometheus.example:9090"
SERVER = PrometheusSource(address=URL)
T0 = 1_790_000_000.0


def parse_query(request: httpx.Request) -> tuple[list[str], float, str]:
    """Return the pods of a query, its range in seconds, and the query."""
    text = httpx.QueryParams(request.content.decode())["query"]
    pods, seconds = re.search(r'pod=~"(.*?)"', text), re.search(r"\[(\d+)ms\]$", text)
    assert pods is not None
    assert seconds is not None
    return pods[1].replace("\\", "").split("|"), int(seconds[1]) / 1000, text


def json_response(document: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(json.dumps(document).encode()))
