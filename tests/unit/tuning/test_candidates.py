"""Which settings an engine supports, and the reason for each one that is excluded."""

from __future__ import annotations

import pytest

from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Adaptive, Off, Static
from aerie.tuning.decision.candidates import Candidates, EngineConfig, build_candidates, fits_captured_graphs

LIGHT = [(4.0, 0.5), (16.0, 0.5)]
HEAVY = [(4.0, 0.5), (128.0, 0.5)]
NEWEST = Version.parse("0.33.0")


def exclusion_reason(candidates: Candidates, setting: str) -> str:
    return next(row.reason for row in candidates.excluded if row.label.startswith(setting))


def test_the_newest_release_supports_every_setting() -> None:
    candidates = build_candidates(EngineConfig(NEWEST), 3, HEAVY)
    assert candidates.fixed_settings == (Off(), Static(1), Static(2), Static(3))
    assert candidates.supports_schedules
    assert candidates.adaptive_settings == (Adaptive(3),)
    assert not candidates.excluded


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineConfig(NEWEST, EngineArguments(data_parallel=2)), "data parallel size 2"),
        (EngineConfig(NEWEST, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}), "model runner V1"),
        (EngineConfig(Version.parse("0.26.0")), "model runner V1"),
        (EngineConfig(NEWEST, method="medusa"), "medusa"),
    ],
)
def test_schedules_need_a_supporting_engine(engine: EngineConfig, reason: str) -> None:
    candidates = build_candidates(engine, 3, LIGHT)
    assert not candidates.supports_schedules
    assert reason in exclusion_reason(candidates, "schedules")


def test_a_dense_target_supports_schedules_with_model_runner_v2() -> None:
    assert build_candidates(EngineConfig(Version.parse("0.26.0"), is_moe=False), 3, LIGHT).supports_schedules
    assert not build_candidates(EngineConfig(Version.parse("0.26.0"), is_moe=True), 3, LIGHT).supports_schedules


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (EngineConfig(NEWEST, EngineArguments(enable_lora=True)), "LoRA"),
        (EngineConfig(NEWEST, EngineArguments(pipeline_parallel=2)), "pipeline parallelism"),
        (EngineConfig(NEWEST, EngineArguments(enforce_eager=True)), "eager"),
        (EngineConfig(Version.parse("0.29.0")), "use vLLM 0.30.0"),
    ],
)
def test_adaptive_verification_needs_a_supporting_engine(engine: EngineConfig, reason: str) -> None:
    candidates = build_candidates(engine, 3, LIGHT)
    assert not candidates.adaptive_settings
    assert reason in exclusion_reason(candidates, "adaptive")


@pytest.mark.parametrize(
    ("engine", "captured"),
    [
        (EngineConfig(NEWEST), None),
        (EngineConfig(Version.parse("0.28.0")), 512),
        (EngineConfig(NEWEST, EngineArguments(cudagraph_capture_sizes=(1, 8, 64))), 64),
        (EngineConfig(NEWEST, EngineArguments(max_cudagraph_capture_size=256)), 256),
        (EngineConfig(Version.parse("0.28.0"), EngineArguments(enforce_eager=True)), None),
    ],
)
def test_the_largest_captured_graph(engine: EngineConfig, captured: int | None) -> None:
    assert engine.max_captured_tokens == captured
    assert fits_captured_graphs(engine, 1000, 3) == (captured is None)


def test_no_step_of_a_candidate_runs_without_a_graph() -> None:
    candidates = build_candidates(EngineConfig(Version.parse("0.28.0"), is_moe=False), 5, HEAVY)
    assert candidates.fixed_settings == (Off(), Static(1), Static(2), Static(3))
    assert "50 % of the steps would verify more than the 512 tokens" in exclusion_reason(candidates, "K=4")


def test_a_rare_batch_excludes_nothing() -> None:
    rare = [(4.0, 0.995), (128.0, 0.005)]
    assert Static(5) in build_candidates(EngineConfig(Version.parse("0.28.0")), 5, rare).fixed_settings
