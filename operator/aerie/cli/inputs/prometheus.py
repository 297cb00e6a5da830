"""Metrics of engines over a period from a Prometheus server, as scrapes in order of time.

    pods with metrics (one query) ─► query_range of all of them, one part of the period after the other ─► scrapes

Guarantees: memory holds one part, never the whole period. A response has limits in time and size, and so has the number of
pods. No redirect is followed, so that a token goes to the named server and nowhere else. An error is a message with the option,
its value and how to fix it. Not guaranteed: the times of the scrapes. Values are those at each step. A server that scrapes less
often than that repeats them, and repeated values are skipped.
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
"""Longest period; tuning does not use older metrics."""
MIN_STEP_SECONDS = 15.0
MAX_STEPS = 2880
"""Maximum steps of a period; a longer period has longer steps."""
MAX_PODS = 500
MAX_POINTS_PER_QUERY = 4000
"""Maximum of pods times steps in one query: about 10 MiB of a response."""
MAX_RESPONSE_BYTES = 128 * 1024 * 1024
REQUEST_TIMEOUT_SECONDS = 60.0
"""Timeout of one response."""


@dataclass(frozen=True)
class PrometheusQueryConfig:
    """The server, and the pods and series to query."""

    address: str
    pod_pattern: str
    """Regular expression that has to match a pod's whole name."""
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the series."""
    pod_label: str = "pod"
    namespace_label: str = "namespace"
    token_file: Path | None = None
    ca_file: Path | None = None

    def label_matchers(self) -> Mapping[str, str]:
        """Return the labels that a series must have, besides the pod's name."""
        return {**({self.namespace_label: self.namespace} if self.namespace else {}), **self.labels}

    def describe(self) -> str:
        """Return the label matchers as text, the pod's name included."""
        return ", ".join(
            [f"{self.pod_label}=~{self.pod_pattern}", *(f"{name}={value}" for name, value in self.label_matchers().items())]
        )


def read_prometheus(config: PrometheusQueryConfig, period: timedelta, end: float | None = None) -> ScrapeRecording:
    """Return the scrapes of the period before `end` (default: now). Raises CommandError, also while the scrapes are iterated."""
    if not timedelta(seconds=MIN_STEP_SECONDS) <= period <= MAX_PERIOD:
        raise CommandError(f"--since is {duration.format_duration(period)}: set 15s to 24h, such as 6h.")
    end = time.time() if end is None else end
    skip_counts: Counter[str] = Counter()
    return ScrapeRecording(_iter_scrapes(config, end - period.total_seconds(), end, skip_counts), skip_counts)


def _iter_scrapes(
    config: PrometheusQueryConfig, start: float, end: float, skip_counts: Counter[str]
) -> Iterator[tuple[float, str, Sample]]:
    with _PrometheusClient(config) as client:
        pods = client.find_pods(start, end)
        no_metrics = (
            f"--prometheus {config.address} has no metrics of vLLM between {_format_utc(start)} and {_format_utc(end)} "
            f"of {config.describe()}"
        )
        if not pods:
            raise CommandError(f"{no_metrics}: correct --pods, --namespace, --label or --pod-label.")
        if len(pods) > MAX_PODS:
            raise CommandError(
                f"--pods {config.pod_pattern} matches {len(pods)} pods: select at most {MAX_PODS}, of one deployment."
            )
        step = max(MIN_STEP_SECONDS, math.ceil((end - start) / MAX_STEPS))
        has_scrapes = False
        for scrape in parse_scrapes(client.query_steps(start, end, step, max(1, MAX_POINTS_PER_QUERY // len(pods))), skip_counts):
            has_scrapes = True
            yield scrape
        if not has_scrapes:
            raise CommandError(f"{no_metrics}{format_first_skip_reason(skip_counts)}")


def _format_utc(timestamp: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp))


class _PrometheusClient:
    """Client of the server's HTTP API; a context manager that closes the connection."""

    def __init__(self, config: PrometheusQueryConfig) -> None:
        if not config.address.startswith(("http://", "https://")):
            raise CommandError(f"--prometheus is {config.address}: use the form http://HOST:PORT or https://HOST/PATH.")
        self._config = config
        headers = {"Accept": "application/json"}
        if config.token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {config.token_file.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(f"--prometheus-token {config.token_file} cannot be read: {_error_reason(error)}.") from error
        try:
            # No proxy and no settings of the environment: the token is for this server alone.
            verify = ssl.create_default_context(cafile=str(config.ca_file)) if config.ca_file else True
            self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False, verify=verify)
        except (OSError, ssl.SSLError) as error:
            message = (
                f"--prometheus-ca {config.ca_file} cannot be read ({_error_reason(error)}): set a PEM file with CA certificates."
            )
            raise CommandError(message) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find_pods(self, start: float, end: float) -> Sequence[str]:
        """Return the names of the pods that had metrics of vLLM."""
        config = self._config
        selector = build_selector(
            config.pod_pattern, config.pod_label, config.label_matchers(), [Metric.GENERATION_TOKENS.definition.name]
        )
        promql = f"group by ({config.pod_label}) (last_over_time({selector}[{round(1000 * (end - start))}ms]))"
        result = self._query("query", {"query": promql, "time": f"{end:.3f}"}, "vector")
        try:
            return sorted({str(series["metric"][config.pod_label]) for series in result})
        except (LookupError, TypeError):
            raise self._not_prometheus_error(PrometheusResponseError(str(result)[:100])) from None

    def query_steps(
        self, start: float, end: float, step: float, steps_per_query: int
    ) -> Iterator[tuple[float, str, PrometheusScrape | str]]:
        """Yield time, pod and its metrics at each step; one query has `steps_per_query` steps."""
        config = self._config
        promql = build_selector(config.pod_pattern, config.pod_label, config.label_matchers())
        step_count = int((end - start) / step)
        # Count from the end, so that the newest step is at `end`.
        times = [end - step * index for index in range(step_count, -1, -1)]
        for offset in range(0, len(times), steps_per_query):
            part = times[offset : offset + steps_per_query]
            parameters = {"query": promql, "start": f"{part[0]:.3f}", "end": f"{part[-1]:.3f}", "step": f"{step:g}"}
            try:
                yield from parse_scrape_history(self._query("query_range", parameters, "matrix"), config.pod_label)
            except PrometheusResponseError as error:
                raise self._not_prometheus_error(error) from None

    def _query(self, path: str, parameters: Mapping[str, str], result_type: str) -> Any:
        status, body = self._post(f"{self._config.address.rstrip('/')}/api/v1/{path}", parameters)
        if status != 200:
            raise CommandError(f"--prometheus {self._config.address} returned status {status}{_status_hint(status, body)}")
        try:
            return parse_result(body, result_type)
        except PrometheusResponseError as error:
            raise self._not_prometheus_error(error) from None

    def _not_prometheus_error(self, error: PrometheusResponseError) -> CommandError:
        return CommandError(f"--prometheus {self._config.address} returned {error}: set the address of a Prometheus server.")

    def _post(self, url: str, parameters: Mapping[str, str]) -> tuple[int, bytes]:
        subject, deadline = f"--prometheus {self._config.address}", time.monotonic() + REQUEST_TIMEOUT_SECONDS
        try:
            with self._client.stream("POST", url, data=dict(parameters)) as response:
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_RESPONSE_BYTES:
                        raise CommandError(f"{subject} sent more than {MAX_RESPONSE_BYTES >> 20} MiB: narrow --pods or --label.")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("too slow")
                return response.status_code, bytes(body)
        except httpx.TimeoutException as error:
            raise CommandError(
                f"{subject} did not respond within {REQUEST_TIMEOUT_SECONDS:g} s: correct it, or shorten --since."
            ) from error
        except httpx.ConnectError as error:
            fix = "set the server's CA certificates with --prometheus-ca" if "CERTIFICATE" in str(error) else "correct it"
            raise CommandError(f"{subject} cannot be reached ({error}): {fix}.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"{subject} did not send a valid HTTP response ({error!r}): correct it.") from error


def _error_reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _status_hint(status: int, body: bytes) -> str:
    detail = format_error_message(body)
    match status:
        case 401 | 403:
            return f"{detail}: set a token with --prometheus-token FILE."
        case 400:
            return f"{detail}: correct --pods, --label or --pod-label."
        case 422:
            return f"{detail}: narrow --since or --pods."
        case 301 | 302 | 303 | 307 | 308 | 404 | 405:
            return f"{detail}: set the address of a Prometheus server, without /api/v1/query_range."
        case _:
            return f"{detail}: check the server."
