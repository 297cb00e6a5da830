"""What an evaluator is started with, checked: an error names the option, its value and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from aerie.evaluator.admission import IN_FLIGHT, WAITING
from aerie.evaluator.isolated import IsolatedEngine
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import ReplayRules

MIN_TOKEN_CHARACTERS = 32
"""Fewest characters of the bearer token."""


class SettingsError(ValueError):
    """An option that cannot be used; the message is a full sentence."""


@dataclass(frozen=True, slots=True)
class EvaluatorSettings:
    """Settings of an evaluator. Files are read when it starts."""

    engines: Engines | IsolatedEngine
    rules: ReplayRules
    token: str | None = field(default=None, repr=False)
    """Bearer token of the operator; None where it fetches no pairs, because it reads the isolated engine."""
    prompts: Path | None = None
    """File of prompts; None for mirrored requests."""
    cluster_header: str = "X-Session-ID"
    """Header that names the tenant or conversation of a request."""
    in_flight: int = IN_FLIGHT
    """Most requests that the engines answer at the same time."""
    waiting: int = WAITING
    """Most requests that wait for that."""
    host: str | None = None
    """Address to listen on; None for all."""
    port: int = 8000


def parse_urls(option: str, urls: Sequence[str]) -> tuple[str, ...]:
    """Return base URLs of engines. Raises SettingsError."""
    if not urls:
        raise SettingsError(f"{option} is missing: set the address of an engine, such as http://10.0.0.7:8000.")
    for url in urls:
        if not _is_base_url(url):
            raise SettingsError(f"{option} is {url}: use the form http://HOST:PORT, without user, query and fragment.")
    return tuple(url.rstrip("/") for url in urls)


def _is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return False
    return (
        url.scheme in ("http", "https")
        and bool(url.hostname)
        and port != 0
        and not (url.query or url.fragment or "@" in url.netloc)
    )


def read_secret(option: str, path: Path, min_characters: int = 1) -> str:
    """Return the secret in a file, without white space around it. Raises SettingsError, which does not quote it."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{option} is {path}, which cannot be read ({reason}): mount the Secret there.") from None
    if len(secret) < min_characters or not (secret.isascii() and secret.isprintable()):
        raise SettingsError(
            f"{option} is {path}, with {len(secret)} characters: write {min_characters} or more printable ASCII characters."
        )
    return secret
