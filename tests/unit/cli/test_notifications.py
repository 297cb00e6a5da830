"""`aerie notifications test`: what it sends to a real receiver, and what it prints of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aerie.cli.app import run_command_line
from aerie.cli.commands.operator import read_notifications

STATUS_BY_PATH = {"/services/T0SECRET": 200, "/refuses/T0SECRET": 403}


class Handler(BaseHTTPRequestHandler):
    """Repeats in its responses the secrets of the requests."""

    received: list[dict[str, str]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).received.append(body)
        content = f"[bold]you sent {self.headers.get('Authorization')} to {self.path}".encode()
        self.send_response(STATUS_BY_PATH[self.path])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """The file of two receivers, one of which refuses."""
    Handler.received = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "url").write_text(f"{address}/services/T0SECRET")
        (tmp_path / "headers").write_text("Authorization: Bearer T1SECRET")
        (tmp_path / "config.yaml").write_text(
            "receivers:\n"
            "  serving: {type: slack, urlFile: url, headersFile: headers}\n"
            f"  refuses: {{type: teams, url: '{address}/refuses/T0SECRET'}}\n"
            "  absent: {type: slack, urlFile: nothing}\n"
        )
        yield tmp_path / "config.yaml"
        server.shutdown()
        thread.join()


def test_message_and_response_are_printed_without_secrets(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "notifications",
        "test",
        "--config",
        str(config),
        "--receiver",
        "serving",
        "--recipient",
        "#x",
        "--source",
        "prod",
    ]
    assert run_command_line(arguments) == 0
    (sent,) = Handler.received
    assert sent["channel"] == "#x"
    assert sent["text"].startswith("*[prod] default/notification-test: promoted*\nThis is a test: nothing changes for clients.\n")
    shown = capsys.readouterr().out
    assert "serving: POST to 127.0.0.1\n" in shown
    assert "Authorization: ***" in shown
    assert "response: 200 accepted\n  [bold]you sent *** to ***" in shown
    assert "SECRET" not in shown


def test_each_receiver_is_tried(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["notifications", "test", "--config", str(config), "--event", "failed"]) == 1
    captured = capsys.readouterr()
    assert "response: 403 not accepted" in captured.out
    assert "absent: not sent: the file" in captured.err
    assert len(Handler.received) == 2
    assert "SECRET" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--event", "promotd"], "--event is promotd: set one of started, "),
        (["--receiver", "nobody"], "--receiver is nobody, which "),
        (["--receiver", "refuses", "--recipient", "x"], "receiver refuses takes no recipient"),
    ],
)
def test_wrong_call_sends_nothing(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run_command_line(["notifications", "test", "--config", str(config), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert Handler.received == []


def test_wrong_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("receivers: {a: {type: slack}}")
    assert run_command_line(["notifications", "test", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "--config: receivers.a: set either url or urlFile" in capsys.readouterr().err


def test_operator_starts_with_a_broken_secret(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifications = read_notifications(str(config), "http://hook.example/T0SECRET", None, "prod")
    assert [receiver.name for receiver in notifications.receivers] == ["notify-url", "serving", "refuses", "absent"]
    assert "notifications: receiver absent: the file" in caplog.text
    assert "SECRET" not in caplog.text
    assert notifications.find_recipients("explored", "default", ()) == {"notify-url": [""]}
