"""Tells an HTTP endpoint what becomes of rollouts: one CloudEvent for each notice (aerie.rollout.status.notifications), by POST.

    pass ─► status is written ─► look ─► notices that were not told yet ─► queue ─► POST, again and again ─► told, or lost

Guarantees: a pass never waits; what is waiting has a limit in number, and each notice one in time; what is lost is counted, by
reason. Notices go out in the order in which they came, one at a time. A notice is told after its status was written, so nothing
is told that did not happen. An operator that begins to lead tells again what is younger than `RECENT`, because the one before it
may have been killed between the status and the notice: so each is told at least once, unless no operator leads for longer than
that, or the endpoint does not answer for `PATIENCE`; and some are told twice, with the same id.
Not guaranteed: phases that were left before an operator looked; that they are told after `RECENT`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.work_queue import Key
from aerie.rollout.status.notifications import Notice, notices

_log = logging.getLogger(__name__)

RECENT = timedelta(minutes=15)
"""What is younger than that is told by an operator that sees a resource for the first time."""
WAITING = 1000
"""Notices that wait at most; one more is lost."""
PATIENCE = 900.0
"""Seconds from when a notice came until it is given up."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two attempts; each twice the one before."""
LIMIT = 10.0
"""Seconds for one attempt."""
_AGAIN = frozenset({408, 425, 429})
"""Refusals that pass."""


class HookError(ValueError):
    """An address or a file of headers that cannot be used, as a sentence."""


@dataclass(frozen=True)
class Hook:
    """Where notices go."""

    url: str
    headers: Path | None = None
    """A file with a header in each line, `Name: value`; read for each notice, so that a Secret may change."""
    source: str = "aerie"
    """Tells one cluster's notices from another's."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HookError("the address of notices has to begin with http:// or https:// and name a host.")
        self.read()

    def read(self) -> dict[str, str]:
        """The headers. Raises HookError."""
        if self.headers is None:
            return {}
        try:
            lines = self.headers.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise HookError(f"the file {self.headers} with headers for notices cannot be read: {error}.") from None
        found = {}
        for line in filter(str.strip, lines):
            name, colon, value = line.partition(":")
            if not colon or not name.strip().isascii() or not value.strip():
                raise HookError(
                    f"the file {self.headers} has a line that is no header: write `Name: value`."
                )  # and show no secret
            found[name.strip()] = value.strip()
        return found


@dataclass(frozen=True)
class _Waiting:
    notice: Notice
    until: float
    """On the loop's clock."""


@dataclass
class _Told:
    """Of one resource."""

    shown: object
    """What of the status its notices follow from."""
    ids: frozenset[str]


@dataclass
class Notifier:
    """See the module. Without a hook it does nothing. `count` is told how each notice ended: sent, or why it was lost."""

    hook: Hook | None = None
    count: Callable[[str], None] = lambda _: None
    transport: httpx.AsyncBaseTransport | None = None
    _told: dict[Key, _Told] = field(default_factory=dict)
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self, key: Key, resource: SpeculativeDeployment, status: Status, now: datetime) -> None:
        """Tell what is new in a status that is written."""
        if self.hook is None:
            return
        shown = _shown(resource, status)
        before = self._told.get(key)
        if before is not None and before.shown == shown:
            return
        found = list(notices(resource, status))
        self._told[key] = _Told(shown, frozenset(notice.id for notice in found))
        for notice in found:
            if notice.id not in before.ids if before is not None else notice.at > now - RECENT:
                self._put(notice)

    def forget(self, key: Key) -> None:
        """The resource is gone; what is told of it is told all the same."""
        self._told.pop(key, None)

    def _put(self, notice: Notice) -> None:
        if len(self._waiting) >= WAITING:
            self._lost(notice, "full", f"{WAITING} others wait")
            return
        self._waiting.append(_Waiting(notice, asyncio.get_running_loop().time() + PATIENCE))
        self._news.set()

    async def run(self) -> None:
        """Send until cancelled."""
        if self.hook is None:
            await asyncio.Event().wait()
            return
        async with self._client(self.hook) as through:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    waiting = self._waiting[0]
                    try:
                        await self._send(through, self.hook, waiting)
                    except Exception:  # noqa: BLE001 - one notice must not end the telling of the others
                        _log.exception("notice %s ended with an error of Aerie's own", waiting.notice.id)
                        self.count("error")
                    self._waiting.popleft()

    def _client(self, hook: Hook) -> httpx.AsyncClient:
        secure = hook.url.startswith("https:")
        return httpx.AsyncClient(
            transport=self.transport,
            timeout=LIMIT,
            follow_redirects=False,
            # Reading the machine's authorities takes time and memory that plain HTTP does not need.
            verify=ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def _send(self, through: httpx.AsyncClient, hook: Hook, waiting: _Waiting) -> None:
        """Try until it is told, refused, or given up."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
        body = json.dumps(waiting.notice.event(hook.source)).encode()
        while True:
            try:
                headers = hook.read() | {"Content-Type": "application/cloudevents+json"}
                async with asyncio.timeout(LIMIT):
                    answer = await through.post(hook.url, content=body, headers=headers)
                code = answer.status_code
                if 200 <= code < 300:
                    self.count("sent")
                    return
                wrong = f"status {code}"
                if code < 500 and code not in _AGAIN:
                    self._lost(waiting.notice, "refused", wrong)
                    return
            except (httpx.HTTPError, TimeoutError, HookError) as error:
                wrong = str(error) or type(error).__name__
            if loop.time() + pause >= waiting.until:
                self._lost(waiting.notice, "expired", wrong)
                return
            _log.info("notice %s was not taken (%s); again in %g s", waiting.notice.id, wrong, pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _lost(self, notice: Notice, reason: str, why: str) -> None:
        _log.warning("notice %s is lost: %s", notice.id, why)
        self.count(reason)


def _shown(resource: SpeculativeDeployment, status: Status) -> object:
    """That part of a status from which its notices follow: comparing it is cheaper than making them."""
    canary, last = status.canary, status.history[0] if status.history else None
    failed = status.phase == "Failed"
    return (
        resource.metadata.uid,
        canary and (canary.revision, canary.started_at, canary.phase),
        last and (last.revision, last.ended_at, last.result),
        failed and status.observed_generation,
    )
