"""Flags for counts of speculation: which pods get them, and which flags of the user stay."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.engine.releases import Version
from aerie.manifests.pod.request_metrics import (
    add_request_metrics,
    find_request_metrics_obstacle,
    has_request_metrics,
    without_request_metrics,
)
from tests.golden import Messages

ADDED = ["--per-request-spec-decode-metrics=summary", "--enable-per-request-metrics"]
DRAFTED = ["m", "--speculative-config", "{}"]
NEW = Version.parse("0.29.0")


def template(*args: str, **engine: Any) -> dict[str, Any]:
    sidecar = {"name": "log", "args": ["--quiet"]}
    return {"metadata": {}, "spec": {"containers": [sidecar, {"name": "engine", "args": [*DRAFTED, *args], **engine}]}}


def added(*args: str) -> list[str]:
    containers = add_request_metrics(template(*args))["spec"]["containers"]
    assert containers[0] == {"name": "log", "args": ["--quiet"]}
    result: list[str] = containers[1]["args"][len(DRAFTED) + len(args) :]
    return result


def test_engine_gets_both_flags_once() -> None:
    assert added() == ADDED
    assert added(*ADDED) == []
    assert not has_request_metrics(template())
    assert has_request_metrics(add_request_metrics(template()))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--per-request-spec-decode-metrics", "detailed"], ADDED[1:]),
        (["--per_request_spec_decode_metrics=summary"], ADDED[1:]),
        (["--per-request-spec=detailed"], ADDED[1:]),
        (["--enable-per-request-metrics"], ADDED[:1]),
        (["--no-enable-per-request-metrics"], ADDED[:1]),
        (["--max-num-seqs", "4"], ADDED),
    ],
)
def test_flag_of_the_user_stays(args: list[str], expected: list[str]) -> None:
    assert added(*args) == expected
    assert not find_request_metrics_obstacle(NEW, template(*args))


@pytest.mark.parametrize(
    ("name", "version", "pod_template"),
    [
        ("old vLLM", Version.parse("0.28.1"), template()),
        ("off", NEW, template("--per-request-spec-decode-metrics=none")),
        ("without value", NEW, template("--per-request-spec-decode-metrics")),
        ("no drafter", NEW, {"spec": {"containers": [{"name": "engine", "args": ["m"]}]}}),
        ("Rust front end", NEW, template(env=[{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}])),
    ],
)
def test_obstacles_have_a_fix(name: str, version: Version, pod_template: dict[str, Any], messages: Messages) -> None:
    messages.check(name, find_request_metrics_obstacle(version, pod_template))


def test_front_end_in_python_is_no_obstacle() -> None:
    assert not find_request_metrics_obstacle(NEW, template(env=[{"name": "VLLM_USE_RUST_FRONTEND", "value": "0"}]))


def test_flags_do_not_count_as_a_difference_of_engines() -> None:
    assert without_request_metrics([*DRAFTED, *ADDED]) == DRAFTED
