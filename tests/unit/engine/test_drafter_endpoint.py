"""States that the plugin reports, and what is left of them after any field was changed: a state, or a named field."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie.engine.drafter_endpoint import state as state_module
from aerie.engine.drafter_endpoint.calls import (
    DrafterCall,
    DrafterFiles,
    DrafterSource,
    LoadDrafter,
    PrepareDrafter,
    RenewLease,
    ReturnToOwn,
    build_request,
)
from aerie.engine.drafter_endpoint.fields import MAX_TEXT_CHARACTERS, FieldError, parse_object
from aerie.engine.drafter_endpoint.state import (
    MAX_FILES,
    MAX_STATE_BYTES,
    MAX_WINDOWS,
    FailedChange,
    PreparedDrafter,
    Problem,
    parse_problem,
    parse_state,
)
from aerie_vllm import counters, requests
from tests.unit.plugin.conftest import PluginLoop, Server
from tests.unit.plugin.fake_engine import make_drafter, make_files

BAD_VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "x" * 10_000, [], {}, [None], {"a": None}, [[]], {"": {"": ""}})


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The state of a pod with a lease, a failure and three windows."""
    server = Server(tmp_path, monkeypatch)
    answers = []

    async def work() -> None:
        async with server.started() as client:
            server.engine.failures["swap:1"] = 1
            await client.put("worse")
            await client.put("better", turn="1")
            await client.put("own", turn="2")
            await client.put("better", turn="3")
            answers.append(await client.get("?after=1"))

    with asyncio.Runner(loop_factory=PluginLoop) as runner:
        runner.run(work())
    return answers[0].body


def encode(document: object) -> bytes:
    return json.dumps(document).encode()


def test_state_of_the_plugin(document: dict[str, Any]) -> None:
    state = parse_state(encode(document))
    assert state.own is not None
    assert state.loaded is not None
    assert state.lease is not None
    assert state.last_failure is not None
    assert (state.own.digest, state.loaded.digest) == (make_drafter("own")["digest"], make_drafter("better")["digest"])
    assert (state.swaps, state.failures, state.last_failure.problem.reason) == (3, 1, "SwapFailed")
    assert [(window.number, window.turn) for window in state.windows] == [(2, "1"), (3, "2"), (4, "3")]


COMMIT = "0123456789" * 4
FOLDER_SOURCE = DrafterSource(folder="/drafters/better")
HUB_SOURCE = DrafterSource(repository="owner/better", revision=COMMIT)
PROBLEM = Problem("NoAccess", "the Hub rejects the token.")


def make_preparation(source: DrafterSource, phase: str) -> dict[str, Any]:
    """Return what the plugin reports of a preparation."""
    ready = phase == "Ready"
    drafter = make_drafter("better") if ready else dict.fromkeys(("digest", "files", "kind"))
    return {
        **drafter,
        "source": source.fields,
        "phase": phase,
        "seconds": 1.5,
        "folder": "/drafters/better" if ready else None,
        "commit": COMMIT if ready and source == HUB_SOURCE else None,
        "problem": {"reason": PROBLEM.reason, "message": PROBLEM.message} if phase == "Failed" else None,
    }


@pytest.mark.parametrize("source", [FOLDER_SOURCE, HUB_SOURCE])
def test_preparation_of_the_plugin(document: dict[str, Any], source: DrafterSource) -> None:
    files = DrafterFiles(make_files("better"), "/drafters/better")
    commit = COMMIT if source == HUB_SOURCE else None
    for expected in (
        PreparedDrafter(source, "Running", 1.5, None, "", None, None),
        PreparedDrafter(source, "Failed", 1.5, None, "", None, PROBLEM),
        PreparedDrafter(source, "Ready", 1.5, files, "eagle3", commit, None),
    ):
        document["prepared"] = make_preparation(source, expected.phase)
        assert parse_state(encode(document)).prepared == expected


def test_rejection_of_the_plugin(document: dict[str, Any]) -> None:
    document["last_rejection"] = {"reason": PROBLEM.reason, "message": PROBLEM.message, "digest": "0" * 64, "time": 5.0}
    assert parse_state(encode(document)).last_rejection == FailedChange(PROBLEM, "0" * 64, 5.0)


def iter_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from iter_paths(inner, (*path, key))


def test_any_field_with_any_value_is_a_state_or_a_named_field(document: dict[str, Any]) -> None:
    messages = []
    for path in iter_paths(document):
        for bad in (*BAD_VALUES, "missing"):
            changed = copy.deepcopy(document)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if bad == "missing":
                del parent[path[-1]]
            else:
                parent[path[-1]] = bad
            try:
                parse_state(encode(changed))
            except FieldError as error:
                messages.append(str(error))
    assert len(messages) > 500
    assert not any("xxx" in message for message in messages), "a message quotes nothing"
    assert max(map(len, messages)) < 250


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("loaded", "files", "config.json"), "0" * 64, "a drafter's digest is not that of its files"),
        (("loaded", "files", "../config.json"), "0" * 64, "loaded.files has a field that does not match"),
        (("windows", 0, "ended"), None, "an earlier one has not ended"),
        (("windows", 1, "number"), 9, "windows are not numbered without gaps"),
        (("windows", 2, "digest"), "0" * 64, "the current window is not of the loaded drafter"),
        (("windows", 2, "started"), -1, r"windows\[2\].started is not a number"),
        (("windows", 2, "counts", "x"), {"y": True}, r"windows\[2\].counts has a value that is not a number"),
        (("swaps",), 2.0, "swaps is not an integer"),
        (("engine", "counting"), 1, "engine.counting is neither true nor false"),
        (("lease", "remaining_seconds"), -0.1, "lease.remaining_seconds is not a number"),
        (("process", "id"), "a" * 31, r"process.id does not match"),
        (("last_rejection",), {"reason": "Shape", "message": "", "digest": "0" * 64}, "last_rejection.time is not a number"),
        (("prepared",), {"source": {}}, "prepared.source.repository does not match"),
        (("prepared",), make_preparation(FOLDER_SOURCE, "Done"), "prepared.phase does not match"),
        (("prepared",), make_preparation(FOLDER_SOURCE, "Ready") | {"digest": "0" * 64}, "a drafter's digest is not that"),
        (("prepared",), make_preparation(FOLDER_SOURCE, "Ready") | {"folder": "drafters"}, "prepared.folder does not match"),
        (("prepared",), make_preparation(FOLDER_SOURCE, "Failed") | {"problem": None}, "prepared.problem is not an object"),
        (("prepared",), make_preparation(HUB_SOURCE, "Ready") | {"commit": None}, "prepared.commit does not match"),
        (("unfit",), {"reason": "no reason", "message": ""}, "unfit.reason does not match"),
    ],
)
def test_contradictions_are_rejected(document: dict[str, Any], path: tuple[Any, ...], value: Any, message: str) -> None:
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(FieldError, match=message):
        parse_state(encode(document))


def test_too_many_windows_or_files_are_rejected(document: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"windows is not a list of at most {MAX_WINDOWS}"):
        parse_state(encode({**document, "windows": document["windows"] * MAX_WINDOWS}))
    files = {f"{number}.safetensors": "0" * 64 for number in range(MAX_FILES + 1)}
    with pytest.raises(FieldError, match=f"own.files is not an object of at most {MAX_FILES} fields"):
        parse_state(encode({**document, "own": {**document["own"], "files": files}}))


@pytest.mark.parametrize(
    "values", [{"": float(10**19)}, {"": -1.0}, {"": 10**100}, {str(rank): 1.0 for rank in range(100)}, {"x" * 100: 1}]
)
def test_invalid_counters_cost_the_window_only(document: dict[str, Any], values: dict[str, float]) -> None:
    document["windows"][0]["counts"]["vllm:generation_tokens_total"] = values
    window = parse_state(encode(document)).windows[0]
    assert window.counters is None
    assert "vllm:generation_tokens_total" in window.counters_problem


def test_fields_of_a_newer_plugin_are_ignored(document: dict[str, Any]) -> None:
    state = parse_state(encode(document))
    document["windows"][0]["mood"], document["own"]["size"], document["new"] = "fair", 7, [1]
    assert parse_state(encode(document)) == state


def test_messages_are_short_and_printable() -> None:
    problem = parse_problem(encode({"reason": "Broken", "message": "a\x1b[31m\tb\u202e\n" + "ä" * 10_000}))
    assert problem.message.startswith("a?[31m b? ä")
    assert len(problem.message) == MAX_TEXT_CHARACTERS


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff", b"[" * 100_000, b"9" * 9999]
)
def test_bodies_that_are_no_object(body: bytes) -> None:
    with pytest.raises(FieldError):
        parse_object(body)


# ----------------------------------------------------------------------------------------------------------------- calls
FILES = DrafterFiles(make_files("better"), "/drafters/better")


@pytest.mark.parametrize(
    "call",
    [
        LoadDrafter(FILES, 60.0, make_drafter("own")["digest"], "trial/1", 5.0),
        LoadDrafter(FILES, None),
        LoadDrafter(DrafterFiles(make_files("better")), 60.0),
    ],
)
def test_plugin_reads_the_load(call: LoadDrafter) -> None:
    request = build_request(call)
    assert (request.method, request.path) == ("PUT", "/aerie/drafter")
    assert request.body is not None
    parsed = requests.parse_change(request.body)
    assert (parsed.drafter.folder, parsed.drafter.files) == (call.drafter.folder, call.drafter.files)
    assert parsed.drafter.digest == call.drafter.digest
    assert (parsed.lease_seconds, parsed.expected_digest, parsed.turn, parsed.settle_seconds) == (
        call.lease_seconds,
        call.expected_digest,
        call.turn,
        call.settle_seconds,
    )


def test_plugin_reads_the_renewal() -> None:
    request = build_request(RenewLease(FILES.digest, 60.0))
    assert request.body is not None
    assert requests.parse_lease(request.body) == requests.LeaseRequest(FILES.digest, 60.0)
    assert (request.method, request.path) == ("POST", "/aerie/drafter/lease")


@pytest.mark.parametrize("fields", [{}, {"folder": "/x", "repository": "a/b", "revision": "main"}, {"repository": "a/b"}])
def test_source_is_a_folder_or_a_repository(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs either folder, or repository and revision"):
        DrafterSource(**fields)


@pytest.mark.parametrize("source", [FOLDER_SOURCE, HUB_SOURCE])
def test_plugin_reads_the_preparation_and_the_expectation(source: DrafterSource) -> None:
    request = build_request(PrepareDrafter(source))
    assert (request.method, request.path) == ("POST", "/aerie/drafter/prepare")
    assert request.body is not None
    assert requests.parse_preparation(request.body).fields == source.fields
    expected = requests.parse_expected(encode({**source.fields, "files": make_files("better")}))
    assert (expected.source.fields, expected.files) == (source.fields, make_files("better"))


def test_return_has_no_body() -> None:
    call: DrafterCall = ReturnToOwn()
    assert build_request(call).body is None


def test_limits_are_the_plugins() -> None:
    assert MAX_FILES == requests.MAX_FILES
    assert MAX_WINDOWS == counters.MAX_WINDOWS + 1
    assert state_module._TURN.pattern == requests._TURN.pattern
    assert state_module._FILE_NAME.pattern == requests._FILE_NAME.pattern
    assert state_module._FOLDER.pattern == requests._FOLDER.pattern
    assert state_module._REPOSITORY.pattern == requests._REPOSITORY.pattern
    assert state_module._REVISION.pattern == requests._REVISION.pattern


def test_all_windows_with_all_counters_fit() -> None:
    series = {name: {str(value): 123456789.123456 for value in range(24)} for name in counters.SERIES if name.endswith("_bucket")}
    series |= {name: {str(value): 123456789.123456 for value in range(5)} for name in counters.SERIES - series.keys()}
    window = {"counts": series, "settling_counts": series, "digest": "0" * 64, "turn": "t" * 64, "started": 1764168000.123456}
    assert MAX_WINDOWS * len(encode(window)) < MAX_STATE_BYTES
