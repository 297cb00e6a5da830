"""Verdicts in sentences: which bound, which value, how much longer, and what would decide it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerie.rollout.analysis.crashes import Crashes
from aerie.rollout.analysis.criteria import Criterion, Terms, Test
from aerie.rollout.analysis.demand import TOLERANCE, Demand
from aerie.rollout.analysis.lossless import Answers
from aerie.rollout.analysis.sequential import Events, Pairs, Tuning, blocks_until, half_width, ratio_bounds
from aerie.rollout.analysis.shares import Shares

LARGEST = 1e6
"""A bound beyond it is none: the control's mean is hardly above 0 yet."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a criterion has yet to show."""

    criterion: Criterion
    test: Test
    pairs: Pairs
    tuned: Tuning | None
    """Of a mean."""
    shares: Shares | None = None
    """Of a share, which is shown by counts;"""
    more: float | None = None
    """and how many times as many requests it takes; None: no number of them does."""

    @property
    def value(self) -> str:
        """The estimate."""
        if self.shares is None:
            return _level(self.criterion, self.pairs)
        shares = self.shares
        canary, control = (part / of if of > 0 else 0.0 for part, of in _arms(shares))
        return f"{_plain(canary)} against the control's {_plain(control)}"


def _arms(shares: Shares) -> tuple[tuple[float, float], tuple[float, float]]:
    return (shares.canary, shares.canary_of), (shares.control, shares.control_of)


def accepted(
    shown: Sequence[Criterion],
    pairs: Mapping[str, Pairs],
    terms: Terms,
    answers: Answers | None = None,
    in_place_of: Criterion | None = None,
) -> str:
    """Every criterion holds. `in_place_of`: one that does not, and for which being faster stands in."""
    first, *others = shown
    known = pairs[first.name]
    limit = "below the control's" if in_place_of else _wanted(first.accept[-1])
    said = f"{_capital(first.title)} is {_level(first, known)}, certainly {limit}, after {_blocks(known.count)}"
    if in_place_of is not None:
        drafts = in_place_of.title, _level(in_place_of, pairs[in_place_of.name])
        said += f"; that stands in for {drafts[0]}, which is {drafts[1]}: what users feel is time"
    also = (
        f"; {_joined([one.title for one in others])} {'is' if len(others) == 1 else 'are'} certainly good enough"
        if others
        else ""
    )
    return f"{said}{also}.{_unanswered(terms, answers)}{_of_drafts(terms)}"


def failed(criterion: Criterion, test: Test, pairs: Pairs, tuned: Tuning) -> str:
    """A criterion certainly fails."""
    beyond = "at least" if test.sign > 0 else "at most"
    limit = "" if test.ratio == 1.0 and test.offset == 0.0 else f", beyond {_limit(test)}"
    return (
        f"{_capital(criterion.title)} is {_level(criterion, pairs)}, certainly {beyond} {_bound(criterion, test, pairs, tuned)}"
        f"{limit}, after {_blocks(pairs.count)}."
    )


def more_errors(events: Events) -> str:
    """The canary fails more requests."""
    return (
        f"The canary failed {events.canary:.0f} requests and the control {events.control:.0f}; with equal arms about "
        f"{events.expected:.1f} of them would have been the canary's (e-value {events.e_value:.3g})."
    )


def crashes(known: Crashes) -> str:
    """The canary's processes end more often."""
    return (
        f"{_ended(known)} (weight of evidence {known.weight:.3g}). What they were answering is lost; the pods' last lines and "
        "`kubectl describe pod` say why they ended."
    )


def suspicious(known: Crashes) -> str:
    """Some of the canary's processes have ended."""
    return f"{_ended(known)}: more speaks for the canary's crashing more often than against it"


def _ended(known: Crashes) -> str:
    mine = f"{known.canary} of the canary's engine processes {'has' if known.canary == 1 else 'have'} ended"
    theirs = f"{known.control or 'none'} of the control's in {known.control_hours:.1f}"
    return f"{mine} in {known.canary_hours:.1f} pod-hours, and {theirs}"


def lossy(answers: Answers) -> str:
    """The canary changes answers."""
    return f"{answers.sentence} So the canary changes what the target says, which no drafter may."


def silent(blocks: int) -> str:
    """No drafted token is accepted."""
    return (
        f"Not one drafted token of the canary was accepted in {_blocks(blocks)} in a row, while the control's were: its drafter "
        "does not fit the target, or does not load as it should."
    )


def slow(blocks: int, times: float, what: str) -> str:
    """Tokens take far longer."""
    return (
        f"The canary's {what} was more than {times:g} times the control's in {_blocks(blocks)} in a row, and it had no more "
        "requests: no two equal pods differ so much."
    )


def stalled(blocks: int, load: float) -> str:
    """Requests are held and not finished."""
    return (
        f"The canary finished next to no request in {_blocks(blocks)} in a row, though a pod of it held {load:.1f} at a time, "
        "while the control finished its own: either it hangs, or requests are given up by their clients before the first token."
    )


def inconclusive(lacking: Sequence[str], deadline: float) -> str:
    """The deadline has passed."""
    return f"No decision within {duration(deadline)}: {'; '.join(lacking)}."


def none_yet(terms: Terms) -> str:
    """Nothing has been counted."""
    lasts = f"it takes {duration(terms.block)}, or longer while requests are few"
    return f"The first block has yet to close: {lasts}.{_of_drafts(terms)}"


def open_still(lacking: Sequence[str], blocks: int, terms: Terms) -> str:
    """More is needed."""
    return f"After {_blocks(blocks)}: {'; '.join(lacking)}.{_of_drafts(terms)}"


def measured(first: Criterion, pairs: Pairs | None, blocks: int, terms: Terms) -> str:
    """A canary that is to be measured and given up."""
    if pairs is None or not pairs.count:
        return f"It is to be measured and given up. {none_yet(terms)}"
    return f"It is to be measured and given up. After {_blocks(blocks)} {first.title} is {_level(first, pairs)}."


def nothing_against(blocks: int, seconds: float) -> str:
    """Watched, and nothing is wrong."""
    return f"Nothing speaks against the canary after {_blocks(blocks)} in {duration(seconds)}."


def not_shown(criterion: Criterion, test: Test, pairs: Pairs, tuned: Tuning, per_block: float, rolls_back: str) -> str:
    """A criterion does not hold yet. `rolls_back` says what else may come of it."""
    side, bound = "lower" if test.sign > 0 else "upper", _bound(criterion, test, pairs, tuned)
    at = f", its {side} bound {bound}" if bound else ""
    needed = f"{criterion.title} is {_level(criterion, pairs)}{at}; to be accepted it has to be certainly {_wanted(test)}"
    return f"{needed}, {_prospect(test, pairs, tuned, per_block)}{rolls_back}"


def not_shown_either(missing: Sequence[Missing], per_block: float) -> str:
    """Further criteria that do not hold yet, in short."""
    alike: dict[str, list[str]] = {}
    for one in missing:
        said = f"{one.criterion.title} ({one.value}) {'' if one.test.estimated else 'certainly '}{_wanted(one.test)}"
        if one.test.estimated:
            prospect = _NOT_BY_TIME
        elif one.tuned is not None:
            prospect = _prospect(one.test, one.pairs, one.tuned, per_block)
        else:
            prospect = _prospect_of_counts(one.more, one.pairs.count * per_block)
        alike.setdefault(prospect, []).append(said)
    return "still to be shown: " + "; ".join(f"{_joined(said)}, {prospect}" for prospect, said in alike.items())


def _prospect_of_counts(more: float | None, so_far: float) -> str:
    """How much longer it takes to count so many times as many requests."""
    if more is None:
        return _NOT_BY_TIME
    return f"which takes about {duration(max(1.0, (more - 1) * so_far))} more if nothing changes"


def or_rolled_back(criterion: Criterion, test: Test, pairs: Pairs, tuned: Tuning) -> str:
    """Where the bound stands that would roll back; empty while there is none."""
    side, bound = "lower" if test.sign > 0 else "upper", _bound(criterion, test, pairs, tuned)
    return f"; it is rolled back when its {side} bound, {bound} now, passes {_limit(test)}" if bound else ""


_NOT_BY_TIME = "which time alone will not show: the estimate itself is not"


def _prospect(test: Test, pairs: Pairs, tuned: Tuning, per_block: float) -> str:
    """How much longer, if nothing changes."""
    mean = test.sign * pairs.mean(test.ratio, test.offset)
    if mean <= 0:
        return _NOT_BY_TIME
    total = blocks_until(mean, pairs.variance(test.ratio), tuned)
    if total is None:
        return "which these pods cannot show: lasting differences between pods hide it, so compare more of them"
    return f"which takes about {duration(max(1, total - pairs.count) * per_block)} more if nothing changes"


def only_time(blocks: int) -> str:
    """A trial of a setting, of which nothing but time tells."""
    return f"No decision after {_blocks(blocks)}: a trial is judged by time."


def nothing_compared(terms: Terms) -> str:
    """Nothing is left by which a canary could be accepted."""
    why = terms.incomparable.rstrip(".")
    return f"neither drafts nor latency are compared, so only a person can accept it (of drafts: {why})"


def left_out(terms: Terms) -> str:
    """What no verdict is about, and how to have it judged; empty where nothing is left out."""
    if not terms.unlike:
        return ""
    way_out = "a node selector or an affinity in spec.engine.podTemplate places them alike"
    return f" Latency is not compared: {terms.unlike}; {way_out}."


def nothing_counted(criterion: Criterion) -> str:
    """No block told anything of a criterion."""
    why = ", because the load of the arms differed or is unknown" if criterion.by_load else ""
    return f"{criterion.title} was not counted in any block{why}"


def unlike(demand: Demand) -> str:
    """Blocks are not counted for latency now."""
    if demand.variance <= 0:
        return "no block counts for latency while it is not known how many requests came"
    change = f"{abs(demand.apart):.0%} {'more' if demand.apart > 0 else 'fewer'}".replace("%", " %")
    return (
        f"the canary gets {change} requests on a pod than the control, and blocks count for latency only while that is within "
        f"{TOLERANCE:.0%}: find out what sends them".replace("%:", " %:")
        + (", or whether its clients give up" if demand.apart < 0 else "")
    )


def left_out_blocks(blocks: int, counted: int) -> str:
    """Too many blocks count for no latency."""
    return (
        f"{blocks} of {_blocks(counted)} count for no latency, more than a fifth, because the arms had unlike loads: find out "
        "why before trusting the rest"
    )


def latest_left_out() -> str:
    """The latest blocks count for no latency."""
    return "the latest blocks count for no latency, because the arms had unlike loads"


def few_blocks(blocks: int, least: int) -> str:
    """Too few blocks for any verdict."""
    return f"{blocks} of at least {_blocks(least)} {'is' if least == 1 else 'are'} closed"


def dropped(blocks: int, counted: int, pods: Mapping[str, int]) -> str:
    """Too many blocks were dropped."""
    reasons = _joined([f"{count} {reason.lower()}" for reason, count in sorted(pods.items())])
    return (
        f"{blocks} of {_blocks(blocks + counted)} had to be dropped, more than a tenth, because pods could not be counted "
        f"throughout ({reasons}): find out why before trusting the rest"
    )


def soaking(seconds: float) -> str:
    """All holds, and the soak is not over."""
    return f"every criterion holds, and {duration(seconds)} of the soak are left"


def duration(seconds: float) -> str:
    """Seconds in words: 4 h, 1 h 20 min, 50 min, 40 s.

    >>> duration(4800)
    '1 h 20 min'
    """
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s"
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0)
    return " ".join(parts)


# ------------------------------------------------------------------------------------------------------------------- words
def _level(criterion: Criterion, pairs: Pairs) -> str:
    """The estimate: relative to the control, or both values where they are shares or the control's is 0."""
    if not criterion.relative or pairs.control <= 0:
        return f"{_plain(pairs.canary)} against the control's {_plain(pairs.control)}"
    change = pairs.canary / pairs.control - 1
    return f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the control's".replace("%", " %")


def _bound(criterion: Criterion, test: Test, pairs: Pairs, tuned: Tuning) -> str:
    """The bound that the test looks at, as the status shows it: of canary / control - 1, or where that has no meaning of the
    canary's value; empty while there is none."""
    if not criterion.relative or pairs.control <= 0:
        width = half_width(pairs.count, pairs.variance(test.ratio), tuned)
        return _plain(pairs.mean(test.ratio) - test.sign * width + test.ratio * pairs.control) if math.isfinite(width) else ""
    low, high = ratio_bounds(pairs, tuned, tuned)
    change = (low if test.sign > 0 else high) - 1
    if abs(change) >= LARGEST:
        return ""
    digits = 1 if abs(change) >= 0.0005 else 2  # a bound that is just below 0 must not read as 0
    return f"{change:+.{digits}%}".replace("%", " %")


def _limit(test: Test) -> str:
    """The boundary of a test."""
    if not test.ratio:
        return _plain(test.offset)
    if test.offset and test.ratio == 1.0:
        return f"the control's {100 * test.offset:+g} points"
    if test.offset:
        return f"{test.ratio:g} times the control's plus {100 * test.offset:g} points"
    return f"{test.ratio - 1:+.1%}".replace("%", " %") if test.ratio != 1.0 else "the control's"


def _wanted(test: Test) -> str:
    return f"{'above' if test.sign > 0 else 'below'} {_limit(test)}"


def _plain(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unanswered(terms: Terms, answers: Answers | None) -> str:
    """That nothing is known of greedy answers; empty where something is."""
    if answers is None:
        return f" {Answers(why=terms.unasked or 'they did not come in time').sentence}"
    return "" if answers.prompts else f" {answers.sentence}"


def _of_drafts(terms: Terms) -> str:
    """Why it is not tokens per step that decide; empty where they do."""
    return f" Drafts are not compared: {terms.incomparable}" if terms.incomparable else ""
