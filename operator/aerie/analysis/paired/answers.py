"""Tests whether the canary still answers as the target alone would: no drafter may change answers, however many it accepts.

`AnswerCounts` are the counts that an evaluator delivers. Each test sums differences D between two numbers from 0 to 1, whose mean
is 0 if neither drafter changes answers:

| test          | a difference of        | number compared, and with what                                                |
|---------------|------------------------|-------------------------------------------------------------------------------|
| lengths       | two sampled answers    | n / (n + 100) of n tokens, canary with control                                |
| truncations   | the same               | 1 if the answer ended at its largest length, else 0                           |
| repetitions   | the same               | share of the answer's most frequent token                                     |
| probabilities | the same               | exp(mean log probability of the answer's tokens by the target)                |
| unlikely      | a token of an answer   | 1 if the token is none of the target's k likeliest, else 0, with the          |
|               |                        | probability of that by the target. Only an excess of such tokens counts       |
| likely        | the same, of exact     | the same. Only a lack of such tokens counts                                   |
|               | requests               |                                                                               |

The first four compare the drafters. They see nothing that both do alike. The others need no other arm, and no engine without a
drafter: they compare the canary with the target's own probabilities. The target reports them before temperature, top_p and top_k
(vLLM's default mode of log probabilities). These only lower the probability of an unlikely token, while the temperature is at
most 1. So an excess is a fault with such requests. A lack is a fault with exact ones: at temperature 1, without top_p, top_k or
min_p. Penalties and the like may raise the probability: the evaluator leaves out requests that have them.

The tests are e-processes. For a mean of 0 (or below) given the past, and D >= -1, each

    exp(lambda * sum D - psi(lambda) * sum D^2)        psi(lambda) = -log(1 - lambda) - lambda,    0 <= lambda < 1

is a supermartingale (Fan, Grama, Liu, Electron. J. Probab. 2015; Howard, Ramdas, McAuliffe, Sekhon, Ann. Stat. 2021). Its mixture
over `LAMBDAS` reaches 1 / alpha with a chance of alpha at most.

Greedy answers have no distribution, and rounding changes them: a canary's more than a control's repeated ones (`equivalence`). So
the control answers a part of the greedy requests twice. Only differences that rounding cannot explain count, and only requests
whose two comparisons disagree: McNemar's test, as an e-value (`RareEvents`).

Guarantee: an equal canary is taken for one that changes answers with a chance of at most `ANSWERS_ALPHA`, at any number of pairs,
for any requests and clusters. This rests on the randomness of sampling alone, if the seed of each pair is independent of the
others, also of those with the same prompt. Both arms may share it.
Not guaranteed: that pairs are lost whatever the drafter. A canary whose long answers time out seems to answer shortly, so the
evaluator limits lengths and counts lost pairs. Rare faults, and faults of requests that are left out, are not detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from aerie.analysis.statistics.confidence_sequence import RareEvents
from aerie.analysis.statistics.field_values import field_values

ANSWERS_ALPHA = 0.002
"""Chance that an equal canary is ever taken for one that changes answers."""
TEST_ALPHA = ANSWERS_ALPHA / 7
"""Alpha of each test: the six of the table, and that of greedy answers."""
LENGTH_SCALE = 100
"""Tokens of an answer whose length counts as 0.5."""
LAMBDAS = tuple(2.0**-power for power in range(1, 9))
"""Components of the mixture, each with the same weight: for differences that show after tens to thousands of pairs."""


@dataclass(frozen=True, slots=True)
class DifferenceSums:
    """Sums over differences of two numbers from 0 to 1. The order of the fields is the saved format."""

    count: int = 0
    canary_sum: float = 0.0
    """Sum of the canary's numbers."""
    expected_sum: float = 0.0
    """Sum of the numbers that they are compared with: the control's, or the target's probabilities."""
    squares: float = 0.0
    """Sum of squared differences."""

    def add(self, canary: float, expected: float) -> Self:
        """Return the sums with one more difference; raise ValueError unless both numbers are from 0 to 1."""
        if not (0 <= canary <= 1 and 0 <= expected <= 1):
            raise ValueError(f"canary is {canary} and expected is {expected}; give numbers from 0 to 1.")
        return type(self)(
            self.count + 1, self.canary_sum + canary, self.expected_sum + expected, self.squares + (canary - expected) ** 2
        )

    def merge(self, other: Self) -> Self:
        """Return the sums over the differences of both."""
        return type(self)(
            self.count + other.count,
            self.canary_sum + other.canary_sum,
            self.expected_sum + other.expected_sum,
            self.squares + other.squares,
        )

    @property
    def is_plausible(self) -> bool:
        """Whether differences can have these sums."""
        return type(self.count) is int and max(self.canary_sum, self.expected_sum, self.squares) <= self.count

    def is_above(self, alpha: float) -> bool:
        """Return whether the canary's mean is significantly above what it is compared with."""
        return self._exceeds(self.canary_sum - self.expected_sum, alpha)

    def is_below(self, alpha: float) -> bool:
        """Return whether the canary's mean is significantly below what it is compared with."""
        return self._exceeds(self.expected_sum - self.canary_sum, alpha)

    def is_different(self, alpha: float) -> bool:
        """Return whether both means differ significantly; each side has half of alpha."""
        return self._exceeds(abs(self.canary_sum - self.expected_sum), alpha / 2)

    def _exceeds(self, difference_sum: float, alpha: float) -> bool:
        """Return whether the mixture's e-value reaches 1 / alpha."""
        logs = [value * difference_sum + (math.log1p(-value) + value) * self.squares for value in LAMBDAS]
        largest = max(logs)
        log_e_value = largest + math.log(math.fsum(math.exp(value - largest) for value in logs) / len(logs))
        return log_e_value >= -math.log(alpha)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """What is compared of a sampled answer."""

    token_count: int
    """Tokens of the answer, at least 1."""
    is_truncated: bool
    """True if it ended at its largest length: finish reason "length"."""
    most_frequent_token_count: int
    """Number of times that the answer has its most frequent token."""
    mean_logprob: float | None
    """Mean natural log probability of its tokens by the target; None where the engine does not report it."""


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Counts of the answers to pairs of requests: all that is kept of answers."""

    greedy_pairs: int = 0
    """Pairs at temperature 0 whose answers were compared."""
    greedy_different_pairs: int = 0
    """Those whose answers differ in any token, by rounding or not."""
    repeated_requests: int = 0
    """Requests at temperature 0 that the control answered twice, with log probabilities (`equivalence.compare_answers`)."""
    canary_only: int = 0
    """Those in which the canary's answer differs from the control's first beyond rounding, and the control's second does not."""
    control_only: int = 0
    """Those in which the control's second answer differs from its first beyond rounding, and the canary's does not."""
    lengths: DifferenceSums = field(default_factory=DifferenceSums)
    truncations: DifferenceSums = field(default_factory=DifferenceSums)
    repetitions: DifferenceSums = field(default_factory=DifferenceSums)
    probabilities: DifferenceSums = field(default_factory=DifferenceSums)
    unlikely: DifferenceSums = field(default_factory=DifferenceSums)
    """Tokens of the canary's sampled answers."""
    control_unlikely: DifferenceSums = field(default_factory=DifferenceSums)
    """The same of the control's, which decides nothing: it shows whether the engine does it with any drafter."""
    exact_unlikely: DifferenceSums = field(default_factory=DifferenceSums)
    """Those of `unlikely` in answers to exact requests."""
    control_exact_unlikely: DifferenceSums = field(default_factory=DifferenceSums)
    """Those of `control_unlikely` in answers to exact requests."""

    @property
    def sampled_pairs(self) -> int:
        """Pairs of sampled answers that were compared."""
        return self.lengths.count

    def add_greedy_pair(self, *, is_different: bool) -> Self:
        """Return the counts with one more pair at temperature 0."""
        return replace(
            self, greedy_pairs=self.greedy_pairs + 1, greedy_different_pairs=self.greedy_different_pairs + is_different
        )

    def add_repeated_request(self, *, canary_differs: bool, control_differs: bool) -> Self:
        """Return the counts with one more greedy request that the control answered twice; beyond rounding both times."""
        return replace(
            self,
            repeated_requests=self.repeated_requests + 1,
            canary_only=self.canary_only + (canary_differs and not control_differs),
            control_only=self.control_only + (control_differs and not canary_differs),
        )

    def add_sampled_pair(self, canary: SampledAnswer, control: SampledAnswer) -> Self:
        """Return the counts with one more pair of sampled answers."""
        numbers = zip(_numbers_of(canary), _numbers_of(control), strict=True)
        sums = (self.lengths, self.truncations, self.repetitions)
        lengths, truncations, repetitions = (part.add(*pair) for part, pair in zip(sums, numbers, strict=True))
        probabilities = self.probabilities
        if canary.mean_logprob is not None and control.mean_logprob is not None:
            probabilities = probabilities.add(math.exp(canary.mean_logprob), math.exp(control.mean_logprob))
        return replace(self, lengths=lengths, truncations=truncations, repetitions=repetitions, probabilities=probabilities)

    def add_tokens(
        self, canary: Iterable[tuple[bool, float]], control: Iterable[tuple[bool, float]], *, is_exact: bool = False
    ) -> Self:
        """Return the counts with the tokens of one more pair of sampled answers, at a temperature of at most 1.

        For each token: whether it is none of the target's k likeliest at its position, and 1 less the sum of their
        probabilities, before temperature, top_p and top_k. Any k of at least 1 will do, if it does not depend on the token.
        `is_exact`: whether the request samples at temperature 1, and from all tokens.
        """
        canary_sums, control_sums = _sum_tokens(canary), _sum_tokens(control)
        counts = replace(
            self, unlikely=self.unlikely.merge(canary_sums), control_unlikely=self.control_unlikely.merge(control_sums)
        )
        if not is_exact:
            return counts
        return replace(
            counts,
            exact_unlikely=self.exact_unlikely.merge(canary_sums),
            control_exact_unlikely=self.control_exact_unlikely.merge(control_sums),
        )

    def merge(self, other: Self) -> Self:
        """Return the counts over the pairs of both."""
        merged: dict[str, Any] = {}
        for each in fields(self):
            left, right = getattr(self, each.name), getattr(other, each.name)
            merged[each.name] = left.merge(right) if isinstance(left, DifferenceSums) else left + right
        return type(self)(**merged)

    @property
    def is_plausible(self) -> bool:
        """Whether answers can have these counts."""
        compared = (self.lengths, self.truncations, self.repetitions, self.probabilities)
        sums = (*compared, self.unlikely, self.control_unlikely, self.exact_unlikely, self.control_exact_unlikely)
        counts = (self.greedy_pairs, self.greedy_different_pairs, self.repeated_requests, self.canary_only, self.control_only)
        return (
            all(type(value) is DifferenceSums and value.is_plausible for value in sums)
            and all(type(count) is int for count in counts)
            and self.greedy_different_pairs <= self.greedy_pairs
            and self.canary_only + self.control_only <= self.repeated_requests
        )

    @property
    def difference_message(self) -> str:
        """Reason why the canary changes answers, as a sentence; empty while none is significant."""
        if RareEvents().add_block(self.canary_only, self.control_only, 0.5).is_canary_worse(TEST_ALPHA):
            return (
                f"Of {self.repeated_requests} greedy requests that the control answered twice, {self.canary_only} differ only on "
                f"the canary and {self.control_only} only between the control's answers, beyond rounding."
            )
        if self.unlikely.is_above(TEST_ALPHA):
            also = ", and so do the control's" if self.control_unlikely.is_above(TEST_ALPHA) else ""
            return (
                f"The canary's sampled answers have unlikely tokens more often than the target's probabilities allow{also}: "
                f"{_percentages(self.unlikely, 'expected')}, in {self.unlikely.count} tokens."
            )
        if self.exact_unlikely.is_below(TEST_ALPHA):
            also = ", and so do the control's" if self.control_exact_unlikely.is_below(TEST_ALPHA) else ""
            return (
                f"The canary's answers at temperature 1 have fewer unlikely tokens than the target's probabilities say{also}: "
                f"{_percentages(self.exact_unlikely, 'expected')}, in {self.exact_unlikely.count} tokens."
            )
        for sums, title in (
            (self.repetitions, "the share of their most frequent token"),
            (self.probabilities, "the target's mean probability of their tokens"),
            (self.truncations, "the share that is truncated"),
            (self.lengths, f"length, as n / (n + {LENGTH_SCALE}) of n tokens"),
        ):
            if sums.is_different(TEST_ALPHA):
                return (
                    f"Sampled answers differ between the drafters in {title}: {_percentages(sums, 'on the control')}, "
                    f"in {sums.count} pairs."
                )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for JSON; sums are lists, in the order of their fields. Counts of 0 are left out."""
        document = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: field_values(value) if isinstance(value, DifferenceSums) else value
            for name, value in document.items()
            if value not in (0, DifferenceSums())
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the counts of a dict that `to_dict` returned."""
        parsed: dict[str, Any] = {
            name: DifferenceSums(*value) if isinstance(value, list) else value for name, value in document.items()
        }
        return cls(**parsed)


def _sum_tokens(tokens: Iterable[tuple[bool, float]]) -> DifferenceSums:
    sums = DifferenceSums()
    for is_unlikely, probability in tokens:
        sums = sums.add(float(is_unlikely), min(1.0, max(0.0, probability)))
    return sums


def _numbers_of(answer: SampledAnswer) -> tuple[float, float, float]:
    """Return the numbers from 0 to 1 of length, truncation and repetition."""
    if not 0 < answer.most_frequent_token_count <= answer.token_count:
        raise ValueError(
            f"most_frequent_token_count is {answer.most_frequent_token_count} of token_count {answer.token_count}; "
            "skip answers without tokens."
        )
    return (
        answer.token_count / (answer.token_count + LENGTH_SCALE),
        float(answer.is_truncated),
        answer.most_frequent_token_count / answer.token_count,
    )


def _percentages(sums: DifferenceSums, reference: str) -> str:
    canary, expected = (100 * value / sums.count for value in (sums.canary_sum, sums.expected_sum))
    return f"{canary:.1f} % against {expected:.1f} % {reference}"
