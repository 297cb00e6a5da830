"""Metrics pages that are not true: what a broken exporter, a proxy in between or an engine of another make would show.

    gone       there is no page: status 404
    frozen     the page stays as it was when the lie began, while the engine works on
    nan        the counters are no numbers
    negative   the counters are below zero, and fall
    renamed    the families have other names
    worse      of drafted tokens, half as many are accepted from then on, so that answers take more steps: as with a worse
               drafter, drafts, steps of requests and the time of these grow 1.4 times as fast, accepted tokens 0.7 times. Where
               1.5 tokens were accepted of a draft, that makes as many tokens in all as there are

The engine itself works on as before. Told by the option `lie` from the start, or at any time by POST /simulator/lie (`server`).
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from aerie_lab.errors import StateError

MetricsCorruption = Literal["gone", "frozen", "nan", "negative", "renamed", "worse"]
_DRAFTING_COUNTER_PATTERN = re.compile(
    r"^(vllm:(?:spec_decode_num_(?:accepted_tokens\w*|drafts|draft_tokens)_total|inter_token_latency_seconds_(?:count|bucket|sum))"
    r"(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)
_COUNTER_PATTERN = re.compile(r"^(vllm:\w+_(?:total|count|bucket)(?:\{.*\})?) (\S+)$", re.MULTILINE)


def parse_corruption(text: str) -> MetricsCorruption:
    """The lie of this name. Raises StateError."""
    for lie in get_args(MetricsCorruption):
        if text == lie:
            found: MetricsCorruption = lie
            return found
    raise StateError(f"there is no lie '{text}': one of {', '.join(get_args(MetricsCorruption))}.")


class MetricsCorruptor:
    """Says what the page is to show."""

    def __init__(self, corruption: MetricsCorruption | None = None) -> None:
        self._corruption = corruption
        self._baseline_page: str | None = None

    def set_corruption(self, corruption: MetricsCorruption | None) -> None:
        """Tell this lie from now on; None: the truth."""
        self._corruption, self._baseline_page = corruption, None

    def corrupt(self, true_page: str) -> str | None:
        """What is shown instead of the true page; None: nothing at all."""
        match self._corruption:
            case None:
                return true_page
            case "gone":
                return None
            case "frozen":
                self._baseline_page = self._baseline_page or true_page
                return self._baseline_page
            case "nan":
                return _COUNTER_PATTERN.sub(r"\1 NaN", true_page)
            case "negative":
                return _COUNTER_PATTERN.sub(lambda found: f"{found[1]} {-1 - float(found[2])}", true_page)
            case "renamed":
                return true_page.replace("vllm:", "engine:")
            case "worse":
                self._baseline_page = self._baseline_page or true_page
                before = {found[1]: float(found[2]) for found in _DRAFTING_COUNTER_PATTERN.finditer(self._baseline_page)}
                return _DRAFTING_COUNTER_PATTERN.sub(lambda found: f"{found[1]} {_worsened_value(before, found)}", true_page)


def _worsened_value(before: dict[str, float], now: re.Match[str]) -> float:
    """A counter's value, had it grown since as with a worse drafter."""
    first, name = before.get(now[1], 0.0), now[1].partition("{")[0]  # a model may be called "accepted"
    grown = (7 if "accepted" in name else 14) * (float(now[2]) - first)
    return first + (grown / 10 if name.endswith("_sum") else grown // 10)
