"""List the settings that an engine may run, and why the others are excluded.

Guarantees: the engine's version, model runner, parallelism and method run a candidate as written (`aerie.engine.command_line`).
No candidate takes the steps of the load beyond the captured graphs. Not guaranteed: that it fits the GPU's memory, which
preflight checks.

The capture cliff: a step of B requests verifies B (K + 1) tokens. Above the largest captured CUDA graph it runs without one and
takes two to three times as long. From the release that captures the batches of its own tiers (`Feature.SCHEDULE_TIER_GRAPHS`),
the cliff exists only if the user sets the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aerie.engine import command_line
from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Feature, Version, supports
from aerie.engine.speculation import (
    Adaptive,
    Off,
    Schedule,
    ScheduleTier,
    SpeculationSetting,
    Static,
    describe_setting,
    max_speculative_tokens,
)

DEFAULT_MAX_CAPTURED_TOKENS = 512
"""Tokens of the largest graph that vLLM captures by default (vllm/config/vllm.py)."""
MAX_UNCAPTURED_STEP_SHARE = 0.01
"""Share of the request-steps that may run without a captured graph."""
MAX_SCHEDULE_TIERS = 4


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of the engines, as known before any measurement."""

    version: Version
    arguments: EngineArguments = field(default_factory=EngineArguments)
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_moe: bool | None = None
    """True if the target is a mixture of experts, False if it is dense, None if unknown."""

    @property
    def max_captured_tokens(self) -> int | None:
        """Tokens of the largest captured graph, if a step can exceed it; None if no step can."""
        arguments = self.arguments
        if arguments.enforce_eager:
            return None
        if arguments.cudagraph_capture_sizes:
            return arguments.cudagraph_capture_sizes[-1]
        if arguments.max_cudagraph_capture_size:
            return arguments.max_cudagraph_capture_size
        return None if supports(self.version, Feature.SCHEDULE_TIER_GRAPHS) else DEFAULT_MAX_CAPTURED_TOKENS

    def unsupported_reasons(self, setting: SpeculationSetting) -> tuple[str, ...]:
        """Return why the engine does not run the setting as intended; empty if it does."""
        reasons = list(
            command_line.find_unsupported_reasons(
                setting, command_line.DrafterArguments("", self.method), self.version, self.arguments
            )
        )
        if isinstance(setting, Schedule | Adaptive):
            runner, runner_reason = command_line.resolve_model_runner(
                self.version, self.method, self.environment, is_moe=self.is_moe
            )
            if runner == 1 and isinstance(setting, Schedule):
                reasons.append(
                    f"model runner V1 ({runner_reason}) runs schedules with piecewise graphs only: published measurements lose "
                    "6.6 to 21.6 % in tiers without drafts (vLLM issue 49548)."
                )
            if runner == 1 and isinstance(setting, Adaptive):
                reasons.append(f"adaptive verification needs model runner V2, and this is V1 ({runner_reason}).")
        return tuple(reasons)


@dataclass(frozen=True)
class ExcludedCandidate:
    """A candidate that was not evaluated."""

    label: str
    reason: str


@dataclass(frozen=True)
class Candidates:
    """Settings to choose from."""

    fixed_settings: tuple[SpeculationSetting, ...]
    """No speculation, and the static settings."""
    supports_schedules: bool
    adaptive_settings: tuple[Adaptive, ...]
    excluded: tuple[ExcludedCandidate, ...]


def build_candidates(engine: EngineConfig, max_k: int, load: Sequence[tuple[float, float]]) -> Candidates:
    """Return the candidates up to K = `max_k`, for a load of (batch, share of the request-steps)."""
    fixed: list[SpeculationSetting] = []
    excluded: list[ExcludedCandidate] = []
    settings: list[SpeculationSetting] = [Off(), *(Static(k) for k in range(1, max_k + 1))]
    for setting in settings:
        if reasons := (*engine.unsupported_reasons(setting), *_capture_limit_reasons(engine, setting, load)):
            excluded.append(ExcludedCandidate(describe_setting(setting), " ".join(reasons)))
        else:
            fixed.append(setting)
    schedule_reasons = (
        engine.unsupported_reasons(Schedule((ScheduleTier(1, 1, max_k),), max_k))
        if max_k > 0
        else ("the most draft tokens are 0.",)
    )
    if schedule_reasons:
        excluded.append(ExcludedCandidate("schedules", " ".join(schedule_reasons)))
    adaptive = [Adaptive(max_k)] if max_k > 0 else []
    for candidate in list(adaptive):
        if reasons := engine.unsupported_reasons(candidate):
            excluded.append(ExcludedCandidate(describe_setting(candidate), " ".join(reasons)))
            adaptive.remove(candidate)
    return Candidates(tuple(fixed), not schedule_reasons, tuple(adaptive), tuple(excluded))


def fits_captured_graphs(engine: EngineConfig, batch: float, draft_tokens: int) -> bool:
    """Return whether a step of this batch and K runs with a captured graph."""
    max_tokens = engine.max_captured_tokens
    return max_tokens is None or batch * (draft_tokens + 1) <= max_tokens


def _capture_limit_reasons(
    engine: EngineConfig, setting: SpeculationSetting, load: Sequence[tuple[float, float]]
) -> tuple[str, ...]:
    """Return why the setting needs steps beyond the captured graphs; empty if few steps of the load are beyond them."""
    tokens = max_speculative_tokens(setting)
    share = sum(batch_share for batch, batch_share in load if not fits_captured_graphs(engine, batch, tokens))
    if share <= MAX_UNCAPTURED_STEP_SHARE or tokens == 0:
        return ()
    largest_batch = max(batch for batch, _ in load)
    reason = (
        f"{100 * share:.0f} % of the steps would verify more than the {engine.max_captured_tokens} tokens of the largest "
        f"captured graph (up to {largest_batch:.0f} requests of {tokens + 1}) and run without one."
    )
    return (reason,)
