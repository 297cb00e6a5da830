"""Which settings an engine may have, and that each other one is named with its reason."""

from __future__ import annotations

import pytest

from aerie.engine.arguments import Arguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Adaptive, Off, Static
from aerie.tuning.decision.candidates import Candidates, Engine, candidates, fits_graphs

LIGHT = [(4.0, 0.5), (16.0, 0.5)]
HEAVY = [(4.0, 0.5), (128.0, 0.5)]
NEWEST = Version.parse("0.33.0")


def why(found: Candidates, setting: str) -> str:
    return next(one.why for one in found.left_out if one.setting.startswith(setting))


def test_the_newest_release_may_have_everything() -> None:
    found = candidates(Engine(NEWEST), 3, HEAVY)
    assert found.fixed == (Off(), Static(1), Static(2), Static(3))
    assert found.schedules
    assert found.adaptive == (Adaptive(3),)
    assert not found.left_out


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Engine(NEWEST, Arguments(data_parallel=2)), "data parallel size 2"),
        (Engine(NEWEST, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}), "model runner V1"),
        (Engine(Version.parse("0.26.0")), "model runner V1"),
        (Engine(NEWEST, method="medusa"), "medusa"),
    ],
)
def test_schedules_need_the_engine_for_it(engine: Engine, reason: str) -> None:
    found = candidates(engine, 3, LIGHT)
    assert not found.schedules
    assert reason in why(found, "schedules")


def test_a_dense_target_runs_schedules_from_the_release_on_that_runs_it_on_v2() -> None:
    assert candidates(Engine(Version.parse("0.26.0"), experts=False), 3, LIGHT).schedules
    assert not candidates(Engine(Version.parse("0.26.0"), experts=True), 3, LIGHT).schedules


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Engine(NEWEST, Arguments(lora=True)), "LoRA"),
        (Engine(NEWEST, Arguments(pipeline_parallel=2)), "pipeline parallelism"),
        (Engine(NEWEST, Arguments(enforce_eager=True)), "eager"),
        (Engine(Version.parse("0.29.0")), "use vLLM 0.30.0"),
    ],
)
def test_adaptive_verification_needs_the_engine_for_it(engine: Engine, reason: str) -> None:
    found = candidates(engine, 3, LIGHT)
    assert not found.adaptive
    assert reason in why(found, "adaptive")


@pytest.mark.parametrize(
    ("engine", "captured"),
    [
        (Engine(NEWEST), None),
        (Engine(Version.parse("0.28.0")), 512),
        (Engine(NEWEST, Arguments(capture_sizes=(1, 8, 64))), 64),
        (Engine(NEWEST, Arguments(max_capture_size=256)), 256),
        (Engine(Version.parse("0.28.0"), Arguments(enforce_eager=True)), None),
    ],
)
def test_the_largest_captured_graph(engine: Engine, captured: int | None) -> None:
    assert engine.captured == captured
    assert fits_graphs(engine, 1000, 3) == (captured is None)


def test_no_step_of_a_candidate_runs_without_a_graph() -> None:
    found = candidates(Engine(Version.parse("0.28.0"), experts=False), 5, HEAVY)
    assert found.fixed == (Off(), Static(1), Static(2), Static(3))
    assert "50 % of the steps would verify more than the 512 tokens" in why(found, "K=4")


def test_a_batch_that_hardly_ever_comes_rules_nothing_out() -> None:
    rare = [(4.0, 0.995), (128.0, 0.005)]
    assert Static(5) in candidates(Engine(Version.parse("0.28.0")), 5, rare).fixed
