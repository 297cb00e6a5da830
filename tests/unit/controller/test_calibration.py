"""Stable pods are followed while nothing is rolled out: who counts, from when on, and what the next operator finds."""

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
from aerie.rollout.canary import calibration_record
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import deployment, pod
from tests.unit.controller.test_blocks import sample

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


def followed(histories: CalibrationCollector, of: SpeculativeDeployment, *children: dict[str, Any]) -> ComparisonConfig | None:
    revision = of.status.stable.revision if of.status is not None and of.status.stable is not None else ""
    made = deployment(revision=revision, image=of.spec.engine.image)
    return histories.track(CHAT, build_snapshot(of, (made, *children)), of.status or Status(), 60.0)


def grown(histories: CalibrationCollector, of: SpeculativeDeployment, blocks: int, begin: float = 0.0) -> bool:
    """So many blocks of two pods; whether the last one is worth a write."""
    subject = followed(histories, of)
    assert subject is not None
    comparison, due, n = BlockCollector(replace(subject, warmup_seconds=0.0)), False, 0
    while blocks:
        now = begin + 60.0 * n
        pods = [(name, "chat-r1", now, sample(1500.0 * n, 2000.0 * n + 10 * n * (name == "a"), 30.0 * n)) for name in "ab"]
        if comparison.collect(now, pods):
            due = histories.add_block(CHAT, comparison.blocks.pop(), subject)
            blocks -= 1
        n += 1
    return due


def test_the_stable_pods_are_followed_at_the_slow_pace() -> None:
    subject = followed(CalibrationCollector(), resource())
    assert subject is not None
    assert subject.is_stable_only
    assert subject.arms == {"chat-r1": "control"}
    assert (subject.rule.block_seconds, subject.rule.scrape_interval_seconds, subject.rule.pods_per_minimum) == (120.0, 60.0, 1)
    assert subject.projection.draft_positions == 3
    assert subject == followed(CalibrationCollector(), resource(metrics={"interval": "5s"})), (
        "what does not matter is no other subject"
    )


def test_nobody_is_followed_during_a_rollout_nor_alone_nor_before_anything_is_stable() -> None:
    assert followed(CalibrationCollector(), resource(rolling=True)) is None
    assert followed(CalibrationCollector(), resource(replicas=1)) is None
    first = resource()
    assert CalibrationCollector().track(CHAT, build_snapshot(first), Status(), 60.0) is None


def test_a_pod_counts_when_it_has_warmed_up() -> None:
    subject = followed(CalibrationCollector(), resource())
    assert subject is not None
    assert subject.warmup_seconds == 300.0
    comparison, blocks = BlockCollector(subject), []
    for n in range(30):
        now = 60.0 * n
        pods = [("a", "chat-r1", now, sample(1500.0 * n, 2000.0 * n, 30.0 * n))]
        if n >= 10:
            pods.append(("b", "chat-r1", now, sample(1500.0 * n, 2000.0 * n, 30.0 * n)))
        pods.append(("mute", "chat-r1", 0.0, None))  # type: ignore[arg-type]
        if comparison.collect(now, pods):
            blocks.append(comparison.blocks.pop())
    counted = [(one.start_time, set(one.control.counts_by_pod)) for one in blocks if one.control is not None]
    assert min(began for began, _ in counted) >= 300.0 - 60.0, "the reading with which a window begins may be an interval late"
    assert min(began for began, names in counted if "b" in names) >= 900.0 - 60.0
    assert not any("mute" in names for _, names in counted)


def test_what_is_known_waits_for_the_analysis_and_goes_with_the_resource() -> None:
    histories = CalibrationCollector()
    assert histories.baseline_calibration(CHAT, "uid-chat") is None
    assert grown(histories, resource(), 1), "the first block is written"
    assert not grown(histories, resource(), 0)
    known = histories.baseline_calibration(CHAT, "uid-chat")
    assert known is not None
    assert known.block_count == 1
    followed(histories, resource(rolling=True))
    assert histories.baseline_calibration(CHAT, "uid-chat") == known
    assert histories.baseline_calibration(CHAT, "another") is None
    followed(histories, resource(uid="another"))
    assert histories.baseline_calibration(CHAT, "another") is None
    histories.forget(CHAT)
    assert histories.baseline_calibration(CHAT, "uid-chat") is None


def test_another_operator_goes_on_from_what_is_written() -> None:
    histories, mine = CalibrationCollector(), resource()
    grown(histories, mine, 5)
    known = histories.baseline_calibration(CHAT, "uid-chat")
    assert known is not None
    written = calibration_record.build_calibration_config_map(mine, known)
    written["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
    later = CalibrationCollector()
    followed(later, mine, written)
    assert later.baseline_calibration(CHAT, "uid-chat") == known
    assert not calibration_record.is_calibration_write_due(
        known, calibration_record.read_stored_calibration(build_snapshot(mine, (written,))), canary_active=True
    )
    stranger = CalibrationCollector()
    followed(stranger, mine, {**written, "metadata": {**written["metadata"], "ownerReferences": []}})
    assert stranger.baseline_calibration(CHAT, "uid-chat") is None
    promoted = CalibrationCollector()
    followed(promoted, resource("r2"), written)
    assert promoted.baseline_calibration(CHAT, "uid-chat") == known
    newer = CalibrationCollector()
    followed(newer, resource("r2", engine={"image": "vllm/vllm-openai:v0.34.0"}), written)
    assert newer.baseline_calibration(CHAT, "uid-chat") is None, "it is of another engine"
    shorter = CalibrationCollector()
    followed(shorter, resource(rollout={"analysis": {"blockDuration": "60s"}}), written)
    assert shorter.baseline_calibration(CHAT, "uid-chat") is None


def test_another_engine_ends_what_is_known_and_one_that_is_away_for_a_moment_does_not() -> None:
    histories, mine = CalibrationCollector(), resource()
    grown(histories, mine, 5)
    known = histories.baseline_calibration(CHAT, "uid-chat")
    assert histories.track(CHAT, build_snapshot(mine), mine.status or Status(), 60.0) is None
    assert histories.baseline_calibration(CHAT, "uid-chat") == known
    newer = resource("r2", engine={"image": "vllm/vllm-openai:v0.34.0"})
    assert followed(histories, newer) is not None
    assert histories.baseline_calibration(CHAT, "uid-chat") is None


def test_stable_pods_are_read_twice_in_a_block_of_an_analysis(run: Run) -> None:
    async def paces() -> None:
        for block, pace in (("2m", 60.0), ("1h", 60.0), ("40s", 20.0), ("10s", 15.0)):
            of = resource(rollout={"analysis": {"blockDuration": block}})
            scraper = Scraper(lambda _: None, lambda *_: None)
            scraper.track(CHAT, build_snapshot(of, (deployment(),), pods=(pod(),)), of.status or Status())
            assert [one.interval for one in scraper.metrics.targets.values()] == [pace]

    run(paces())


class Set(Clock):
    moment = T0

    def now(self) -> datetime:
        return self.moment


def test_the_scraper_tells_of_a_history_only_when_it_is_to_be_written(run: Run) -> None:
    run(told_by_a_scraper())


async def told_by_a_scraper() -> None:
    clock = Set()
    scraper = Scraper(lambda _: None, lambda *_: None, clock=clock)
    of = resource()
    pods = (pod(), pod(1, address="10.0.0.2"))
    scraper.track(CHAT, build_snapshot(of, (deployment(),), pods=pods), of.status or Status())
    told = []
    for n in range(200):
        clock.moment = T0 + timedelta(seconds=60 * n)
        for name, one in scraper.metrics.targets.items():
            if n < 20:
                continue  # they load, and do not answer
            one.last_sample = sample(1500.0 * n, 2000.0 * n + 10 * n * name.name.endswith("0"), 30.0 * n)
            one.last_sample_at = clock.moment.timestamp()
        if scraper.metrics.collect_block(CHAT):
            held = scraper.baseline_calibration(CHAT, "uid-chat")
            assert held is not None
            told.append(held.block_count)
            written = calibration_record.build_calibration_config_map(of, held)
            written["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
            scraper.track(CHAT, build_snapshot(of, (deployment(), written), pods=pods), of.status or Status())
        assert scraper.blocks(CHAT) == (), "an analysis that begins finds no blocks of before"
    assert told == [1, 2, 4, 8, 16, 32, 62]
    rolling = build_snapshot(resource(rolling=True), (deployment(),), pods=pods)
    scraper.track(CHAT, rolling, rolling.resource.status or Status())
    assert not scraper.metrics.collect_block(CHAT)
    assert scraper.baseline_calibration(CHAT, "uid-chat") is not None
    scraper.forget(CHAT)
    assert scraper.baseline_calibration(CHAT, "uid-chat") is None
