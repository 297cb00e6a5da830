"""Which settings an engine may be given, and why the others are left out.

Guarantees: a candidate is one that the engine's version, model runner, parallelism and method run as written (`flags`), and that
no batch of the load pushes beyond the captured graphs. Not guaranteed: that it fits the GPU's memory, which preflight checks.

The capture cliff: a step of B requests verifies B (K + 1) tokens, and above the largest captured CUDA graph it runs without one,
two to three times as long. From the release on that captures the batches of its own tiers (`Feature.SCHEDULE_TIER_GRAPHS`), it
only exists where the user sets the sizes.
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
    """What is known of the engines before anything is measured."""

    version: Version
    arguments: EngineArguments = field(default_factory=EngineArguments)
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_moe: bool | None = None
    """Whether the target is a mixture of experts; None: not known."""

    @property
    def max_captured_tokens(self) -> int | None:
        """Tokens of the largest captured graph, where a step can exceed it; None: no step pays for that."""
        arguments = self.arguments
        if arguments.enforce_eager:
            return None
        if arguments.cudagraph_capture_sizes:
            return arguments.cudagraph_capture_sizes[-1]
        if arguments.max_cudagraph_capture_size:
            return arguments.max_cudagraph_capture_size
        return None if supports(self.version, Feature.SCHEDULE_TIER_GRAPHS) else DEFAULT_MAX_CAPTURED_TOKENS

    def unsupported_reasons(self, setting: SpeculationSetting) -> tuple[str, ...]:
        """Why the engine does not run the setting as it is meant; none: it does."""
        found = list(
            command_line.find_unsupported_reasons(
                setting, command_line.DrafterArguments("", self.method), self.version, self.arguments
            )
        )
        if isinstance(setting, Schedule | Adaptive):
            runner, why = command_line.resolve_model_runner(self.version, self.method, self.environment, is_moe=self.is_moe)
            if runner == 1 and isinstance(setting, Schedule):
                found.append(
                    f"model runner V1 ({why}) runs schedules with piecewise graphs only: published measurements lose 6.6 to "
                    "21.6 % in tiers without drafts (vLLM issue 49548)."
                )
            if runner == 1 and isinstance(setting, Adaptive):
                found.append(f"adaptive verification needs model runner V2, and this is V1 ({why}).")
        return tuple(found)


@dataclass(frozen=True)
class ExcludedCandidate:
    """A candidate that was not looked at."""

    label: str
    reason: str


@dataclass(frozen=True)
class Candidates:
    """What may be chosen from."""

    fixed_settings: tuple[SpeculationSetting, ...]
    """Off and static."""
    supports_schedules: bool
    adaptive_settings: tuple[Adaptive, ...]
    excluded: tuple[ExcludedCandidate, ...]


def build_candidates(engine: EngineConfig, max_k: int, load: Sequence[tuple[float, float]]) -> Candidates:
    """Up to K = `most`, for a load of (batch, share of the request-steps)."""
    fixed: list[SpeculationSetting] = []
    left_out: list[ExcludedCandidate] = []
    simple: list[SpeculationSetting] = [Off(), *(Static(k) for k in range(1, max_k + 1))]
    for setting in simple:
        if reasons := (*engine.unsupported_reasons(setting), *_capture_limit_reasons(engine, setting, load)):
            left_out.append(ExcludedCandidate(describe_setting(setting), " ".join(reasons)))
        else:
            fixed.append(setting)
    schedule = (
        engine.unsupported_reasons(Schedule((ScheduleTier(1, 1, max_k),), max_k))
        if max_k > 0
        else ("the most draft tokens are 0.",)
    )
    if schedule:
        left_out.append(ExcludedCandidate("schedules", " ".join(schedule)))
    adaptive = [Adaptive(max_k)] if max_k > 0 else []
    for one in list(adaptive):
        if reasons := engine.unsupported_reasons(one):
            left_out.append(ExcludedCandidate(describe_setting(one), " ".join(reasons)))
            adaptive.remove(one)
    return Candidates(tuple(fixed), not schedule, tuple(adaptive), tuple(left_out))


def fits_captured_graphs(engine: EngineConfig, batch: float, draft_tokens: int) -> bool:
    """Whether a step of this batch and K is captured."""
    captured = engine.max_captured_tokens
    return captured is None or batch * (draft_tokens + 1) <= captured


def _capture_limit_reasons(
    engine: EngineConfig, setting: SpeculationSetting, load: Sequence[tuple[float, float]]
) -> tuple[str, ...]:
    tokens = max_speculative_tokens(setting)
    share = sum(part for batch, part in load if not fits_captured_graphs(engine, batch, tokens))
    if share <= MAX_UNCAPTURED_STEP_SHARE or tokens == 0:
        return ()
    largest = max(batch for batch, _ in load)
    sentence = (
        f"{100 * share:.0f} % of the steps would verify more than the {engine.max_captured_tokens} tokens of the largest captured graph "
        f"(up to {largest:.0f} requests of {tokens + 1}) and run without one."
    )
    return (sentence,)
