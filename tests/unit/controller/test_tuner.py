"""What the tuner is told, when it decides, and that without evidence it asks for nothing. Time is virtual, and so are decisions,
but for the last test: that one has a real process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.rollout import CanarySpec
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.startup_time import median_startup_seconds
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Counters, Gauges, Sample
from aerie.engine.speculation import Off, Static
from aerie.manifests import preflight_job, tuning_config_map
from aerie.tuning.recommendation import Recommendation
from aerie.tuning.telemetry import TelemetryScale, TuningTelemetry
from aerie.tuning.worker.codec import pack_telemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse
from tests.golden import Messages
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import deployment, pod
from tests.unit.tuning.windows import K3, window

CHAT = NamespacedName("default", "chat")
T0 = datetime(2026, 11, 1, tzinfo=UTC)
MINUTE = 60.0
INTERVAL = 30 * MINUTE
SETTING = {"mode": "Static", "numSpeculativeTokens": 3}
ZERO = window(K3, 1.0, 0.01) - window(K3, 1.0, 0.01)
BUSY = window(K3, 8.0, 0.01)
"""A minute of one pod."""


class Virtual(Clock):
    """Goes with the loop's time."""

    def now(self) -> datetime:
        return T0 + timedelta(seconds=asyncio.get_running_loop().time())


class Fake(TuningWorkerClient):
    """Answers as it is told, in no time."""

    def __init__(self) -> None:
        super().__init__(("false",))
        self.orders: list[DecisionRequest] = []
        self.action = "Hold"
        self.broken = ""

    async def request_decision(self, order: DecisionRequest) -> DecisionResponse:
        self.orders.append(order)
        if self.broken:
            raise TuningWorkerError(self.broken)
        setting = Static(5) if self.action in ("Change", "Explore") else None
        advice = Recommendation(order.revision, order.now, self.action, setting, None, "because.")  # type: ignore[arg-type]
        return DecisionResponse(advice, "all of it", pack_telemetry(order.merged_telemetry()))

    async def close(self) -> None:
        pass


def resource(
    mode: str = "Auto",
    *,
    image: str = "vllm/vllm-openai:v0.33.0",
    version: str | None = None,
    args: tuple[str, ...] = (),
    more: Any = None,
    **status: Any,
) -> SpeculativeDeployment:
    arm = {"revision": "r1", "setting": {"mode": "Static", "numSpeculativeTokens": 3}}
    return SpeculativeDeployment.from_dict(
        {
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat"},
            "spec": {
                "replicas": 2,
                "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "drafter": {"source": {"persistentVolumeClaim": {"claimName": "drafters"}}},
                "engine": {"image": image, "args": list(args), **({"version": version} if version else {})},
                "speculation": {"tuning": {"mode": mode, **(more or {})}},
            },
            "status": {"stable": arm, **status},
        }
    )


class Story:
    """A tuner, and a resource that it follows."""

    def __init__(self) -> None:
        self.decider, self.told, self.ends = Fake(), list[float](), Counter[str]()
        self.silence = ""
        self.tuner = Tuner(self._tell, self._count, lambda _: self.silence, Virtual(), self.decider)
        self.counters: dict[str, Counters] = {}
        self.children: dict[str, dict[str, Any]] = {}

    def _tell(self, key: NamespacedName) -> None:
        assert key == CHAT
        self.told.append(asyncio.get_running_loop().time())

    def _count(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.ends[outcome] += 1

    def follow(self, of: SpeculativeDeployment, *revisions: SpeculativeDeployment) -> None:
        """As it is now; `revisions` are the specs that made r1, r2, ..."""
        for number, spec in enumerate(revisions or (of,), 1):
            record = preflight_job.build_preflight_config_map(spec, f"r{number}", {})
            self.children[f"r{number}"] = record
        children = (deployment(), *self.children.values())
        pods = (pod(), pod(1, address="10.0.0.2"))
        self.tuner.track(CHAT, build_snapshot(of, children, pods=pods), of.status or Status())

    def written(self) -> None:
        kept = self.tuner.tuning_record(CHAT, "uid-chat")
        assert kept is not None
        made = tuning_config_map.render_tuning_config_map("chat", kept)
        made["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
        self.children["tuning"] = made

    def hear(self, counted: Counters, *, number: int = 0, group: str = "chat-r1", run: str = "c1", **gauges: Any) -> None:
        """A reading of a pod, after what it counted since the last one."""
        name = f"{group}-hash-{number}"
        self.counters[name] = self.counters.get(name, ZERO) + counted
        found = Sample(self.counters[name], Gauges(1.0, gauges.get("waiting", 0.0), 0.1, 1000.0), frozenset({"0"}))
        at = self.tuner._clock.now().timestamp()
        self.tuner.record_sample(CHAT, name, EngineEndpoint("http://10.0.0.1:8000/metrics", group, run), at, found, 60.0)

    async def traffic(self, seconds: float, counted: Counters = BUSY, every: float = 60.0, **of: Any) -> None:
        for _ in range(round(seconds / every)):
            self.hear(counted, **of)
            await asyncio.sleep(every)

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.tuner.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    @property
    def advice(self) -> Recommendation:
        found = self.tuner.recommendation(CHAT, "uid-chat")
        assert found is not None
        return found


# -------------------------------------------------------------------------------------------------------------- when it decides
def test_it_decides_once_an_interval_on_all_that_came_since(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(2.5 * INTERVAL)
            assert [order.current_setting for order in one.decider.orders] == [Static(3)] * 2
            first, second = (order.new_telemetry for order in one.decider.orders)
            whole = one.decider.orders[1].merged_telemetry()
            windows = sum(cell.windows for cell in whole.cells.values())
            assert windows == sum(cell.windows for part in (first, second) for cell in part.cells.values())
            assert 50 <= windows <= 70
            assert one.ends == {"hold": 2}
            assert len(one.told) == 2
            assert one.advice.revision == "r1"
            kept = one.tuner.tuning_record(CHAT, "uid-chat")
            assert kept is not None
            assert (kept.explanation, Recommendation.from_dict(json.loads(kept.recommendation))) == ("all of it", one.advice)

    run(story())


def test_a_canary_on_spare_gpus_takes_no_replica_and_another_does(run: Run) -> None:
    async def story() -> None:
        for canary, lent in (({}, 0), ({"capacity": "Reuse"}, 1), ({"capacity": "Reuse", "control": "Stable"}, 1)):
            async with Story() as one:
                of = resource()
                rollout = of.spec.rollout.model_copy(update={"canary": CanarySpec.from_dict(canary)})
                one.follow(of.model_copy(update={"spec": of.spec.model_copy(update={"rollout": rollout})}))
                await one.traffic(1.2 * INTERVAL)
                assert [order.borrowed_replicas for order in one.decider.orders] == [lent], (
                    "of two replicas one stays in any case"
                )

    run(story())


def test_what_a_canary_has_taught_is_decided_on_at_once(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(1.3 * INTERVAL)
            assert len(one.decider.orders) == 1
            now = one.tuner._clock.now()
            arms = {"fromSetting": SETTING, "toSetting": SETTING | {"numSpeculativeTokens": 5}, "revision": "r2"}
            trial = arms | {"purpose": "Explore", "result": "Explored", "message": "It was measured."}
            ended = {"startTime": T0.isoformat(), "completionTime": now.isoformat()}
            said = {"current": SETTING, "trials": [trial | ended], "explorationTimes": [now.isoformat()]}
            one.follow(resource(speculation=said))
            await one.traffic(0.2 * INTERVAL)
            assert [order.history.exploration_times for order in one.decider.orders] == [(), (now.timestamp(),)]
            await one.traffic(INTERVAL)
            assert len(one.decider.orders) == 3, "and then once an interval, as before"

    run(story())


def test_while_a_canary_explores_it_is_decided_again_and_again(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(1.3 * INTERVAL)
            assert [order.explored_setting for order in one.decider.orders] == [None]
            now = one.tuner._clock.now().isoformat()
            setting = SETTING | {"numSpeculativeTokens": 5}
            trial = {"setting": setting, "purpose": "Explore", "revision": "r2", "specRevision": "r1", "startTime": now}
            canary = {"revision": "r2", "setting": setting, "change": "K=5", "startTime": now, "readyTime": now}
            said = {"current": SETTING, "trial": trial}
            one.follow(resource(speculation=said, canary=canary | {"phase": "WarmingUp"}))
            await one.traffic(0.3 * INTERVAL)
            assert len(one.decider.orders) == 1
            one.follow(resource(speculation=said, canary=canary | {"phase": "Analyzing"}))
            await one.traffic(0.45 * INTERVAL)
            assert [order.explored_setting for order in one.decider.orders[1:]] == [Static(5)] * 4
            one.follow(resource(speculation=said | {"trial": trial | {"purpose": "Improve"}}, canary=canary))
            await one.traffic(1.2 * INTERVAL)
            assert [order.explored_setting for order in one.decider.orders[5:]] == [None, None]

    run(story())


def test_what_it_asks_with(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            more = {
                "maxSpeculativeTokens": 5,
                "cooldownDuration": "1h",
                "historyWindow": "12h",
                "decisionInterval": "10m",
                "slo": {"timePerOutputToken": "40ms"},
            }
            told = {"current": {"mode": "Static", "numSpeculativeTokens": 3}, "lastChangeTime": "2026-10-31T00:00:00Z"}
            one.follow(resource(args=("--max-num-seqs=64",), more=more, speculation=told))
            await one.traffic(700.0, waiting=3.0)
            (order,) = one.decider.orders
            assert (
                order.revision,
                order.max_speculative_tokens,
                order.replicas,
                order.queued_requests,
                order.borrowed_replicas,
            ) == ("r1", 5, 2, 3.0, 0)
            assert (order.engine.version, order.engine.arguments) == ("0.33.0", ("--max-num-seqs=64",))
            assert (order.policy.cooldown_seconds, order.policy.cooldown_after_rollback_seconds) == (3600.0, 4 * 3600.0)
            assert (order.policy.exploration_seconds, order.horizon, order.scale) == (
                600.0,
                12 * 3600.0,
                TelemetryScale.from_decision_interval(600.0, 12 * 3600.0),
            )
            assert order.objectives.time_per_output_token == pytest.approx(0.04)
            assert order.history.changed_at == datetime(2026, 10, 31, tzinfo=UTC).timestamp()
            back = DecisionRequest.from_line(order.to_line())
            assert replace(back, new_telemetry=order.new_telemetry) == order
            assert back.new_telemetry.cells.keys() == order.new_telemetry.cells.keys()

    run(story())


@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_who_is_not_tuned_is_not_followed(run: Run, mode: str) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource(mode))
            await one.traffic(1.2 * INTERVAL)
            assert len(one.decider.orders) == (mode == "Recommend")
            one.follow(resource("Off"))
            assert one.tuner.recommendation(CHAT, "uid-chat") is None
            assert one.tuner.tuning_record(CHAT, "uid-chat") is None

    run(story())


def test_a_new_operator_goes_on_from_what_is_written(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(1.2 * INTERVAL)
            one.written()
            async with Story() as two:
                two.children = dict(one.children)
                two.follow(resource())
                assert two.advice == one.advice
                await two.traffic(1.3 * INTERVAL)
                (order,) = two.decider.orders
                assert order.packed_telemetry
                assert sum(cell.windows for cell in order.merged_telemetry().cells.values()) > sum(
                    cell.windows for cell in order.new_telemetry.cells.values()
                )
            async with Story() as stranger:
                stranger.children = dict(one.children)
                stranger.follow(resource(image="vllm/vllm-openai:v0.32.0"))
                assert stranger.tuner.tuning_record(CHAT, "uid-chat") is None, "it is of other engines"

    run(story())


# ------------------------------------------------------------------------------------------------------------ without evidence
def test_without_requests_nothing_is_decided_and_nothing_held(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(3.5 * INTERVAL, ZERO)
            assert one.decider.orders == []
            assert one.advice.action == "Insufficient"
            assert "no requests" in one.advice.reason
            assert len(one.told) == 1, "what says nothing new causes no pass"
            assert one.ends == {"no_data": 3}
            assert one.tuner._sessions[CHAT].pending_telemetry is None

    run(story())


def test_when_nothing_can_be_read_the_advice_says_why(run: Run, messages: Messages) -> None:
    async def story() -> None:
        async with Story() as one:
            one.decider.action = "Change"
            one.follow(resource())
            await one.traffic(1.2 * INTERVAL)
            assert one.advice.setting == Static(5)
            one.silence = "http://prometheus:9090 cannot be reached."
            await asyncio.sleep(2 * INTERVAL)
            assert one.advice.action == "Insufficient"
            messages.check("no metrics", one.advice.reason)
            kept = one.tuner.tuning_record(CHAT, "uid-chat")
            assert kept is not None, "what was counted before stays"

    run(story())


@pytest.mark.parametrize(
    ("counted", "name"),
    [
        (window(Static(5), 8.0, 0.01), "K changed by hand"),
        (window(Off(), 8.0, 0.01), "speculation switched off by hand"),
    ],
)
def test_an_engine_that_runs_something_else_is_no_evidence(run: Run, messages: Messages, counted: Counters, name: str) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            one.counters["chat-r1-hash-0"] = counted - counted
            await one.traffic(1.2 * INTERVAL, counted)
            assert one.decider.orders == []
            assert one.advice.action == "Insufficient"
            messages.check(name, one.advice.reason)

    run(story())


def test_restarts_and_gaps_are_left_out_and_counted(run: Run, messages: Messages) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(600.0)
            one.counters.clear()  # the counters begin anew
            await one.traffic(600.0, run="c2")
            one.counters["chat-r1-hash-0"] = ZERO
            await one.traffic(120.0, run="c2")
            await asyncio.sleep(301.0)
            await one.traffic(600.0, run="c2")
            (order,) = one.decider.orders
            (restart, restarts), (gap, gaps) = order.new_telemetry.excluded_windows.most_common()
            assert (restarts, gaps) == (2, 1)
            messages.check("window over a restart", restart)
            messages.check("window over a gap", gap)

    run(story())


def test_short_windows_are_put_together(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(1.2 * INTERVAL, window(K3, 8.0, 0.01, seconds=5.0), every=5.0)
            (order,) = one.decider.orders
            windows = sum(cell.windows for cell in order.new_telemetry.cells.values())
            assert 150 <= windows <= 200, "of ten seconds each"

    run(story())


def test_without_a_record_of_the_engines_nothing_is_known(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.tuner.track(CHAT, build_snapshot(resource(), (deployment(),), pods=(pod(),)), resource().status or Status())
            await one.traffic(1.2 * INTERVAL)
            assert one.decider.orders == []
            assert one.advice.reason.startswith("there is no record of the engines")

    run(story())


# ------------------------------------------------------------------------------------------------------------------- whose pods
@pytest.mark.parametrize(("unlike", "settings"), [(None, {"3", "5"}), ("the canary's pods run on A100 (1 pod), ...", {"3"})])
def test_a_canary_on_another_gpu_teaches_nothing_of_its_setting(run: Run, unlike: str | None, settings: set[str]) -> None:
    async def story() -> None:
        arm = {
            "revision": "r2",
            "change": "K=5",
            "startTime": "2026-11-01T00:00:00Z",
            "setting": {"mode": "Static", "numSpeculativeTokens": 5},
        }
        analysis = {"parameters": {}, "verdict": "Continue", **({"hardwareMismatch": unlike} if unlike else {})}
        async with Story() as one:
            one.follow(resource(canary={**arm, "control": {"revision": "r1"}}, analysis=analysis), resource(), resource())
            wide = window(Static(5), 8.0, 0.01)
            one.counters["chat-r2-hash-0"] = wide - wide
            for _ in range(40):
                one.hear(BUSY)
                one.hear(BUSY, group="chat-r1-control")
                one.hear(wide, group="chat-r2")
                await asyncio.sleep(60.0)
            (order,) = one.decider.orders
            assert {str(block.setting) for block in order.new_telemetry.blocks()} == settings
            assert any("control" in key.replica for key in order.new_telemetry.cells) == (unlike is None)

    run(story())


def test_only_arms_that_differ_in_their_setting_alone_count(run: Run) -> None:
    async def story() -> None:
        others = (resource(image="vllm/vllm-openai:v0.32.0"), resource(version="0.34.0"))
        for other, settings in ((resource(), 2), *((one, 1) for one in others)):
            canary: dict[str, Any] = {
                "canary": {
                    "revision": "r2",
                    "change": "K=5",
                    "startTime": "2026-11-01T00:00:00Z",
                    "setting": {"mode": "Static", "numSpeculativeTokens": 5},
                    "control": {"revision": "r1"},
                }
            }
            async with Story() as one:
                one.follow(resource(**canary), resource(), other)
                wide = window(Static(5), 8.0, 0.01)
                one.counters["chat-r2-hash-0"] = wide - wide
                for _ in range(40):
                    one.hear(BUSY)
                    one.hear(BUSY, group="chat-r1-control")
                    one.hear(wide, group="chat-r2")
                    await asyncio.sleep(60.0)
                (order,) = one.decider.orders
                assert {str(block.setting) for block in order.new_telemetry.blocks()} == ({"3", "5"} if settings == 2 else {"3"})
                assert {key.replica for key in order.new_telemetry.cells} >= {"chat-r1-hash-0"}

    run(story())


@pytest.mark.parametrize("engine", [{"image": "vllm/vllm-openai:v0.32.0"}, {"version": "0.34.0"}])
def test_other_engines_begin_anew_and_another_setting_goes_on(run: Run, engine: dict[str, Any]) -> None:
    async def story() -> None:
        async with Story() as one:
            one.follow(resource())
            await one.traffic(1.2 * INTERVAL)
            arm = {"revision": "r2", "setting": {"mode": "Static", "numSpeculativeTokens": 5}}
            one.follow(resource(stable=arm), resource(), resource())
            assert one.tuner.tuning_record(CHAT, "uid-chat") is not None
            arm = {"revision": "r3", "setting": {"mode": "Static", "numSpeculativeTokens": 5}}
            newer = resource(**engine)
            one.follow(resource(stable=arm), resource(), resource(), newer)
            assert one.tuner.tuning_record(CHAT, "uid-chat") is None
            assert one.tuner.recommendation(CHAT, "uid-chat") is None

    run(story())


# ----------------------------------------------------------------------------------------------------------------- what may fail
def test_a_decision_that_fails_is_tried_again_on_all_that_was_counted(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            one.decider.broken = "it ended with status -9"
            one.follow(resource())
            await one.traffic(1.2 * INTERVAL)
            failed = len(one.decider.orders)
            assert failed >= 2
            assert one.ends == {"failed": failed}
            assert one.told == []
            one.decider.broken = ""
            await one.traffic(0.5 * INTERVAL)
            assert one.ends["hold"] == 1
            windows = sum(cell.windows for cell in one.decider.orders[-1].new_telemetry.cells.values())
            assert windows >= 30, "those of the failed tries are among them"

    run(story())


def test_a_pods_start_tells_what_a_reload_costs() -> None:
    def started(seconds: int, **engine: Any) -> dict[str, Any]:
        made = pod()
        begun = {"state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}, **engine}
        made["status"]["containerStatuses"][0] |= begun
        at = (T0 + timedelta(seconds=seconds)).isoformat()
        made["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": at}]
        return made

    assert median_startup_seconds((started(100), started(200), started(900), started(1, restartCount=2), pod())) == 200.0
    assert median_startup_seconds((pod(),)) is None


# ------------------------------------------------------------------------------------------------------------- the real process
def order(**changes: Any) -> DecisionRequest:
    from aerie.tuning.decision.policy import LatencyObjectives, TrialHistory, TuningPolicy
    from aerie.tuning.worker.protocol import EngineFacts
    from tests.unit.tuning.windows import spread, telemetry

    since = telemetry([K3], lambda b, k: 0.01 + 5e-5 * b * (k + 1), spread(2, 40, 60))
    made = DecisionRequest(
        *(
            "r1",
            3600.0,
            K3,
            EngineFacts("0.33.0"),
            7,
            4,
            0.0,
            0,
            2,
            (),
            None,
            LatencyObjectives(),
            TrialHistory(),
            TuningPolicy(),
        ),
        *(since.horizon, since.scale, "", since),
    )
    return replace(made, **changes)


def in_real_time(work: Any) -> None:
    asyncio.run(work)


@pytest.mark.slow
def test_a_process_decides_and_ends_when_nothing_is_asked() -> None:
    async def story() -> None:
        decider = TuningWorkerClient(timeout_seconds=300.0, idle_timeout_seconds=0.0)
        try:
            first = await decider.request_decision(order())
            assert first.recommendation.action in ("Hold", "Change", "Explore")
            assert first.recommendation.revision == "r1"
            assert "Evidence" in first.explanation
            process = decider._process
            assert process is not None
            async with asyncio.timeout(300.0):
                assert await process.wait() == 0, "it ends with its input"
            again = await decider.request_decision(
                order(packed_telemetry=first.packed_telemetry, new_telemetry=TuningTelemetry())
            )
            assert again.recommendation == first.recommendation, "the same telemetry, from its text"
            few = await decider.request_decision(order(new_telemetry=TuningTelemetry()))
            assert few.recommendation.action == "Insufficient"
            with pytest.raises(TuningWorkerError, match="failed: "):
                await decider.request_decision(order(engine=replace(order().engine, version="none")))
        finally:
            await decider.close()

    in_real_time(story())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.stdin.readline(); print('nonsense')", "failed"),
        ("import sys; sys.exit(3)", "failed|cannot be started"),
        ("import time; time.sleep(600)", "did not respond within"),
        ("import sys; sys.stdin.readline(); sys.stdout.write('x' * 5_000_000); sys.stdout.flush()", "failed"),
    ],
    ids=["talks nonsense", "ends", "hangs", "does not stop talking"],
)
def test_a_process_that_does_not_answer_as_it_should_is_killed(program: str, message: str) -> None:
    async def story() -> None:
        decider = TuningWorkerClient((sys.executable, "-c", program), timeout_seconds=1.0 if "sleep" in program else 300.0)
        with pytest.raises(TuningWorkerError, match=message):
            await decider.request_decision(order(new_telemetry=TuningTelemetry()))
        assert decider._process is None

    in_real_time(story())


def test_a_command_that_is_none_is_told() -> None:
    async def story() -> None:
        with pytest.raises(TuningWorkerError, match="cannot be started"):
            await TuningWorkerClient(("/nonexistent",)).request_decision(order(new_telemetry=TuningTelemetry()))

    in_real_time(story())


def test_what_has_failed_and_what_a_trial_takes_goes_with_the_order(run: Run) -> None:
    ended = T0.isoformat()
    failure = {
        "setting": SETTING | {"numSpeculativeTokens": 5},
        "reason": "Failed",
        "failureCount": 2,
        "specRevision": "r1",
        "lastStartTime": ended,
        "lastCompletionTime": ended,
    }
    without = failure | {"setting": SETTING | {"numSpeculativeTokens": 7}, "reason": "InsufficientCapacity", "requiredPods": 4}
    said = {"current": SETTING, "consecutiveFailures": 2, "failures": [failure, without], "lastRollbackTime": ended}

    async def story() -> None:
        async with Story() as one:
            one.follow(resource(speculation=said))
            await one.traffic(1.3 * INTERVAL)
            (found,) = one.decider.orders
            assert (found.surge_pods, found.history.consecutive_failures) == (2, 2)
            (failed,) = found.failed_trials
            assert (failed.setting, failed.was_compared) == (Static(5), False)
            assert failed.backoff_until == (T0 + timedelta(hours=48)).timestamp()
            assert DecisionRequest.from_line(found.to_line()).failed_trials == found.failed_trials

    run(story())


def test_a_resource_whose_spec_asks_for_no_drafts_is_not_decided_on(run: Run) -> None:
    async def story() -> None:
        async with Story() as one:
            found = resource()
            spec = found.spec.speculation.model_copy(update={"num_speculative_tokens": 0})
            one.follow(found.model_copy(update={"spec": found.spec.model_copy(update={"speculation": spec})}))
            await one.traffic(1.3 * INTERVAL)
            assert one.decider.orders == []
            assert one.tuner.recommendation(CHAT, "uid-chat") is None

    run(story())
