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
from aerie.cli.inputs.recorded import ScrapeRecording, format_first_skip_reason, parse_scrapes
from aerie.engine.metrics.names import Metric
from aerie.engine.metrics.promql import (
    PrometheusResponseError,
    PrometheusScrape,
    build_selector,
    format_error_message,
    parse_result,
    parse_scrape_history,
)
from aerie.engine.metrics.sample import Sample

MAX_PERIOD = timedelta(hours=24)
"""Of metrics of before no use is made."""
MIN_STEP_SECONDS = 15.0
MAX_STEPS = 2880
"""Of the period; the longer it is, the further they are apart."""
MAX_PODS = 500
MAX_POINTS_PER_QUERY = 4000
"""Pods times steps of one query: some 10 MiB of an answer."""
MAX_RESPONSE_BYTES = 128 * 1024 * 1024
REQUEST_TIMEOUT_SECONDS = 60.0
"""For one answer."""


@dataclass(frozen=True)
class PrometheusQueryConfig:
    """Where to ask, for what."""

    address: str
    pod_pattern: str
    """A regular expression of their names, in full."""
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the series."""
    pod_label: str = "pod"
    namespace_label: str = "namespace"
    token_file: Path | None = None
    ca_file: Path | None = None

    def label_matchers(self) -> Mapping[str, str]:
        """The labels that a series has to have, besides the pod's name."""
        return {**({self.namespace_label: self.namespace} if self.namespace else {}), **self.labels}

    def describe(self) -> str:
        """The same, in words."""
        return ", ".join(
            [f"{self.pod_label}=~{self.pod_pattern}", *(f"{name}={value}" for name, value in self.label_matchers().items())]
        )


def read_prometheus(config: PrometheusQueryConfig, period: timedelta, end: float | None = None) -> ScrapeRecording:
    """The last so much time before `end`, which is now where it is not given. Raises CommandError, also from the scrapes."""
    if not timedelta(seconds=MIN_STEP_SECONDS) <= period <= MAX_PERIOD:
        raise CommandError(f"--since is {duration.format_duration(period)}: it has to be from 15s to 24h, such as 6h.")
    end = time.time() if end is None else end
    unreadable: Counter[str] = Counter()
    return ScrapeRecording(_iter_scrapes(config, end - period.total_seconds(), end, unreadable), unreadable)


def _iter_scrapes(
    config: PrometheusQueryConfig, start: float, end: float, skip_counts: Counter[str]
) -> Iterator[tuple[float, str, Sample]]:
    with _PrometheusClient(config) as asked:
        pods = asked.find_pods(start, end)
        none = f"--prometheus {config.address} has no metrics of vLLM between {_format_utc(start)} and {_format_utc(end)} of {config.describe()}"
        if not pods:
            raise CommandError(f"{none}: correct --pods, --namespace, --label or --pod-label.")
        if len(pods) > MAX_PODS:
            raise CommandError(f"--pods {config.pod_pattern} names {len(pods)} pods: name {MAX_PODS} at most, of one deployment.")
        step = max(MIN_STEP_SECONDS, math.ceil((end - start) / MAX_STEPS))
        some = False
        for one in parse_scrapes(asked.query_steps(start, end, step, max(1, MAX_POINTS_PER_QUERY // len(pods))), skip_counts):
            some = True
            yield one
        if not some:
            raise CommandError(f"{none}{format_first_skip_reason(skip_counts)}")


def _format_utc(timestamp: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp))


class _PrometheusClient:
    """The server's HTTP API; a context that closes the connection."""

    def __init__(self, config: PrometheusQueryConfig) -> None:
        if not config.address.startswith(("http://", "https://")):
            raise CommandError(f"--prometheus is {config.address}: write it as http://HOST:PORT or https://HOST/PATH.")
        self._config = config
        headers = {"Accept": "application/json"}
        if config.token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {config.token_file.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(f"--prometheus-token {config.token_file} cannot be read: {_error_reason(error)}.") from error
        try:
            # Without a proxy and settings of the environment: the token is for this server alone.
            verify = ssl.create_default_context(cafile=str(config.ca_file)) if config.ca_file else True
            self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False, verify=verify)
        except (OSError, ssl.SSLError) as error:
            told = (
                f"--prometheus-ca {config.ca_file} cannot be read ({_error_reason(error)}): give a file with certificates in PEM."
            )
            raise CommandError(told) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find_pods(self, start: float, end: float) -> Sequence[str]:
        """Names of those that have had metrics of vLLM."""
        server = self._config
        generated = build_selector(
            server.pod_pattern, server.pod_label, server.label_matchers(), [Metric.GENERATION_TOKENS.definition.name]
        )
        promql = f"group by ({server.pod_label}) (last_over_time({generated}[{round(1000 * (end - start))}ms]))"
        found = self._query("query", {"query": promql, "time": f"{end:.3f}"}, "vector")
        try:
            return sorted({str(one["metric"][server.pod_label]) for one in found})
        except (LookupError, TypeError):
            raise self._not_prometheus_error(PrometheusResponseError(f"answered with {str(found)[:100]}")) from None

    def query_steps(
        self, start: float, end: float, step: float, steps_per_query: int
    ) -> Iterator[tuple[float, str, PrometheusScrape | str]]:
        """Time, pod and what there is of it at each step; `at_once` steps in one query."""
        server = self._config
        promql = build_selector(server.pod_pattern, server.pod_label, server.label_matchers())
        number = int((end - start) / step)
        # Counted from the end, so that the newest step is of now.
        times = [end - step * index for index in range(number, -1, -1)]
        for begin in range(0, len(times), steps_per_query):
            piece = times[begin : begin + steps_per_query]
            form = {"query": promql, "start": f"{piece[0]:.3f}", "end": f"{piece[-1]:.3f}", "step": f"{step:g}"}
            try:
                yield from parse_scrape_history(self._query("query_range", form, "matrix"), server.pod_label)
            except PrometheusResponseError as error:
                raise self._not_prometheus_error(error) from None

    def _query(self, path: str, parameters: Mapping[str, str], result_type: str) -> Any:
        status, body = self._post(f"{self._config.address.rstrip('/')}/api/v1/{path}", parameters)
        if status != 200:
            raise CommandError(f"--prometheus {self._config.address} answered with status {status}{_status_hint(status, body)}")
        try:
            return parse_result(body, result_type)
        except PrometheusResponseError as error:
            raise self._not_prometheus_error(error) from None

    def _not_prometheus_error(self, error: PrometheusResponseError) -> CommandError:
        return CommandError(f"--prometheus {self._config.address} {error}: give the address of a Prometheus server.")

    def _post(self, url: str, parameters: Mapping[str, str]) -> tuple[int, bytes]:
        said, deadline = f"--prometheus {self._config.address}", time.monotonic() + REQUEST_TIMEOUT_SECONDS
        try:
            with self._client.stream("POST", url, data=dict(parameters)) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise CommandError(
                            f"{said} answered with more than {MAX_RESPONSE_BYTES >> 20} MiB: narrow --pods or --label."
                        )
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("too slow")
                return answer.status_code, bytes(body)
        except httpx.TimeoutException as error:
            raise CommandError(
                f"{said} did not answer within {REQUEST_TIMEOUT_SECONDS:g} s: correct it, or ask for less with --since."
            ) from error
        except httpx.ConnectError as error:
            way_out = "name the server's authority with --prometheus-ca" if "CERTIFICATE" in str(error) else "correct it"
            raise CommandError(f"{said} cannot be reached ({error}): {way_out}.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"{said} did not answer as a server does ({error!r}): correct it.") from error


def _error_reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _status_hint(status: int, body: bytes) -> str:
    said = format_error_message(body)
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
