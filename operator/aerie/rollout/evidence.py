"""What an analysis knows, kept in the status between two passes, and what it makes of the next blocks.

    Analyzing                                     blocks ─► state ─► judge ─► Promote, Rollback, Inconclusive
    AwaitingApproval, Held, Ramping, Promoting    blocks ─► watched ─► watch ─► Rollback

Guarantees: a block is counted once, however often it is shown: each begins where the one before it ended, and one that began
before that is passed over. The terms are fixed when the analysis begins, but for the hardware of the arms, which is that of the
pods as they are. Not guaranteed: the block that was open when an operator
ended; it is lost, and not counted as dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from aerie.api.rollout import Analysis
from aerie.api.speculation import LatencyObjective
from aerie.api.status import Arm
from aerie.engine.metrics import TIME_TO_FIRST_TOKEN_BUCKETS, Metric
from aerie.rollout.analysis import packing
from aerie.rollout.analysis.blocks import Block, Rule
from aerie.rollout.analysis.calibration import BATCH
from aerie.rollout.analysis.counting import State, count, crashed
from aerie.rollout.analysis.criteria import BEYOND, Goal, Terms, criteria
from aerie.rollout.analysis.judgement import Judgement, judge, watch
from aerie.rollout.analysis.lossless import Answers
from aerie.rollout.analysis.memory import Memory
from aerie.rollout.analysis.readings import Kept, nearest_edge

FULL_BLOCK, DRAFTS, FINISHED = 120.0, 2000.0, 20.0
"""Seconds of a full block, and drafts and finished requests that each arm needs in it. Shorter blocks need fewer in proportion,
because how blocks scatter is measured and not taken from the counts; but never fewer than these:"""
LEAST_DRAFTS, LEAST_FINISHED = 50.0, 3.0
TRIALS_LAST = 2
"""A trial's deadline by the analysis': times scatter far more than acceptance lengths, and what is given up begins anew."""
WATCHED = 1.0
"""Hours over which the tests that watch an accepted canary spend their errors."""


@dataclass(frozen=True)
class Evidence:
    """See the module."""

    terms: Terms
    state: State
    until: float
    """When the last block ended that was counted, or when counting began."""
    watched: State | None = None
    """What has been counted since the verdict."""

    def counted(self, blocks: Iterable[Block]) -> Evidence:
        """With those blocks that are new."""
        found = self
        for block in sorted(blocks, key=lambda one: one.began):
            if block.began < found.until:
                continue
            if found.watched is None:
                found = replace(found, state=count(found.state, block, found.terms), until=block.ended)
            else:
                found = replace(found, watched=count(found.watched, block, found.terms), until=block.ended)
        return found

    def passed_over(self, blocks: Iterable[Block]) -> Evidence:
        """As if these blocks had not been: requests did not go where they should."""
        return replace(self, until=max([self.until, *(block.ended for block in blocks)]))

    def meant(self, goal: Goal | None) -> Evidence:
        """With a trial's goal as it is now: one that was to be measured may have come to be proven. All that was counted counts,
        because the tests hold at every moment."""
        return self if goal is None or goal == self.terms.goal else replace(self, terms=replace(self.terms, goal=goal))

    def placed(self, unlike: str | None, now: datetime) -> Evidence:
        """With the hardware of the arms as it is now: on what unlike hardware they run, or empty; None, where that is not known,
        changes nothing. Once it is alike, the block under way is passed over: it began before."""
        if unlike is None or unlike == self.terms.unlike:
            return self
        until = self.until if unlike else max(self.until, now.timestamp())
        return replace(self, terms=replace(self.terms, unlike=unlike), until=until)

    def answered(self, answers: Answers | None) -> Evidence:
        """With the engines' greedy answers, if they are there; those that came first stay."""
        if answers is None or self.state.answers is not None or self.terms.unasked:
            return self
        return replace(self, state=replace(self.state, answers=answers))

    def crashed(self, canary: Mapping[str, int], control: Mapping[str, int]) -> Evidence:
        """With the restarts of pods, by name, whose process has ended since counting began."""
        if self.watched is None:
            return replace(self, state=crashed(self.state, canary, control))
        return replace(self, watched=crashed(self.watched, canary, control))

    def judged(self, now: datetime, stops: Sequence[str]) -> tuple[Evidence, Judgement]:
        """The verdict now."""
        state, judgement = judge(self.state, self.terms, now.timestamp(), stops)
        return replace(self, state=state), judgement

    def watching(self, now: datetime, stops: Sequence[str]) -> tuple[Evidence, Judgement]:
        """Whether something speaks against a canary about which the analysis has ended."""
        watched, judgement = watch(self.watched or State(now.timestamp()), self._watch_terms, now.timestamp(), stops)
        return replace(self, watched=watched), judgement

    def renewed(self, now: datetime) -> Evidence:
        """Counting begins anew, because what is compared with what has changed; that processes have ended stays known."""
        gathered = self.watched or self.state
        return replace(self, watched=State(now.timestamp(), crashes=gathered.crashes), until=now.timestamp())

    @property
    def history_blocks(self) -> int | None:
        """Blocks of stable pods that told how metrics scatter; None where none did."""
        batches = max((scatter.batches for scatter in self.terms.scatters.values()), default=0)
        return BATCH * batches or None

    @property
    def inflation(self) -> float:
        """That of the first criterion."""
        return self.terms.scatter(criteria(self.terms)[0].name).inflation

    @property
    def _watch_terms(self) -> Terms:
        return replace(self.terms, deadline=max(3600 * WATCHED, self.terms.min_blocks * self.terms.block))

    def pack(self) -> str:
        """As text for the status."""
        found = {
            "terms": self.terms.to_dict(),
            "state": self.state.to_dict(),
            "until": self.until,
            "watched": None if self.watched is None else self.watched.to_dict(),
        }
        return packing.pack(found)

    @classmethod
    def unpack(cls, text: str) -> Evidence | None:
        """What `pack` made; None for what is none of this release's."""
        try:
            found = packing.unpack(text)
            watched = found["watched"]
            return cls(
                Terms.from_dict(found["terms"]),
                State.from_dict(found["state"]),
                found["until"],
                None if watched is None else State.from_dict(watched),
            )
        except (ValueError, KeyError, TypeError):
            return None


def begun(
    analysis: Analysis,
    arms: tuple[Arm, Arm],
    pods: tuple[int, int],
    objective: LatencyObjective | None,
    attempt: int,
    memory: Memory | None,
    now: datetime,
    unasked: str = "",
    goal: Goal | None = None,
) -> Evidence:
    """An analysis that begins now; `memory` is of the stable pods before it, `unasked` why greedy answers are not asked for, and
    `goal` a trial's."""
    terms = replace(terms_of(analysis, arms, pods, objective, attempt, goal), unasked=unasked)
    terms = memory.informed(terms) if memory is not None else terms
    return Evidence(terms, State(now.timestamp()), now.timestamp())


def terms_of(
    analysis: Analysis,
    arms: tuple[Arm, Arm],
    pods: tuple[int, int],
    objective: LatencyObjective | None,
    attempt: int = 0,
    goal: Goal | None = None,
) -> Terms:
    """By what the arms canary and control, with so many pods, would be judged.

    `objective`: of latencies, if there is any. `attempt`: how many analyses of this revision have ended without a promotion.
    `goal`: that of a trial, instead of the analysis' own.
    """
    canary, control = arms
    tokens = [arm.setting.tokens if arm.setting else 0 for arm in arms]
    modes = {arm.setting.mode if arm.setting else "Off" for arm in arms}
    deadline = analysis.deadline if goal is None else TRIALS_LAST * analysis.deadline
    return Terms(
        goal=goal or analysis.goal,
        margin=analysis.margin,
        failure_margin=analysis.failure_margin,
        min_blocks=analysis.min_blocks,
        soak=analysis.soak.total_seconds(),
        deadline=(deadline - analysis.warmup).total_seconds(),
        block=analysis.block.total_seconds(),
        pods=pods,
        kept=Kept(max(1, min(tokens)), *edges_of(objective)),
        incomparable=_TRIAL if goal else incomparable(canary, control),
        beyond=1 - objective.percentile / 100 if objective else BEYOND,
        steady=canary.setting is not None and canary.setting.mode == "Static",
        adaptive=goal is None and canary.target == control.target and modes == {"Adaptive"} and tokens[0] == tokens[1],
        attempt=attempt,
    )


def edges_of(objective: LatencyObjective | None) -> tuple[float | None, float | None]:
    """The bucket edges at which the objectives of time per output token and time to first token are counted."""
    per_token = objective.time_per_output_token if objective else None
    first = objective.time_to_first_token if objective else None
    return (
        nearest_edge(per_token.total_seconds(), Metric.TIME_PER_OUTPUT_TOKEN.value.buckets) if per_token else None,
        nearest_edge(first.total_seconds(), TIME_TO_FIRST_TOKEN_BUCKETS) if first else None,
    )


_TRIAL = "it is a trial of another setting, and what counts is time."


_TRIMMED = (
    "both arms verify adaptively, and drafts that the engine trims under load count as rejected. Time per output token decides"
)
_IN_FLIGHT = "; output per verification step is compared only while as many requests are in flight on both."


def incomparable(canary: Arm, control: Arm) -> str:
    """Why what requests get of drafts does not decide between the arms, as a sentence; empty where it does."""
    if canary.target != control.target:
        return f"the canary serves another target ({canary.target} instead of {control.target})."
    if canary.setting and control.setting and canary.setting.mode == control.setting.mode == "Adaptive":
        return _TRIMMED + (_IN_FLIGHT if canary.setting.tokens == control.setting.tokens else ".")
    for arm, named in ((canary, "the canary"), (control, "the stable revision")):
        if arm.setting is None or arm.setting.mode == "Off":
            return f"{named} serves without a drafter."
        if arm.setting.mode != "Static":
            return f"{named} drafts by the rule {arm.setting.mode}, and acceptance then follows the load."
    mine, theirs = (arm.setting.tokens if arm.setting else 0 for arm in (canary, control))
    if mine != theirs:
        return (
            f"the canary drafts {mine} tokens at a time and the stable revision {theirs}; a text fixes its tokens and not its "
            "drafts, so drafts of more tokens begin at harder places. Time per output token decides."
        )
    return ""


def rule_of(terms: Terms, interval: float) -> Rule:
    """When a block of this analysis ends, read every `interval` seconds."""
    part = terms.block / FULL_BLOCK
    drafts = 0.0 if terms.incomparable else max(LEAST_DRAFTS, DRAFTS * min(1.0, part))
    return Rule(terms.block, interval, drafts, max(LEAST_FINISHED, FINISHED * min(1.0, part)))
