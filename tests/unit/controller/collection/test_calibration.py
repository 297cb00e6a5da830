"""Calibration on stable pods while nothing is rolled out: which pods count, from when on, and what the next operator reads."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.collection.blocks import BlockCollector, ComparisonConfig
from aerie.controller.collection.calibration import CalibrationCollector
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.canary.analysis_run import calibration_record
from tests.snapshots import build_snapshot
from tests.unit.controller.collection.test_blocks import sample
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import deployment, pod
from tests.unit.rollout.in_place_world import build_in_place_rollout

CHAT = NamespacedName("default", "chat")
OLD = "2026-01-01T00:00:00Z"
T0 = datetime(2026, 11, 1, tzinfo=UTC)


def resource(revision: str = "r1", uid: str = "uid-chat", *, rolling: bool = False, **spec: Any) -> SpeculativeDeployment:
    setting = {"mode": "Static", "numSpeculativeTokens": 3}
    canary = {"canary": {"revision": "r2", "change": "K=5", "startTime": OLD}} if rolling else {}
    return SpeculativeDeployment.from_dict(
        {
            "metadata": {"name": "chat", "namespace": "default", "uid": uid},
            "spec": {
                "replicas": 2,
                "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "engine": {"image": "vllm/vllm-openai:v0.33.0"},
                **spec,
            },
            "status": {"stable": {"revision": revision, "setting": setting}, **canary},
        }
    )


def track_resource(
    collector: CalibrationCollector, tracked_resource: SpeculativeDeployment, *children: dict[str, Any]
) -> ComparisonConfig | None:
    revision = (
        tracked_resource.status.stable.revision
        if tracked_resource.status is not None and tracked_resource.status.stable is not None
        else ""
    )
    stable_deployment = deployment(revision=revision, image=tracked_resource.spec.engine.image)
    return collector.track(
        CHAT, build_snapshot(tracked_resource, (stable_deployment, *children)), tracked_resource.status or Status(), 60.0
    )


def add_blocks(
    collector: CalibrationCollector, tracked_resource: SpeculativeDeployment, blocks: int, start_time: float = 0.0
) -> bool:
    """Collect `blocks` blocks of two pods; return whether a write is due after the last one."""
    config = track_resource(collector, tracked_resource)
    assert config is not None
    comparison, is_write_due, scrape_number = BlockCollector(replace(config, warmup_seconds=0.0)), False, 0
    while blocks:
        now = start_time + 60.0 * scrape_number
        pods = [
            (
                name,
                "chat-r1",
                now,
                sample(1500.0 * scrape_number, 2000.0 * scrape_number + 10 * scrape_number * (name == "a"), 30.0 * scrape_number),
            )
            for name in "ab"
        ]
        if comparison.collect(now, pods):
            is_write_due = collector.add_block(CHAT, comparison.blocks.pop(), config)
            blocks -= 1
        scrape_number += 1
    return is_write_due


def test_stable_pods_are_scraped_at_the_slow_interval() -> None:
    config = track_resource(CalibrationCollector(), resource())
    assert config is not None
    assert config.is_stable_only
    assert config.arms == {"chat-r1": "control"}
    assert (config.rule.block_seconds, config.rule.scrape_interval_seconds, config.rule.pods_per_minimum) == (120.0, 60.0, 1)
    assert config.projection.draft_positions == 3
    assert config == track_resource(CalibrationCollector(), resource(metrics={"interval": "5s"})), (
        "other fields do not change the comparison"
    )


def test_no_calibration_in_a_rollout_or_without_two_stable_pods() -> None:
    assert track_resource(CalibrationCollector(), resource(rolling=True)) is None
    assert track_resource(CalibrationCollector(), resource(replicas=1)) is None
    changing = resource()
    assert changing.status is not None
    status = changing.status.model_copy(update={"in_place_rollout": build_in_place_rollout()})
    assert track_resource(CalibrationCollector(), changing.model_copy(update={"status": status})) is None, "pods differ"
    first = resource()
    assert CalibrationCollector().track(CHAT, build_snapshot(first), Status(), 60.0) is None


def test_pod_counts_after_its_warm_up() -> None:
    config = track_resource(CalibrationCollector(), resource())
    assert config is not None
    assert config.warmup_seconds == 300.0
    comparison, blocks = BlockCollector(config), []
    for n in range(30):
        now = 60.0 * n
        pods = [("a", "chat-r1", now, sample(1500.0 * n, 2000.0 * n, 30.0 * n))]
        if n >= 10:
            pods.append(("b", "chat-r1", now, sample(1500.0 * n, 2000.0 * n, 30.0 * n)))
        pods.append(("mute", "chat-r1", 0.0, None))  # type: ignore[arg-type]
        if comparison.collect(now, pods):
            blocks.append(comparison.blocks.pop())
    pods_by_start_time = [(block.start_time, set(block.control.counts_by_pod)) for block in blocks if block.control is not None]
    assert min(start_time for start_time, _ in pods_by_start_time) >= 300.0 - 60.0, (
        "the reading with which a window begins may be an interval late"
    )
    assert min(start_time for start_time, names in pods_by_start_time if "b" in names) >= 900.0 - 60.0
    assert not any("mute" in names for _, names in pods_by_start_time)


def test_calibration_is_kept_for_the_analysis_until_deletion() -> None:
    collector = CalibrationCollector()
    assert collector.baseline_calibration(CHAT, "uid-chat") is None
    assert add_blocks(collector, resource(), 1), "the first block is written"
    assert not add_blocks(collector, resource(), 0)
    calibration = collector.baseline_calibration(CHAT, "uid-chat")
    assert calibration is not None
    assert calibration.block_count == 1
    track_resource(collector, resource(rolling=True))
    assert collector.baseline_calibration(CHAT, "uid-chat") == calibration
    assert collector.baseline_calibration(CHAT, "another") is None
    track_resource(collector, resource(uid="another"))
    assert collector.baseline_calibration(CHAT, "another") is None
    collector.forget(CHAT)
    assert collector.baseline_calibration(CHAT, "uid-chat") is None


def test_next_operator_continues_from_the_config_map() -> None:
    collector, stable_resource = CalibrationCollector(), resource()
    add_blocks(collector, stable_resource, 5)
    calibration = collector.baseline_calibration(CHAT, "uid-chat")
    assert calibration is not None
    config_map = calibration_record.build_calibration_config_map(stable_resource, calibration)
    config_map["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
    next_collector = CalibrationCollector()
    track_resource(next_collector, stable_resource, config_map)
    assert next_collector.baseline_calibration(CHAT, "uid-chat") == calibration
    assert not calibration_record.is_calibration_write_due(
        calibration,
        calibration_record.read_stored_calibration(build_snapshot(stable_resource, (config_map,))),
        canary_active=True,
    )
    collector_without_owner = CalibrationCollector()
    track_resource(
        collector_without_owner, stable_resource, {**config_map, "metadata": {**config_map["metadata"], "ownerReferences": []}}
    )
    assert collector_without_owner.baseline_calibration(CHAT, "uid-chat") is None
    collector_after_promotion = CalibrationCollector()
    track_resource(collector_after_promotion, resource("r2"), config_map)
    assert collector_after_promotion.baseline_calibration(CHAT, "uid-chat") == calibration
    collector_of_newer_engine = CalibrationCollector()
    track_resource(collector_of_newer_engine, resource("r2", engine={"image": "vllm/vllm-openai:v0.34.0"}), config_map)
    assert collector_of_newer_engine.baseline_calibration(CHAT, "uid-chat") is None, "it is of another engine"
    collector_of_shorter_blocks = CalibrationCollector()
    track_resource(collector_of_shorter_blocks, resource(rollout={"analysis": {"blockDuration": "60s"}}), config_map)
    assert collector_of_shorter_blocks.baseline_calibration(CHAT, "uid-chat") is None


def test_calibration_ends_with_its_engine_not_with_its_deployment() -> None:
    collector, stable_resource = CalibrationCollector(), resource()
    add_blocks(collector, stable_resource, 5)
    calibration = collector.baseline_calibration(CHAT, "uid-chat")
    assert collector.track(CHAT, build_snapshot(stable_resource), stable_resource.status or Status(), 60.0) is None
    assert collector.baseline_calibration(CHAT, "uid-chat") == calibration
    newer_resource = resource("r2", engine={"image": "vllm/vllm-openai:v0.34.0"})
    assert track_resource(collector, newer_resource) is not None
    assert collector.baseline_calibration(CHAT, "uid-chat") is None


def test_stable_pods_are_scraped_twice_per_block(run: Run) -> None:
    async def check_intervals() -> None:
        for block, interval in (("2m", 60.0), ("1h", 60.0), ("40s", 20.0), ("10s", 15.0)):
            tracked_resource = resource(rollout={"analysis": {"blockDuration": block}})
            scraper = Scraper(lambda _: None, lambda *_: None)
            scraper.track(
                CHAT, build_snapshot(tracked_resource, (deployment(),), pods=(pod(),)), tracked_resource.status or Status()
            )
            assert [scrape_target.interval for scrape_target in scraper.metrics.targets.values()] == [interval]

    run(check_intervals())


class FixedClock(Clock):
    time = T0

    def now(self) -> datetime:
        return self.time


def test_scraper_notifies_of_a_calibration_only_when_a_write_is_due(run: Run) -> None:
    run(collect_with_a_scraper())


async def collect_with_a_scraper() -> None:
    clock = FixedClock()
    scraper = Scraper(lambda _: None, lambda *_: None, clock=clock)
    tracked_resource = resource()
    pods = (pod(), pod(1, address="10.0.0.2"))
    scraper.track(CHAT, build_snapshot(tracked_resource, (deployment(),), pods=pods), tracked_resource.status or Status())
    block_counts = []
    for scrape_number in range(200):
        clock.time = T0 + timedelta(seconds=60 * scrape_number)
        for name, scrape_target in scraper.metrics.targets.items():
            if scrape_number < 20:
                continue  # they load, and do not respond
            scrape_target.last_sample = sample(
                1500.0 * scrape_number,
                2000.0 * scrape_number + 10 * scrape_number * name.name.endswith("0"),
                30.0 * scrape_number,
            )
            scrape_target.last_sample_at = clock.time.timestamp()
        if scraper.metrics.collect_block(CHAT):
            calibration = scraper.baseline_calibration(CHAT, "uid-chat")
            assert calibration is not None
            block_counts.append(calibration.block_count)
            config_map = calibration_record.build_calibration_config_map(tracked_resource, calibration)
            config_map["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
            scraper.track(
                CHAT, build_snapshot(tracked_resource, (deployment(), config_map), pods=pods), tracked_resource.status or Status()
            )
        assert scraper.blocks(CHAT) == (), "a new analysis gets no earlier blocks"
    assert block_counts == [1, 2, 4, 8, 16, 32, 62]
    rolling = build_snapshot(resource(rolling=True), (deployment(),), pods=pods)
    scraper.track(CHAT, rolling, rolling.resource.status or Status())
    assert not scraper.metrics.collect_block(CHAT)
    assert scraper.baseline_calibration(CHAT, "uid-chat") is not None
    scraper.forget(CHAT)
    assert scraper.baseline_calibration(CHAT, "uid-chat") is None
