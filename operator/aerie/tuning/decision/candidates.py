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
from aerie.engine.arguments import Arguments
from aerie.engine.releases import Feature, Version, supports
from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, Tier, max_tokens, named

DEFAULT_CAPTURED = 512
"""Tokens of the largest graph that vLLM captures by default (vllm/config/vllm.py)."""
RARE = 0.01
"""Share of the request-steps that may run without a captured graph."""
MOST_TIERS = 4


@dataclass(frozen=True)
class Engine:
    """What is known of the engines before anything is measured."""

    version: Version
    arguments: Arguments = field(default_factory=Arguments)
    method: str = "eagle3"
    environment: Mapping[str, str] = field(default_factory=dict)
    experts: bool | None = None
    """Whether the target is a mixture of experts; None: not known."""

    @property
    def captured(self) -> int | None:
        """Tokens of the largest captured graph, where a step can exceed it; None: no step pays for that."""
        arguments = self.arguments
        if arguments.enforce_eager:
            return None
        if arguments.capture_sizes:
            return arguments.capture_sizes[-1]
        if arguments.max_capture_size:
            return arguments.max_capture_size
        return None if supports(self.version, Feature.SCHEDULE_TIER_GRAPHS) else DEFAULT_CAPTURED

    def refusals(self, setting: Setting) -> tuple[str, ...]:
        """Why the engine does not run the setting as it is meant; none: it does."""
        found = list(command_line.unsupported(setting, command_line.Drafter("", self.method), self.version, self.arguments))
        if isinstance(setting, Schedule | Adaptive):
            runner, why = command_line.model_runner(self.version, self.method, self.environment, experts=self.experts)
            if runner == 1 and isinstance(setting, Schedule):
                found.append(
                    f"model runner V1 ({why}) runs schedules with piecewise graphs only: published measurements lose 6.6 to "
                    "21.6 % in tiers without drafts (vLLM issue 49548)."
                )
            if runner == 1 and isinstance(setting, Adaptive):
                found.append(f"adaptive verification needs model runner V2, and this is V1 ({why}).")
        return tuple(found)


@dataclass(frozen=True)
class LeftOut:
    """A candidate that was not looked at."""

    setting: str
    why: str


@dataclass(frozen=True)
class Candidates:
    """What may be chosen from."""

    fixed: tuple[Setting, ...]
    """Off and static."""
    schedules: bool
    adaptive: tuple[Adaptive, ...]
    left_out: tuple[LeftOut, ...]


def candidates(engine: Engine, most: int, load: Sequence[tuple[float, float]]) -> Candidates:
    """Up to K = `most`, for a load of (batch, share of the request-steps)."""
    fixed: list[Setting] = []
    left_out: list[LeftOut] = []
    simple: list[Setting] = [Off(), *(Static(k) for k in range(1, most + 1))]
    for setting in simple:
        if reasons := (*engine.refusals(setting), *_beyond(engine, setting, load)):
            left_out.append(LeftOut(named(setting), " ".join(reasons)))
        else:
            fixed.append(setting)
    schedule = engine.refusals(Schedule((Tier(1, 1, most),), most)) if most > 0 else ("the most draft tokens are 0.",)
    if schedule:
        left_out.append(LeftOut("schedules", " ".join(schedule)))
    adaptive = [Adaptive(most)] if most > 0 else []
    for one in list(adaptive):
        if reasons := engine.refusals(one):
            left_out.append(LeftOut(named(one), " ".join(reasons)))
            adaptive.remove(one)
    return Candidates(tuple(fixed), not schedule, tuple(adaptive), tuple(left_out))


def fits_graphs(engine: Engine, batch: float, tokens: int) -> bool:
    """Whether a step of this batch and K is captured."""
    captured = engine.captured
    return captured is None or batch * (tokens + 1) <= captured


def _beyond(engine: Engine, setting: Setting, load: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    tokens = max_tokens(setting)
    share = sum(part for batch, part in load if not fits_graphs(engine, batch, tokens))
    if share <= RARE or tokens == 0:
        return ()
    largest = max(batch for batch, _ in load)
    sentence = (
        f"{100 * share:.0f} % of the steps would verify more than the {engine.captured} tokens of the largest captured graph "
        f"(up to {largest:.0f} requests of {tokens + 1}) and run without one."
    )
    return (sentence,)
