"""The file of receivers: what is accepted, and errors that name the field and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from aerie.controller.notifications.config import (
    MAX_RECEIVER_NAME_CHARACTERS,
    MAX_RECEIVERS,
    NotificationsConfig,
    NotificationsConfigError,
    find_file_problems,
    read_notifications_config,
    with_url_receiver,
)
from aerie.controller.notifications.receiver import Endpoint, ReceiverError
from aerie.rollout.status.notifications import EVENT_TYPES
from tests.golden import Messages


def read(folder: Path, text: str) -> NotificationsConfig:
    (folder / "config.yaml").write_text(text)
    return read_notifications_config(folder / "config.yaml", "prod")


def receiver(fields: str) -> str:
    return f"receivers: {{team: {{{fields}}}}}"


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    config = read(tmp_path, receiver("type: slack, urlFile: hook, headersFile: /etc/headers"))
    (team,) = config.receivers
    assert team.endpoint == Endpoint(None, tmp_path / "hook", Path("/etc/headers"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown type", receiver("type: slak, url: 'http://secret.example'")),
        ("no address", receiver("type: slack")),
        ("two addresses", receiver("type: slack, url: 'http://secret.example', urlFile: x")),
        ("not an address", receiver("type: slack, url: secret.example")),
        ("address in place of a path", receiver("type: slack, urlFile: 'https://secret.example/x'")),
        ("address with a space", receiver("type: slack, url: 'https://secret.example/ x'")),
        ("unknown field", receiver("type: slack, url: 'http://secret.example', chanel: x")),
        ("no body", receiver("type: webhook, url: 'http://secret.example'")),
        ("body of another type", receiver("type: slack, url: 'http://secret.example', body: x")),
        ("content type of another type", receiver("type: slack, url: 'http://secret.example', contentType: text/plain")),
        ("content type", receiver("type: webhook, url: 'http://secret.example', body: x, contentType: json")),
        ("name", "receivers: {Team.A: {type: slack, url: 'http://secret.example'}}"),
        ("template", receiver("type: webhook, url: 'http://secret.example', body: '{{ x }}'")),
        ("subscription without receiver", "receivers: {}\nsubscriptions: [{receiver: nobody}]"),
        (
            "unknown event",
            receiver("type: slack, url: 'http://secret.example'") + "\nsubscriptions: [{receiver: team, events: [promotd]}]",
        ),
        (
            "recipient of Teams",
            receiver("type: teams, url: 'http://secret.example'") + "\nsubscriptions: [{receiver: team, recipient: a}]",
        ),
        ("no mapping", "- a"),
        ("no receivers", "subscriptions: []"),
    ],
)
def test_error_names_the_field_and_no_secret(tmp_path: Path, messages: Messages, name: str, text: str) -> None:
    with pytest.raises(NotificationsConfigError) as rejection:
        read(tmp_path, text)
    assert "secret" not in str(rejection.value)
    messages.check(name, str(rejection.value).replace(str(tmp_path), "/etc/aerie"))


def test_file_that_is_missing_or_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(NotificationsConfigError, match="cannot be read"):
        read_notifications_config(tmp_path / "absent.yaml", "prod")
    with pytest.raises(NotificationsConfigError, match="is not YAML"):
        read(tmp_path, "receivers: {")


def test_number_of_receivers_is_limited(tmp_path: Path) -> None:
    fields = "{type: slack, url: 'http://a.example'}"
    entries = [f"r{number}: {fields}" for number in range(MAX_RECEIVERS + 1)]
    assert len(read(tmp_path, f"receivers: {{{', '.join(entries[:-1])}}}").receivers) == MAX_RECEIVERS
    with pytest.raises(NotificationsConfigError, match="receivers: dictionary should have at most 50 items"):
        read(tmp_path, f"receivers: {{{', '.join(entries)}}}")


def test_longest_annotation_is_valid() -> None:
    assert max(len(f"subscribe.{event}.{'x' * MAX_RECEIVER_NAME_CHARACTERS}") for event in EVENT_TYPES) <= 63


def test_url_receiver_has_a_name_of_its_own(tmp_path: Path) -> None:
    config = read(tmp_path, "receivers: {notify-url: {type: slack, url: 'http://a.example'}}")
    with pytest.raises(NotificationsConfigError, match="rename it"):
        with_url_receiver(config, Endpoint("http://b.example"), "prod")


def test_missing_files_are_problems_and_no_errors(tmp_path: Path) -> None:
    config = read(tmp_path, receiver("type: slack, urlFile: absent"))
    (problem,) = find_file_problems(config)
    assert problem.startswith("receiver team: the file ")
    (tmp_path / "absent").write_text("http://a.example\n")
    assert find_file_problems(config) == []


@pytest.mark.parametrize(
    "url", ["chat.example.com/secret", "ftp://secret", "http://", "http://secret:99999/", "http://a/\x7fsecret"]
)
def test_invalid_address_is_rejected_without_itself(url: str) -> None:
    with pytest.raises(ReceiverError, match="must begin with http:// or https://") as rejection:
        Endpoint(url).read_url()
    assert "secret" not in str(rejection.value)


@pytest.mark.parametrize("line", ["secret", "secret name: x", "X-Key: se\x00cret", "X-Key: secrét", "X-Key:"])
def test_invalid_header_is_rejected_without_itself(tmp_path: Path, line: str) -> None:
    (tmp_path / "headers").write_text(line)
    with pytest.raises(ReceiverError, match="a line that is not a header") as rejection:
        Endpoint("http://a.example", headers_file=tmp_path / "headers").read_headers()
    assert "cret" not in str(rejection.value)


def test_unreadable_file_of_headers_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ReceiverError, match="cannot be read"):
        Endpoint("http://a.example", headers_file=tmp_path / "nothing").read_headers()
