"""A fleet in virtual time: scrapes, losses, restarts, shares, and pods that differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE, expected_length
from aerie_lab.engine.counters import Counters
from aerie_lab.engine.fleet import PodRestart, Routing, Scrape, ScrapeSettings, SimulatedFleet, SimulatedPod
from aerie_lab.engine.request import EngineSettings
from aerie_lab.engine.step import STEP_TIME_FORMULAS
from aerie_lab.engine.workload import LengthDistribution, PoissonArrivals, TrafficClass

KIND = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(200, 0.5), LengthDistribution(100, 0.5), mean_turns=3)


def pod(name: str, **more: Any) -> SimulatedPod:
    return SimulatedPod(name, EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"], **more)


def fleet(*pods: SimulatedPod, rate: float = 2.0, **more: Any) -> SimulatedFleet:
    return SimulatedFleet(pods, [KIND], PoissonArrivals(rate), **more)


def scrapes_of(scrapes: list[Scrape], name: str) -> list[Counters | None]:
    return [scrape.counters for scrape in scrapes if scrape.pod == name]


def acceptance_length(counters: Counters) -> float:
    return 1 + counters.spec_decode_num_accepted_tokens / counters.spec_decode_num_drafts


def test_scrapes_come_in_order_and_count_up() -> None:
    simulated_fleet = fleet(pod("a"), pod("b"))
    scrapes = list(simulated_fleet.run(600.0))
    assert [s.time for s in scrapes] == sorted(s.time for s in scrapes)
    for name in "ab":
        tokens = [c.generation_tokens for c in scrapes_of(scrapes, name) if c]
        assert len(tokens) == 40
        assert tokens == sorted(tokens)
    assert simulated_fleet.lost_requests == 0
    assert len(simulated_fleet.finished_requests) == pytest.approx(1200, abs=120)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [list(fleet(pod("a"), pod("b"), seed=seed).run(120.0)) for seed in (1, 1, 2)]
    tokens = [[(s.time, s.counters.generation_tokens if s.counters else None) for s in run] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]


def test_lost_scrapes_are_none() -> None:
    scrapes = list(fleet(pod("a"), scrape_settings=ScrapeSettings(interval_seconds=5.0, loss_probability=0.3)).run(1500.0))
    assert sum(s.counters is None for s in scrapes) / len(scrapes) == pytest.approx(0.3, abs=0.08)


def test_a_restart_resets_counters_cuts_requests_and_moves_traffic() -> None:
    simulated_fleet = fleet(
        pod("a", restarts=(PodRestart(300.0, 100.0),)), pod("b"), scrape_settings=ScrapeSettings(10.0, delay_sd_seconds=0.0)
    )
    scrapes = list(simulated_fleet.run(600.0))
    a = [(s.time, s.counters.generation_tokens if s.counters else None) for s in scrapes if s.pod == "a"]
    assert all((tokens is None) == (300 <= time < 400) for time, tokens in a)
    before = max(tokens for time, tokens in a if tokens is not None and time < 300)
    after = next(tokens for time, tokens in a if tokens is not None and time >= 400)
    assert after < before
    assert not [f for f in simulated_fleet.finished_requests if f.pod == "a" and 300 <= f.request.arrival_time < 400]
    assert [f for f in simulated_fleet.finished_requests if f.pod == "a" and f.request.arrival_time > 400]
    assert 0 < simulated_fleet.lost_requests < 20


def test_sessions_stay_on_their_pod_and_hit_its_cache() -> None:
    hits = {}
    for routing in ("session", "random"):
        simulated_fleet = fleet(*(pod(name) for name in "abcd"), routing=routing, rate=4.0)
        list(simulated_fleet.run(600.0))
        where: dict[int, set[str]] = {}
        for finished in simulated_fleet.finished_requests:
            where.setdefault(finished.session, set()).add(finished.pod)
        assert (max(len(pods) for pods in where.values()) == 1) == (routing == "session")
        counters = [replica.counters for replica in simulated_fleet.replicas]
        hits[routing] = sum(c.prefix_cache_hits for c in counters) / sum(c.prefix_cache_queries for c in counters)
    assert hits["session"] > 1.5 * hits["random"]


@pytest.mark.parametrize("routing", ["session", "random"])
def test_weights_are_shares_of_the_traffic(routing: Routing) -> None:
    simulated_fleet = fleet(pod("a", weight=3.0), pod("b"), routing=routing, rate=5.0)
    list(simulated_fleet.run(800.0))
    counts = Counter(finished.pod for finished in simulated_fleet.finished_requests)
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.04)


def test_the_least_loaded_pod_is_chosen() -> None:
    simulated_fleet = fleet(pod("fast"), pod("slow", step_time_factor=4.0), routing="least", rate=6.0)
    list(simulated_fleet.run(300.0))
    counts = Counter(finished.pod for finished in simulated_fleet.finished_requests)
    assert counts["fast"] > 1.5 * counts["slow"]


def test_a_better_drafter_and_a_slower_pod_show_in_the_counters() -> None:
    pods = (pod("a"), pod("better", logit_shift=0.5), pod("slow", step_time_factor=1.5))
    simulated_fleet = fleet(*pods, rate=3.0, routing="random")
    list(simulated_fleet.run(1500.0))
    a, better, slow = (replica.counters for replica in simulated_fleet.replicas)
    assert acceptance_length(a) == pytest.approx(expected_length(KIND.acceptance, 3), rel=0.03)
    assert acceptance_length(better) == pytest.approx(expected_length(KIND.acceptance.shift_logits(0.5), 3), rel=0.03)
    ratio = (slow.inter_token_latency.total / slow.inter_token_latency.count) / (
        a.inter_token_latency.total / a.inter_token_latency.count
    )
    assert ratio == pytest.approx(1.5, rel=0.1)


def test_two_pods_with_the_same_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="each with a name of its own"):
        fleet(pod("a"), pod("a"))
