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

Lie = Literal["gone", "frozen", "nan", "negative", "renamed", "worse"]
_WORSE = re.compile(
    r"^(vllm:(?:spec_decode_num_(?:accepted_tokens\w*|drafts|draft_tokens)_total|inter_token_latency_seconds_(?:count|bucket|sum))"
    r"(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)
_COUNTER = re.compile(r"^(vllm:\w+_(?:total|count|bucket)(?:\{.*\})?) (\S+)$", re.MULTILINE)


def known(text: str) -> Lie:
    """The lie of this name. Raises StateError."""
    for lie in get_args(Lie):
        if text == lie:
            found: Lie = lie
            return found
    raise StateError(f"there is no lie '{text}': one of {', '.join(get_args(Lie))}.")


class Teller:
    """Says what the page is to show."""

    def __init__(self, lie: Lie | None = None) -> None:
        self._lie = lie
        self._kept: str | None = None

    def tell(self, lie: Lie | None) -> None:
        """Tell this lie from now on; None: the truth."""
        self._lie, self._kept = lie, None

    def page(self, true: str) -> str | None:
        """What is shown instead of the true page; None: nothing at all."""
        match self._lie:
            case None:
                return true
            case "gone":
                return None
            case "frozen":
                self._kept = self._kept or true
                return self._kept
            case "nan":
                return _COUNTER.sub(r"\1 NaN", true)
            case "negative":
                return _COUNTER.sub(lambda found: f"{found[1]} {-1 - float(found[2])}", true)
            case "renamed":
                return true.replace("vllm:", "engine:")
            case "worse":
                self._kept = self._kept or true
                before = {found[1]: float(found[2]) for found in _WORSE.finditer(self._kept)}
                return _WORSE.sub(lambda found: f"{found[1]} {_worse(before, found)}", true)


def _worse(before: dict[str, float], now: re.Match[str]) -> float:
    """A counter's value, had it grown since as with a worse drafter."""
    first, name = before.get(now[1], 0.0), now[1].partition("{")[0]  # a model may be called "accepted"
    grown = (7 if "accepted" in name else 14) * (float(now[2]) - first)
    return first + (grown / 10 if name.endswith("_sum") else grown // 10)
