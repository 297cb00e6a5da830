"""What a Prometheus server has of engines over a period, as scrapes in order of time.

    which pods have metrics (one query) ─► query_range of all of them, a piece of the period after the other ─► scrapes

Guarantees: a piece is held in memory, never the whole period; an answer has limits in time and size, and so has the number of
pods; no redirect is followed, so that a token goes to the server that was named and nowhere else; what goes wrong is a sentence
that names the option, its value and the way out. Not guaranteed: the times of the scrapes. Values are those at each step, and a
server that scrapes less often than that repeats them, of which nothing is made.
"""

from __future__ import annotations

import math
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import httpx

from aerie.api.types import duration
from aerie.cli.console import CommandError
from aerie.cli.inputs.recorded import Recorded, first_of, readable
from aerie.engine.metrics.names import Metric
from aerie.engine.metrics.promql import AnswerError, Scrape, complaint, history, result, selector
from aerie.engine.metrics.sample import Sample

LONGEST = timedelta(hours=24)
"""Of metrics of before no use is made."""
SHORTEST_STEP = 15.0
MOST_STEPS = 2880
"""Of the period; the longer it is, the further they are apart."""
MOST_PODS = 500
AT_ONCE = 4000
"""Pods times steps of one query: some 10 MiB of an answer."""
LARGEST = 128 * 1024 * 1024
SECONDS = 60.0
"""For one answer."""


@dataclass(frozen=True)
class Server:
    """Where to ask, for what."""

    address: str
    pods: str
    """A regular expression of their names, in full."""
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the series."""
    pod_label: str = "pod"
    namespace_label: str = "namespace"
    token: Path | None = None
    authorities: Path | None = None

    def matched(self) -> Mapping[str, str]:
        """The labels that a series has to have, besides the pod's name."""
        return {**({self.namespace_label: self.namespace} if self.namespace else {}), **self.labels}

    def said(self) -> str:
        """The same, in words."""
        return ", ".join([f"{self.pod_label}=~{self.pods}", *(f"{name}={value}" for name, value in self.matched().items())])


def read_server(server: Server, since: timedelta, end: float | None = None) -> Recorded:
    """The last so much time before `end`, which is now where it is not given. Raises CommandError, also from the scrapes."""
    if not timedelta(seconds=SHORTEST_STEP) <= since <= LONGEST:
        raise CommandError(f"--since is {duration.format(since)}: it has to be from 15s to 24h, such as 6h.")
    end = time.time() if end is None else end
    unreadable: Counter[str] = Counter()
    return Recorded(_scrapes(server, end - since.total_seconds(), end, unreadable), unreadable)


def _scrapes(server: Server, start: float, end: float, unreadable: Counter[str]) -> Iterator[tuple[float, str, Sample]]:
    with _Asked(server) as asked:
        pods = asked.pods(start, end)
        none = (
            f"--prometheus {server.address} has no metrics of vLLM between {_clock(start)} and {_clock(end)} of {server.said()}"
        )
        if not pods:
            raise CommandError(f"{none}: correct --pods, --namespace, --label or --pod-label.")
        if len(pods) > MOST_PODS:
            raise CommandError(f"--pods {server.pods} names {len(pods)} pods: name {MOST_PODS} at most, of one deployment.")
        step = max(SHORTEST_STEP, math.ceil((end - start) / MOST_STEPS))
        some = False
        for one in readable(asked.steps(start, end, step, max(1, AT_ONCE // len(pods))), unreadable):
            some = True
            yield one
        if not some:
            raise CommandError(f"{none}{first_of(unreadable)}")


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


class _Asked:
    """The server's HTTP API; a context that closes the connection."""

    def __init__(self, server: Server) -> None:
        if not server.address.startswith(("http://", "https://")):
            raise CommandError(f"--prometheus is {server.address}: write it as http://HOST:PORT or https://HOST/PATH.")
        self._server = server
        headers = {"Accept": "application/json"}
        if server.token is not None:
            try:
                headers["Authorization"] = f"Bearer {server.token.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(f"--prometheus-token {server.token} cannot be read: {_reason(error)}.") from error
        try:
            # Without a proxy and settings of the environment: the token is for this server alone.
            verify = ssl.create_default_context(cafile=str(server.authorities)) if server.authorities else True
            self._client = httpx.Client(headers=headers, timeout=SECONDS, trust_env=False, verify=verify)
        except (OSError, ssl.SSLError) as error:
            told = (
                f"--prometheus-ca {server.authorities} cannot be read ({_reason(error)}): give a file with certificates in PEM."
            )
            raise CommandError(told) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def pods(self, start: float, end: float) -> Sequence[str]:
        """Names of those that have had metrics of vLLM."""
        server = self._server
        generated = selector(server.pods, server.pod_label, server.matched(), [Metric.GENERATION_TOKENS.row.name])
        promql = f"group by ({server.pod_label}) (last_over_time({generated}[{round(1000 * (end - start))}ms]))"
        found = self._ask("query", {"query": promql, "time": f"{end:.3f}"}, "vector")
        try:
            return sorted({str(one["metric"][server.pod_label]) for one in found})
        except (LookupError, TypeError):
            raise self._stranger(AnswerError(f"answered with {str(found)[:100]}")) from None

    def steps(self, start: float, end: float, step: float, at_once: int) -> Iterator[tuple[float, str, Scrape | str]]:
        """Time, pod and what there is of it at each step; `at_once` steps in one query."""
        server = self._server
        promql = selector(server.pods, server.pod_label, server.matched())
        number = int((end - start) / step)
        # Counted from the end, so that the newest step is of now.
        times = [end - step * index for index in range(number, -1, -1)]
        for begin in range(0, len(times), at_once):
            piece = times[begin : begin + at_once]
            form = {"query": promql, "start": f"{piece[0]:.3f}", "end": f"{piece[-1]:.3f}", "step": f"{step:g}"}
            try:
                yield from history(self._ask("query_range", form, "matrix"), server.pod_label)
            except AnswerError as error:
                raise self._stranger(error) from None

    def _ask(self, path: str, form: Mapping[str, str], kind: str) -> Any:
        status, body = self._post(f"{self._server.address.rstrip('/')}/api/v1/{path}", form)
        if status != 200:
            raise CommandError(f"--prometheus {self._server.address} answered with status {status}{_way_out(status, body)}")
        try:
            return result(body, kind)
        except AnswerError as error:
            raise self._stranger(error) from None

    def _stranger(self, error: AnswerError) -> CommandError:
        return CommandError(f"--prometheus {self._server.address} {error}: give the address of a Prometheus server.")

    def _post(self, url: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        said, deadline = f"--prometheus {self._server.address}", time.monotonic() + SECONDS
        try:
            with self._client.stream("POST", url, data=dict(form)) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > LARGEST:
                        raise CommandError(f"{said} answered with more than {LARGEST >> 20} MiB: narrow --pods or --label.")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("too slow")
                return answer.status_code, bytes(body)
        except httpx.TimeoutException as error:
            raise CommandError(
                f"{said} did not answer within {SECONDS:g} s: correct it, or ask for less with --since."
            ) from error
        except httpx.ConnectError as error:
            way_out = "name the server's authority with --prometheus-ca" if "CERTIFICATE" in str(error) else "correct it"
            raise CommandError(f"{said} cannot be reached ({error}): {way_out}.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"{said} did not answer as a server does ({error!r}): correct it.") from error


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _way_out(status: int, body: bytes) -> str:
    said = complaint(body)
    match status:
        case 401 | 403:
            return f"{said}: give it a token with --prometheus-token FILE."
        case 400:
            return f"{said}: correct --pods, --label or --pod-label."
        case 422:
            return f"{said}: ask for less with --since or --pods."
        case 301 | 302 | 303 | 307 | 308 | 404 | 405:
            return f"{said}: it has to be the address below which /api/v1/query_range of a Prometheus server is."
        case _:
            return f"{said}: see to the server."
