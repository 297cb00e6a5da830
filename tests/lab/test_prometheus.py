"""A real Prometheus that scrapes simulated engines: what Aerie reads from it, now or over a period, is what the pages say."""

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


def ask(server: PrometheusSource, *pods: str) -> dict[str, PrometheusScrape | str]:
    async def run() -> dict[str, PrometheusScrape | str]:
        servers = PrometheusClient(PrometheusAccess())
        try:
            return {pod: found async for some in servers.poll(server, "default", pods, INTERVAL) for pod, found in some.items()}
        finally:
            await servers.close()

    return asyncio.run(run())


@pytest.mark.timeout(600)
def test_samples_from_prometheus_are_those_of_the_pages(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        engines = {
            "chat-a": stack.enter_context(agreement.start_engine("simulated", Path(), tmp_path, *SPECULATION)),
            "chat-b": stack.enter_context(agreement.start_engine("simulated", Path(), tmp_path)),
        }
        pods = {pod: engine.url.removeprefix("http://") for pod, engine in engines.items()}
        url = stack.enter_context(prometheus.run_prometheus(tmp_path, pods))
        server = PrometheusSource(address=url)

        def answered(*names: str) -> dict[str, PrometheusScrape | str]:
            with contextlib.suppress(ScrapeError):  # none in time, on busy cores
                return ask(server, *names)
            return {}

        def scraped(pod: str) -> PrometheusScrape:
            def look() -> PrometheusScrape | None:
                found = answered(pod).get(pod)
                return found if isinstance(found, PrometheusScrape) else None

            found = wait_until(look, f"{pod} is scraped")
            assert found is not None
            return found

        before = {pod: scraped(pod) for pod in pods}
        for engine in engines.values():
            engine.run_load(2, 8, 20, seed=1)
        # Nothing is asked any more, so the pages stand still, and the next scrape has what they say.
        pages = {pod: parse_exposition(engine.read_metrics().encode()) for pod, engine in engines.items()}
        for pod, page in pages.items():
            wait_until(lambda pod=pod, page=page: scraped(pod).to_sample() == page, f"Prometheus has what the page of {pod} says")  # type: ignore[misc]

        def both() -> dict[str, PrometheusScrape | str] | None:
            told = answered("chat-a", "chat-b", "chat-c")
            return told if sum(isinstance(one, PrometheusScrape) for one in told.values()) == 2 else None

        found = wait_until(both, "both are scraped")
        assert found is not None
        assert found["chat-c"] == (f"has no sample at {url} in the last 5 s with the labels namespace=default, pod=<its name>")
        for pod, page in pages.items():
            one = found[pod]
            assert isinstance(one, PrometheusScrape)
            assert one.timestamp > before[pod].timestamp
            window = diff_samples(before[pod].to_sample(), one.to_sample())
            assert isinstance(window, Counters)
            assert window.first_tokens == 8
            assert (window.speculation is not None) == (pod == "chat-a")
            assert one.to_sample().process_start_time == page.process_start_time is not None

        # The same of a period, as `aerie tune offline --prometheus` asks for it; too little for an answer.
        def recorded() -> ScrapeRecording | None:
            period = read_prometheus(PrometheusQueryConfig(url, "chat-.*", "default", {"job": "engines"}), timedelta(minutes=5))
            return period if {pod: sample for _, pod, sample in period.scrapes} == pages else None

        period = wait_until(recorded, "the period ends with the pages")
        assert period is not None
        assert not period.skip_counts
        assert run_command_line(["tune", "offline", "--prometheus", url, "--pods", "chat-.*", "--since", "5m"]) == 1

        # By other labels there is nothing, and what Prometheus cannot read it says.
        job = PrometheusSource(address=url, match_labels={"job": "engines", "namespace": "default"})
        assert isinstance(ask(job, "chat-a")["chat-a"], PrometheusScrape)
        other = PrometheusSource(address=url, match_labels={"job": "others"})
        assert "has no sample" in str(ask(other, "chat-a")["chat-a"])
        with pytest.raises(ScrapeError, match=r"answered with status 400 \(bad_data\): correct spec\.metrics\.source"):
            ask(PrometheusSource(address=url, match_labels={"0": "x"}), "chat-a")
        with pytest.raises(ScrapeError, match=r"status 404.*address must be the address of a Prometheus server"):
            ask(PrometheusSource(address=f"{url}/nowhere"), "chat-a")

        engines["chat-a"].process.send_signal(signal.SIGKILL)
        wait_until(
            lambda: answered("chat-a").get("chat-a") == "could not be scraped (up is 0)",
            "its scrapes fail, and the last is over",
        )
        assert scraped("chat-b").to_sample() == pages["chat-b"]
    with pytest.raises(ScrapeError, match=f"{url}/api/v1/query cannot be reached"):
        ask(server, "chat-a")
