"""Commands about resources in a cluster: what they show, what they write, and how they end; kubectl is a script here."""

from __future__ import annotations

import importlib
import json
import os
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.api.status import Phase
from aerie.cli.app import COMMANDS, FLEET_PANEL, run_command_line
from aerie.cli.console import CommandError, out
from aerie.cli.fleet import screens
from aerie.cli.fleet.actions import EXTEND, RETRY, ROLLBACK, ActionName, build_action, build_extension, parse_extension
from aerie.cli.fleet.attention import State, find_attention_reason, find_state, is_extensible, list_possible_actions
from aerie.cli.fleet.kubectl import ConflictError, Kubectl
from aerie.cli.fleet.resource_view import ResourceView, format_age
from aerie.cli.fleet.screens import METRIC_TITLES, draw_interval
from aerie.cli.fleet.wait import MAX_RECORDED_RETRY_CHARACTERS, Goal, is_reached, parse_timeout
from tests.golden import Messages
from tests.unit.cli.fleet_documents import Document, analyzing, condition, ready
from tests.unit.rollout.world import world_in_phase

NOW = datetime(2026, 11, 28, 8, 30, tzinfo=UTC)
PHASES: tuple[Phase, ...] = Phase.__args__  # type: ignore[attr-defined]


def render(renderable: Any, width: int) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


# -- screens
@pytest.mark.parametrize("width", [80, 130])
def test_screens_fit_the_terminal(width: int, messages: Messages) -> None:
    views = [ResourceView(document) for document in (analyzing(), ready("coder"), analyzing("Held", "k2"))]
    parts = {
        "list": screens.render_list(views, NOW, width=width, is_wide=False, with_namespace=True),
        "status": screens.render_status(views[0], NOW, width=width, shows_all=False),
        "held": screens.render_status(views[2], NOW, width=width, shows_all=True),
        "history": screens.render_history(views[0]),
    }
    for name, part in parts.items():
        text = render(part, width)
        assert max(map(len, text.splitlines())) <= width
        messages.check(f"{name}, {width} columns", text)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_a_screen_and_actions(phase: Phase) -> None:
    for document in (ready(phase=phase), analyzing(phase), ready(phase=phase, conditions=[], stable=None)):
        view = ResourceView(document)
        assert phase in render(screens.render_status(view, NOW, width=80, shows_all=True), 80)
        assert list(list_possible_actions(view))


STATES = {
    "Preflight": State.IN_PROGRESS,
    "Queued": State.IN_PROGRESS,
    "Starting": State.IN_PROGRESS,
    "Staging": State.IN_PROGRESS,
    "Evaluating": State.IN_PROGRESS,
    "Ready": State.SERVING,
    "WarmingUp": State.IN_PROGRESS,
    "Analyzing": State.IN_PROGRESS,
    "AwaitingApproval": State.WAITING,
    "Ramping": State.IN_PROGRESS,
    "Promoting": State.IN_PROGRESS,
    "Monitoring": State.SERVING,
    "Verifying": State.SERVING,
    "RollingBack": State.IN_PROGRESS,
    "Held": State.WAITING,
    "RolledBack": State.WAITING,
    "Paused": State.WAITING,
    "Failed": State.FAILED,
}
"""State of a resource whose clients are served, by phase."""
UNSERVED: dict[str, Any] = {"conditions": [condition("Ready", "False", "PodsNotReady", "0/4 pods ready")]}
STARTING_PHASES = ("Preflight", "Queued", "Starting")


def test_the_table_of_states_has_every_phase() -> None:
    assert STATES.keys() == set(PHASES)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_a_state(phase: Phase) -> None:
    assert find_state(ResourceView(ready(phase=phase))) is STATES[phase]
    assert find_state(ResourceView(analyzing(phase))) is STATES[phase]
    assert find_state(ResourceView(ready(phase=phase, **UNSERVED))) is State.FAILED
    first = find_state(ResourceView(ready(phase=phase, stable=None, **UNSERVED)))
    assert first is (State.IN_PROGRESS if phase in STARTING_PHASES else State.FAILED)


def test_the_page_has_the_phases_of_each_state() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "cli.md").read_text()
    rows = dict(re.findall(rf"^\| ({'|'.join(State)}) \|.*\| (.*) \|$", page, re.MULTILINE))
    for state in State:
        listed = set(re.findall(r"[A-Z]\w+", rows[state].partition(";")[0]))
        assert listed == {phase for phase, each in STATES.items() if each is state}


@pytest.mark.parametrize("phase", PHASES)
def test_the_state_agrees_with_what_waits_for_a_user(phase: Phase) -> None:
    for document in (ready(phase=phase), analyzing(phase), ready(phase=phase, **UNSERVED)):
        view = ResourceView(document)
        assert bool(find_attention_reason(view)) == (find_state(view) in (State.WAITING, State.FAILED))


def test_other_statuses_have_a_state_too() -> None:
    new = ready()
    new["status"] = {}
    assert find_state(ResourceView(new)) is State.IN_PROGRESS
    assert find_state(ResourceView(ready(phase="OfALaterRelease"))) is State.IN_PROGRESS


@pytest.mark.parametrize("width", [80, 130])
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_list_is_not_cropped(width: int, is_wide: bool) -> None:
    documents = [
        *(document for phase in PHASES for document in (ready("llama-70b-chat", phase), analyzing(phase, "coder"))),
        ready("k2", **UNSERVED),
    ]
    views = [ResourceView(document) for document in documents]
    console = Console(width=width, highlight=False, color_system=None)
    for with_namespace in (False, True):
        with console.capture() as capture:
            screen = screens.render_list(views, NOW, width=width, is_wide=is_wide, with_namespace=with_namespace)
            console.print(screen, crop=False)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        assert is_wide or max(map(len, lines)) <= width
        words = " ".join(lines).split()
        assert not [cell for cell in words if "…" in cell and "/" not in cell], "only a drafter is shortened"
        for text in ("NAME", "STATE", "NEXT", "serving", "failed", "inconclusive:", *(["REVISION", "71a723caa5"] * is_wide)):
            assert text in words
        for state in State:
            assert any(f" {state} " in f"{line} " for line in lines)
        assert ("AwaitingApproval" in words) == is_wide


def test_a_list_with_long_names_is_not_cropped() -> None:
    view = ResourceView(analyzing("Held", "n" * 63))
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(screens.render_list([view], NOW, width=80, is_wide=False, with_namespace=True), crop=False)
    text = capture.get()
    assert "n" * 63 in text
    assert State.WAITING in text
    assert "inconclusive:" in text


def test_text_of_the_cluster_moves_no_cursor() -> None:
    document = analyzing()
    document["status"]["canary"]["drafter"] = "acme/\x1b[2Jdrafter[bold]"
    text = render(screens.render_status(ResourceView(document), NOW, width=130, shows_all=False), 130)
    assert "\x1b" not in text
    assert "drafter[bold]" in text


def test_every_criterion_has_a_title() -> None:
    assert METRIC_TITLES.keys() >= {criterion.name for criterion in build_criteria(AnalysisPlan())}


@pytest.mark.parametrize(
    ("interval", "bar"),
    [
        ((0.0, -0.1, 0.1), "├─────────●─────────┤"),
        ((0.2, 0.15, 0.3), "          │         ●"),
        ((0.0, None, None), "          ●"),
        ((0.0, -0.05, None), "     ├────●─────────▸"),
        ((None, None, None), ""),
    ],
)
def test_intervals_are_drawn_in_the_same_width(interval: tuple[float | None, float | None, float | None], bar: str) -> None:
    assert draw_interval(*interval).rstrip() == bar or draw_interval(*interval) == bar


def test_ages() -> None:
    ages = {0: "0 s", 59: "59 s", 60: "1 min", 3660: "1 h 1 min", 90000: "1 d 1 h"}
    for seconds, text in ages.items():
        assert format_age(datetime.fromtimestamp(0, UTC), datetime.fromtimestamp(seconds, UTC)) == text


# -- decisions
def test_decisions_name_the_revision_and_test_the_resource() -> None:
    action = build_action(ResourceView(analyzing()), "rollback", "alice", "slow in EU", NOW)
    tests = [operation for operation in action.operations if operation["op"] == "test"]
    assert {item["path"]: item["value"] for item in tests} == {
        "/metadata/uid": "6b1f",
        "/metadata/generation": 3,
        "/metadata/resourceVersion": "77",
    }
    (written,) = [operation for operation in action.operations if operation["op"] == "add"]
    assert written["path"] == "/metadata/annotations"
    assert written["value"][ROLLBACK] == "b2657d3a14"
    requested_by = json.loads(written["value"]["aerie.dev/requested-by"])
    assert requested_by == {"action": "rollback", "user": "alice", "time": "2026-11-28T08:30:00Z", "reason": "slow in EU"}


def test_further_annotations_are_kept() -> None:
    document = analyzing()
    document["metadata"]["annotations"] = {"a": "b"}
    operations = build_action(ResourceView(document), "promote", "", "", NOW).operations
    assert "/metadata/annotations/aerie.dev~1promote" in [operation["path"] for operation in operations]


def test_a_decision_replaces_earlier_ones() -> None:
    document = ready(phase="RolledBack")
    document["metadata"]["annotations"] = {"aerie.dev/rollback": "b2657d3a14", "aerie.dev/promote": "71a723caa5", "a": "b"}
    operations = build_action(ResourceView(document), "retry", "", "", NOW).operations
    removed = {operation["path"].partition("~1")[2] for operation in operations if operation["op"] == "remove"}
    assert removed == {"rollback", "promote"}
    document = analyzing("Held")
    document["metadata"]["annotations"] = {EXTEND: "b2657d3a14/2026-11-28T09:00:00Z"}
    operations = build_action(ResourceView(document), "rollback", "", "", NOW).operations
    assert "/metadata/annotations/aerie.dev~1extend" in {item["path"] for item in operations if item["op"] == "remove"}


@pytest.mark.parametrize("name", ["promote", "rollback", "retry", "pause", "resume"])
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_offered_is_what_is_possible(phase: Phase, name: ActionName) -> None:
    paused = analyzing(phase)
    paused["spec"]["rollout"] = {"paused": True}
    for document in (ready(phase=phase), analyzing(phase), paused):
        view = ResourceView(document)
        if name in list_possible_actions(view):
            assert build_action(view, name, "", "", NOW).operations
        else:
            with pytest.raises(CommandError, match=f"{name} is not possible in phase {phase}"):
                build_action(view, name, "", "", NOW)


def test_a_reason_is_one_line_about_a_rollout() -> None:
    for reason in ("a\nb", "a\tb", "x" * 300):
        with pytest.raises(CommandError, match="one line"):
            build_action(ResourceView(analyzing()), "promote", "", reason, NOW)
    with pytest.raises(CommandError, match="leave it out"):
        build_action(ResourceView(analyzing()), "pause", "", "lunch", NOW)


def test_an_extension_names_revision_end_and_user() -> None:
    document = analyzing("Held")
    document["metadata"]["annotations"] = {"team": "chat"}
    action = build_extension(ResourceView(document), timedelta(minutes=90), "alice", "more traffic at ten", NOW)
    end, requested_by = (operation["value"] for operation in action.operations if operation["op"] == "add")
    assert end == "b2657d3a14/2026-11-28T10:00:00Z"
    assert json.loads(requested_by)["action"] == "extend"
    assert {operation["path"] for operation in action.operations if operation["op"] == "test"} == {
        "/metadata/uid",
        "/metadata/generation",
    }


def in_place_held() -> Document:
    rollout = {"revision": "b2657d3a14", "drafter": "acme/llama", "change": "drafter acme/llama", "phase": "Held", "pods": []}
    return ready(phase="Held", inPlaceRollout=rollout)


@pytest.mark.parametrize("phase", PHASES)
def test_an_extension_is_offered_where_it_is_possible(phase: Phase) -> None:
    paused = analyzing(phase)
    paused["spec"]["rollout"] = {"paused": True}
    for document in (ready(phase=phase), analyzing(phase), in_place_held(), paused):
        view = ResourceView(document)
        screen = render(screens.render_status(view, NOW, width=130, shows_all=True), 130)
        assert ("kubectl aerie resume --for 30m chat" in screen) == is_extensible(view)
        if is_extensible(view):
            assert phase == "Held"
            assert build_extension(view, timedelta(minutes=30), "", "", NOW).operations
        else:
            with pytest.raises(CommandError, match=f"resume --for is not possible in phase {view.phase}: "):
                build_extension(view, timedelta(minutes=30), "", "", NOW)


def test_in_place_says_why_it_is_not_extended() -> None:
    with pytest.raises(CommandError, match="all pods serve with the stable drafter again"):
        build_extension(ResourceView(in_place_held()), timedelta(minutes=30), "", "", NOW)


def test_durations_of_extensions() -> None:
    durations = {"1m": 1, "30m": 30, "2h": 120, "1h30m": 90, "24h": 1440}
    assert {text: parse_extension(text) // timedelta(minutes=1) for text in durations} == durations
    for text in ("", "0m", "30", "30s", "1441m", "25h", "30m1h", "1.5h", "-5m", "m", "٣0m", "30 m"):
        with pytest.raises(CommandError, match="use a duration from 1m to 24h"):
            parse_extension(text)


# -- waits
def test_a_wait_ends_with_the_present_spec() -> None:
    for goal in Goal:
        old = ready()
        old["status"]["observedGeneration"] = 2
        assert is_reached(ResourceView(old), goal) is None, "the operator has not seen the spec yet"
    promoted, rolled_back, open_ = (ResourceView(each) for each in (ready(), ready(phase="RolledBack"), analyzing()))
    assert [is_reached(view, Goal.PROMOTED) for view in (promoted, rolled_back, open_)] == [True, False, None]
    assert [is_reached(view, Goal.ROLLED_BACK) for view in (promoted, rolled_back, open_)] == [False, True, None]
    assert [is_reached(view, Goal.DECIDED) for view in (promoted, rolled_back, open_)] == [True, True, None]
    assert [is_reached(view, Goal.ATTENTION) for view in (promoted, rolled_back, open_)] == [None, True, None]


def test_unserved_clients_come_first() -> None:
    document = ready(conditions=[condition("Ready", "False", "CrashLoopBackOff", "0/4 pods ready: no node has a free GPU")])
    assert "no node has a free GPU" in find_attention_reason(ResourceView(document))


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90s", 90), ("1h30m", 5400), ("2.5", 2.5), ("0", 0)])
def test_time_limits_are_written_as_in_kubectl(text: str, seconds: float) -> None:
    assert parse_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "1d", "5 m"])
def test_other_time_limits_are_rejected(text: str) -> None:
    with pytest.raises(CommandError, match="use a time such as 10m"):
        parse_timeout(text)


# -- the command line
@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that prints `out.json`, logs its arguments, and fails as `fail` says."""
    script = tmp_path / "kubectl"
    script.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$*" >> "$KUBECTL_FOLDER/log"\n'
        '[ -f "$KUBECTL_FOLDER/fail" ] && { cat "$KUBECTL_FOLDER/fail" >&2; exit 1; }\n'
        '[ "$1" = patch ] && [ -f "$KUBECTL_FOLDER/fail-patch" ] && { cat "$KUBECTL_FOLDER/fail-patch" >&2; exit 1; }\n'
        'case "$*" in *--watch*) cat "$KUBECTL_FOLDER/watch.json"; exit;; esac\n'
        '[ "$1" = auth ] && { echo \'{"status": {"userInfo": {"username": "alice"}}}\'; exit; }\ncat "$KUBECTL_FOLDER/out.json"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path))
    (tmp_path / "out.json").write_text(json.dumps(analyzing()))
    return tmp_path


def log(kubectl: Path) -> list[str]:
    return (kubectl / "log").read_text().splitlines()


def test_flags_of_kubectl_are_passed_on(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command_line(["status", "chat", "-n", "prod", "--context", "eu", "--as-group", "a", "--as-group", "b", "-o", "json"])
        == 0
    )
    flags = "--namespace=prod --context=eu --as-group=a --as-group=b"
    assert log(kubectl) == [f"{flags} get speculativedeployments.aerie.dev chat -o json"]
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == ("cli.aerie.dev/v1", "ResourceStatus")
    assert "state" not in document["analysis"]


def test_a_decision_is_written_with_its_author(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["promote", "chat", "--reason", "checked", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("Checked, nothing is written: Revision b2657d3a14")
    patch = log(kubectl)[-1]
    assert "--dry-run=server" in patch
    assert '\\"user\\": \\"alice\\"' in patch


@pytest.mark.parametrize("command", [["status", "chat", "--all"], ["explain", "chat"], ["history", "chat"], ["list"]])
def test_long_messages_are_shown_whole_at_80_columns(
    kubectl: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "Tokens per step +4.2 % vs control, confidence bounds +3.8 % to +4.5 %, significantly above -2.0 %, after all. END"
    document = analyzing()
    document["status"]["conditions"][1]["message"] = document["status"]["analysis"]["message"] = message
    document["status"]["rolloutHistory"][0]["message"] = message
    document["status"]["analysis"]["comparisons"][0]["requirement"] = "below +32.9 % and measured below +10.4 % END"
    (kubectl / "out.json").write_text(json.dumps({"items": [document]} if command == ["list"] else document))
    monkeypatch.setattr(out, "width", 80)
    assert run_command_line(command) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert command == ["list"] or "END" in shown


def test_a_changed_resource_is_a_conflict(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "fail-patch").write_text(
        'The SpeculativeDeployment "chat" is invalid: the server rejected our request due to an error in our request\n'
    )
    assert run_command_line(["promote", "chat"]) == 3
    assert "Nothing was written, because the resource has changed" in " ".join(capsys.readouterr().err.split())


def test_resume_extends_only_with_a_duration(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "out.json").write_text(json.dumps(analyzing("Held")))
    assert run_command_line(["resume", "chat", "--for", "30m", "--reason", "more traffic"]) == 0
    assert capsys.readouterr().out.startswith("The analysis of revision b2657d3a14 continues until ")
    assert "aerie.dev/extend" in log(kubectl)[-1]
    assert run_command_line(["resume", "chat", "--for", "30d"]) == 2
    assert "--for is '30d': use a duration from 1m to 24h" in capsys.readouterr().err
    assert run_command_line(["resume", "chat"]) == 2
    assert "it is not paused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stderr", "status", "text"),
    [
        ('Error from server (NotFound): speculativedeployments.aerie.dev "chat" not found', 2, "kubectl aerie list -A"),
        ('error: the server doesn\'t have a resource type "speculativedeployments"', 2, "install Aerie in this cluster"),
        ("Unable to connect to the server: dial tcp: lookup x: no such host", 2, "check the connection"),
        ("", 2, "kubectl failed without a message"),
    ],
)
def test_failures_say_what_to_do(kubectl: Path, stderr: str, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "fail").write_text(stderr)
    assert run_command_line(["status", "chat"]) == status
    assert text in capsys.readouterr().err


def test_attention_ends_with_1_if_a_user_is_needed(kubectl: Path) -> None:
    (kubectl / "out.json").write_text(json.dumps({"items": [analyzing()]}))
    assert run_command_line(["list", "-A", "--attention"]) == 0
    (kubectl / "out.json").write_text(json.dumps({"items": [analyzing("Held")]}))
    assert run_command_line(["list", "-A", "--attention"]) == 1


def test_waits_end_by_their_result(kubectl: Path) -> None:
    assert run_command_line(["wait", "chat", "--timeout", "0"]) == 4
    (kubectl / "out.json").write_text(json.dumps(ready(phase="RolledBack")))
    assert run_command_line(["wait", "chat", "--for", "promoted"]) == 1
    assert run_command_line(["wait", "chat", "--for", "rolledback"]) == 0


def test_a_watch_shows_each_change_until_the_resource_is_deleted(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [("ADDED", analyzing()), ("MODIFIED", ready()), ("DELETED", ready())]
    text = "".join(json.dumps({"type": kind, "object": item}) + "\n" for kind, item in events)  # as kubectl writes them
    (kubectl / "watch.json").write_text(text)
    assert run_command_line(["status", "chat", "--watch"]) == 2
    output = capsys.readouterr()
    assert output.out.index("Analyzing") < output.out.index("Ready")
    assert "SpeculativeDeployment chat was deleted" in output.err


def test_a_watch_goes_on_after_the_server_has_ended_it(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (kubectl / "watch.json").write_text("")

    def end(_: float) -> None:
        text = "".join(json.dumps({"type": kind, "object": ready()}) + "\n" for kind in ("MODIFIED", "DELETED"))
        (kubectl / "watch.json").write_text(text)

    monkeypatch.setattr("time.sleep", end)
    assert run_command_line(["status", "chat", "--watch"]) == 2
    assert "Ready" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["-A", "--server=http://other", "", "a,b", "chat/x", "Ünï", "x" * 254])
def test_only_names_are_passed_to_kubectl(kubectl: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "promote", "wait", "explain"):
        assert run_command_line([command, "--", name]) == 2
        assert "cannot be the name of a SpeculativeDeployment" in " ".join(capsys.readouterr().err.split())
    assert not (kubectl / "log").exists()


def test_a_wait_outlasts_a_failover(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_then_recover(_: float) -> None:
        fail = kubectl / "fail"
        if not fail.exists():
            fail.write_text("Unable to connect to the server: net/http: TLS handshake timeout")
        else:
            fail.unlink()
            (kubectl / "out.json").write_text(json.dumps(ready()))

    monkeypatch.setattr("time.sleep", fail_then_recover)
    assert run_command_line(["wait", "chat"]) == 0


def test_a_wait_is_for_the_users_last_request() -> None:
    document = ready(phase="RolledBack", lastHandledRetry="1")
    document["metadata"]["annotations"] = {RETRY: "2"}
    assert is_reached(ResourceView(document), Goal.DECIDED) is None
    document["status"]["lastHandledRetry"] = "2"
    assert is_reached(ResourceView(document), Goal.DECIDED) is True
    document = ready(phase="Monitoring")
    document["metadata"]["annotations"] = {ROLLBACK: "71a723caa5"}
    assert is_reached(ResourceView(document), Goal.ROLLED_BACK) is None


def test_a_retry_is_recorded_as_it_is_up_to_a_length() -> None:
    recorded = {}
    for length in (MAX_RECORDED_RETRY_CHARACTERS, MAX_RECORDED_RETRY_CHARACTERS + 1):
        world, _ = world_in_phase("Analyzing")
        world.annotate(retry="x" * length)
        world.step()
        recorded[length] = world.status["lastHandledRetry"] == "x" * length
    assert list(recorded.values()) == [True, False]


def test_a_superseded_canary_is_no_promotion() -> None:
    world, _ = world_in_phase("Analyzing")
    world.drafter("third")
    for _ in range(8):
        world.step()
        view = ResourceView(world.document)
        assert not is_reached(view, Goal.PROMOTED), view.status.get("phase")


@pytest.mark.usefixtures("kubectl")
def test_annotations_of_others_and_changes_of_the_status_delay_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def patch(*arguments: Any, **_: Any) -> None:
        attempts.append(arguments)
        if len(attempts) < 3:
            raise ConflictError("changed")

    monkeypatch.setattr(Kubectl, "patch", patch)
    assert run_command_line(["promote", "chat"]) == 0
    assert len(attempts) == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_summaries_are_the_first_sentence_of_the_help(name: str) -> None:
    entry = COMMANDS[name]
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    text = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    assert " ".join((text or "").split()).startswith(entry.summary)


def test_the_help_breaks_no_line_where_the_source_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run_command_line(["preflight", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (paragraph,) = [line for line in lines if line.startswith("Reads only configs")]
    assert paragraph.endswith("the API server would reject the manifest.")


@pytest.mark.parametrize("name", COMMANDS)
def test_only_the_requested_command_is_imported(name: str) -> None:
    code = f"import sys; from aerie.cli.app import build_app; build_app({name!r}); print(sorted(sys.modules))"
    imported = set(eval(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout))  # noqa: S307
    modules = {entry.module for entry in COMMANDS.values()} - {COMMANDS[name].module}
    assert not imported & modules - ({"aerie.cli.commands.preflight"} if COMMANDS[name].panel != FLEET_PANEL else set())
    if COMMANDS[name].panel == FLEET_PANEL:
        assert not imported & {"pydantic", "kopf", "kubernetes", "numpy", "httpx", "aerie.api"}
