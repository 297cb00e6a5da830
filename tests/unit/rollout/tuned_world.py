"""A world whose tuning may start canaries: recommendations, trials and their ends.

Guarantees: a trial starts and ends by reconciles alone, and its blocks have the time per output token that a test sets.
Not guaranteed: recommendations that a tuner would make. A test sets each of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from aerie.engine.speculation import SpeculationSetting, Static
from aerie.tuning.recommendation import Recommendation, RecommendedAction
from tests.unit.rollout.world import World, serving_world

MINUTE = timedelta(minutes=1)
K5 = {"mode": "Static", "numSpeculativeTokens": 5}
K3 = {"mode": "Static", "numSpeculativeTokens": 3}


def tuned_world(**spec: Any) -> World:
    """Return a serving world whose tuning may start canaries."""
    speculation = spec.pop("speculation", {})
    tuning = {"mode": "Auto", **speculation.get("tuning", {})}
    return serving_world(**spec, speculation={**speculation, "tuning": tuning})


def edit_speculation(world: World, **speculation: Any) -> None:
    """Write another spec.speculation, in mode Auto."""
    tuning = {"mode": "Auto", **speculation.pop("tuning", {})}
    world.edit(speculation={**speculation, "tuning": tuning})


def recommend(
    world: World,
    setting: SpeculationSetting | None = None,
    action: RecommendedAction = "Change",
    reason: str = "K=5 is +8.0 % better.",
) -> None:
    """Set the tuner's current recommendation for the stable pods."""
    recommended_setting = Static(5) if setting is None else setting
    stable = world.status["stable"]
    revision = stable.get("inPlace", stable)["revision"]
    world.recommendation = Recommendation(
        revision, world.now.timestamp(), action, recommended_setting, (0.02, 0.08, 0.15), reason
    )


def speculation(world: World) -> dict[str, Any]:
    status: dict[str, Any] = world.status["speculation"]
    return status


def reconcile(world: World) -> None:
    """Reconcile once, and let the cluster follow."""
    world.step()
    world.check()
    world.schedule()
    world.ready()


def run_until(world: World, phase: str, slower: float = 0.0, times: int = 200) -> None:
    """Reconcile until the phase; blocks close with the canary's time per output token changed by `slower`."""
    for _ in range(times):
        reconcile(world)
        if world.status["phase"] == phase:
            return
        if world.status["phase"] == "Analyzing":
            world.measure_time(1, slower, step=False)
        else:
            world.now += 5 * MINUTE
    raise AssertionError(f"{world.status['phase']} instead of {phase}: {world.message('Progressing')}")


def run_trial(world: World, slower: float, setting: SpeculationSetting | None = None) -> None:
    """Run a trial from its recommendation until it has ended."""
    recommend(world, setting)
    world.step()
    run_until(world, "Analyzing")
    for _ in range(200):
        run_until(world, "Ready", slower)
        if "trial" not in speculation(world):
            return
    raise AssertionError("the trial does not end")
