"""The speculation setting: how many tokens an engine drafts, and by which rule.

Guarantees: a setting that exists is one that vLLM would run as written. A setting that vLLM would silently change (a tier above
the maximum, a gap between tiers) is rejected here. Not guaranteed: that a given release can run it; `command_line` checks that.
"""

from __future__ import annotations

from dataclasses import dataclass


class SpeculationSettingError(ValueError):
    """A setting that contradicts itself; the message is a full sentence."""


@dataclass(frozen=True, slots=True)
class Off:
    """No speculation; the engine has no drafter."""

    def __str__(self) -> str:
        return "off"


@dataclass(frozen=True, slots=True)
class Static:
    """A fixed number of draft tokens, `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SpeculationSettingError(f"a static setting drafts at least 1 token, not {self.tokens}: use Off for none.")

    def __str__(self) -> str:
        return str(self.tokens)


@dataclass(frozen=True, slots=True)
class ScheduleTier:
    """`tokens` draft tokens while `first` to `last` requests are scheduled in a step, both included."""

    first: int
    last: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Draft tokens by the number of requests scheduled in a step; the last tier also applies beyond its end.

    Tiers rise from batch size 1 without gaps. `max_tokens` is the number that the engine is built for: no tier exceeds it.
    """

    tiers: tuple[ScheduleTier, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.tiers:
            raise SpeculationSettingError("a schedule has at least one tier.")
        next_first = 1
        for tier in self.tiers:
            if tier.first != next_first:
                raise SpeculationSettingError(
                    f"the tiers of a schedule follow each other from batch size 1: {self} has none at {next_first}."
                )
            if tier.last < tier.first:
                raise SpeculationSettingError(f"a tier ends where it begins or later, not {tier.first}-{tier.last}.")
            if not 0 <= tier.tokens <= self.max_tokens:
                raise SpeculationSettingError(
                    f"a tier drafts 0 to {self.max_tokens} tokens, the schedule's maximum, not {tier.tokens}."
                )
            next_first = tier.last + 1
        if not self.nonzero_token_counts:
            raise SpeculationSettingError(f"a schedule drafts in at least one tier, {self} in none: use Off.")

    @property
    def nonzero_token_counts(self) -> tuple[int, ...]:
        """The distinct numbers of draft tokens above 0, in ascending order."""
        return tuple(sorted({tier.tokens for tier in self.tiers} - {0}))

    def tokens_at(self, batch_size: int) -> int:
        """Return the draft tokens of a step with this many requests."""
        if batch_size < 1:
            raise ValueError(f"a step has at least 1 request, not {batch_size}.")
        return next((tier.tokens for tier in self.tiers if batch_size <= tier.last), self.tiers[-1].tokens)

    def __str__(self) -> str:
        return ",".join(f"{tier.first}-{tier.last}:{tier.tokens}" for tier in self.tiers)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """A fixed number of drafted tokens, `max_tokens`; the engine verifies those that are worth their cost (vLLM's adaptive
    verification)."""

    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise SpeculationSettingError(
                f"an adaptive setting drafts at least 1 token, not {self.max_tokens}: use Off for none."
            )

    def __str__(self) -> str:
        return f"up to {self.max_tokens}"


SpeculationSetting = Off | Static | Schedule | Adaptive


def max_speculative_tokens(setting: SpeculationSetting) -> int:
    """Return the draft tokens that an engine with this setting is built for; 0 when it has no drafter."""
    match setting:
        case Off():
            return 0
        case Static(tokens):
            return tokens
        case Schedule(max_tokens=tokens) | Adaptive(max_tokens=tokens):
            return tokens


def possible_token_counts(setting: SpeculationSetting) -> frozenset[int]:
    """Return the numbers of draft tokens that a setting's steps may have; for adaptive verification only the maximum."""
    if isinstance(setting, Schedule):
        return frozenset(tier.tokens for tier in setting.tiers)
    return frozenset({max_speculative_tokens(setting)})


def describe_setting(setting: SpeculationSetting) -> str:
    """Return a setting as messages name it."""
    match setting:
        case Off():
            return "no speculation"
        case Static(tokens):
            return f"K={tokens}"
        case Schedule():
            return f"schedule {setting}"
        case Adaptive(tokens):
            return f"adaptive verification up to {tokens}"
