"""A real Prometheus that scrapes simulated engines: Aerie reads the engines' values from it, now or over a period."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from aerie.api.metrics import PrometheusSource
from aerie.cli.app import run_command_line
from aerie.cli.inputs.prometheus import PrometheusQueryConfig, read_prometheus
from aerie.cli.inputs.recorded import ScrapeRecording
from aerie.controller.scraping.http_fetch import ScrapeError
from aerie.controller.scraping.prometheus import PrometheusAccess, PrometheusClient
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.promql import PrometheusScrape
from aerie.engine.metrics.sample import Counters, diff_samples
from aerie_lab.testing import agreement, prometheus, wait_until

SPECULATION = ("--speculative-config", agreement.build_speculative_config(agreement.BUNDLE_FOLDER / "eagle31"))
INTERVAL = 1.0


def poll_scrapes(server: PrometheusSource, *pods: str) -> dict[str, PrometheusScrape | str]:
    async def run() -> dict[str, PrometheusScrape | str]:
        servers = PrometheusClient(PrometheusAccess())
        try:
            return {
                pod: scrape
                async for scrapes in servers.poll(server, "default", pods, INTERVAL)
                for pod, scrape in scrapes.items()
            }
        finally:
            await servers.close()

    return asyncio.run(run())


@pytest.mark.timeout(600)
def test_samples_from_prometheus_equal_the_metrics_of_the_engines(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        engines = {
            "chat-a": stack.enter_context(agreement.start_engine("simulated", Path(), tmp_path, *SPECULATION)),
            "chat-b": stack.enter_context(agreement.start_engine("simulated", Path(), tmp_path)),
        }
        pods = {pod: engine.url.removeprefix("http://") for pod, engine in engines.items()}
        url = stack.enter_context(prometheus.run_prometheus(tmp_path, pods))
        server = PrometheusSource(address=url)

        def read_scrapes(*names: str) -> dict[str, PrometheusScrape | str]:
            with contextlib.suppress(ScrapeError):  # a timeout, on busy cores
                return poll_scrapes(server, *names)
            return {}

        def wait_until_scraped(pod: str) -> PrometheusScrape:
            def read_scrape() -> PrometheusScrape | None:
                scrape = read_scrapes(pod).get(pod)
                return scrape if isinstance(scrape, PrometheusScrape) else None

            scrape = wait_until(read_scrape, f"{pod} is scraped")
            assert scrape is not None
            return scrape

        before = {pod: wait_until_scraped(pod) for pod in pods}
        for engine in engines.values():
            engine.run_load(2, 8, 20, seed=1)
        # There are no more requests, so the metrics stay constant, and the next scrape has their values.
        expositions = {pod: parse_exposition(engine.read_metrics().encode()) for pod, engine in engines.items()}
        for pod, exposition in expositions.items():
            wait_until(
                lambda pod=pod, exposition=exposition: wait_until_scraped(pod).to_sample() == exposition,  # type: ignore[misc]
                f"Prometheus has the metrics of {pod}",
            )

        def read_two_scrapes() -> dict[str, PrometheusScrape | str] | None:
            scrapes = read_scrapes("chat-a", "chat-b", "chat-c")
            return scrapes if sum(isinstance(scrape, PrometheusScrape) for scrape in scrapes.values()) == 2 else None

        scrapes = wait_until(read_two_scrapes, "both are scraped")
        assert scrapes is not None
        assert scrapes["chat-c"] == (f"has no sample at {url} in the last 5 s with the labels namespace=default, pod=<its name>")
        for pod, exposition in expositions.items():
            scrape = scrapes[pod]
            assert isinstance(scrape, PrometheusScrape)
            assert scrape.timestamp > before[pod].timestamp
            window = diff_samples(before[pod].to_sample(), scrape.to_sample())
            assert isinstance(window, Counters)
            assert window.first_tokens == 8
            assert (window.speculation is not None) == (pod == "chat-a")
            assert scrape.to_sample().process_start_time == exposition.process_start_time is not None

        # The same over a period, as `aerie tune --prometheus` requests it; too short for a recommendation.
        def read_matching_recording() -> ScrapeRecording | None:
            period = read_prometheus(PrometheusQueryConfig(url, "chat-.*", "default", {"job": "engines"}), timedelta(minutes=5))
            return period if {pod: sample for _, pod, sample in period.scrapes} == expositions else None

        period = wait_until(read_matching_recording, "the period ends with the pages")
        assert period is not None
        assert not period.skip_counts
        assert run_command_line(["tune", "--prometheus", url, "--pods", "chat-.*", "--since", "5m"]) == 1

        # With other labels there are no samples, and errors of Prometheus are reported.
        job = PrometheusSource(address=url, match_labels={"job": "engines", "namespace": "default"})
        assert isinstance(poll_scrapes(job, "chat-a")["chat-a"], PrometheusScrape)
        other = PrometheusSource(address=url, match_labels={"job": "others"})
        assert "has no sample" in str(poll_scrapes(other, "chat-a")["chat-a"])
        with pytest.raises(ScrapeError, match=r"returned status 400 \(bad_data\): correct spec\.metrics\.source"):
            poll_scrapes(PrometheusSource(address=url, match_labels={"0": "x"}), "chat-a")
        with pytest.raises(ScrapeError, match=r"status 404.*address must be the address of a Prometheus server"):
            poll_scrapes(PrometheusSource(address=f"{url}/nowhere"), "chat-a")

        engines["chat-a"].process.send_signal(signal.SIGKILL)
        wait_until(
            lambda: read_scrapes("chat-a").get("chat-a") == "could not be scraped (up is 0)",
            "its scrapes fail, and the last is over",
        )
        assert wait_until_scraped("chat-b").to_sample() == expositions["chat-b"]
    with pytest.raises(ScrapeError, match=f"{url}/api/v1/query cannot be reached"):
        poll_scrapes(server, "chat-a")
