"""The diagnosis of an engine as text for people, and as a document for programs.

Guarantees: pure; text of the engine is shown without markup or control characters. Nothing is wider than the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aerie.cli.diagnosis.acceptance import Acceptance, TokensPerStep
from aerie.cli.diagnosis.findings import Finding, Severity, describe_support
from aerie.cli.diagnosis.observation import EngineObservation
from aerie.engine.metrics.rates import Bounds, Unknown, mean_batch, mean_step_interval, tokens_per_step
from aerie.engine.speculation import Adaptive, Off, describe_setting

_BAR_CELLS = 20
_MARKS = {Severity.ACTION: ("✗", "red"), Severity.NOTE: ("!", "yellow")}


def render_diagnosis(
    observation: EngineObservation, acceptance: Acceptance | Unknown, findings: Sequence[Finding]
) -> RenderableType:
    """Return the screen of an engine."""
    parts: list[RenderableType] = [_render_head(observation), _render_facts(observation, acceptance)]
    if isinstance(acceptance, Acceptance):
        parts += [Text(), _render_positions(acceptance), Text(), _render_lengths(acceptance)]
    parts += [Text(), *_render_findings(findings)]
    return Group(*parts)


def _render_head(observation: EngineObservation) -> Text:
    version = f"vLLM {_clean(observation.version)}, {describe_support(observation.version)}" if observation.version else "vLLM?"
    return Text.assemble((_clean(observation.address), "bold"), "  ", version)


def _render_facts(observation: EngineObservation, acceptance: Acceptance | Unknown) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for title, text in _list_facts(observation, acceptance):
        table.add_row(title, Text(_clean(text)))
    return table


def _list_facts(observation: EngineObservation, acceptance: Acceptance | Unknown) -> Iterator[tuple[str, str]]:
    counters = observation.counters
    if observation.models:
        yield "model", ", ".join(observation.models)
    yield "speculation", _describe_speculation(observation)
    what = f"{observation.request_count:.0f} requests, {counters.generation_tokens:.0f} tokens"
    since = "since the engine's start" if observation.is_since_start else f"in {observation.seconds:.0f} s"
    note = " (none came while it was read)" if observation.is_since_start and observation.seconds else ""
    yield "measured", f"{what} {since}{note}"
    if isinstance(acceptance, Acceptance):
        low, high = acceptance.interval.low, acceptance.interval.high
        yield "acceptance length", f"{_format_bounds(acceptance.length)}, 95 % interval {low:.2f} to {high:.2f}"
    step, tokens, batch = mean_step_interval(counters), tokens_per_step(counters), mean_batch(counters)
    if not isinstance(step, Unknown) and not isinstance(tokens, Unknown):
        per_token = f"{1000 * step / tokens:.1f} ms a token" if tokens else ""
        mean = "" if isinstance(batch, Unknown) else f", batch {batch.low:.1f}"
        yield "step", f"{1000 * step:.1f} ms for {tokens:.2f} tokens: {per_token}{mean}"
    first = counters.time_to_first_token
    if first.count:
        yield "first token", f"{1000 * first.sum / first.count:.0f} ms on average"
    yield "queue", _describe_queue(observation)
    if counters.prefix_cache_queries:
        yield "prefix cache", f"{100 * counters.prefix_cache_hits / counters.prefix_cache_queries:.0f} % of the prompt tokens hit"


def _describe_speculation(observation: EngineObservation) -> str:
    setting, config = observation.setting, observation.speculative_config
    if isinstance(setting, Off):
        speculation = observation.samples[-1].counters.speculation
        return "off: the engine counts no drafts" if speculation is None else "on; no draft token was accepted since the start"
    method = f", method {config['method']}" if config and config.get("method") else ""
    unknown = "" if config is not None else " (method and schedule are not in the metrics: diagnose the pod to see them)"
    trimmed = "; acceptance is a lower bound" if isinstance(setting, Adaptive) else ""
    return f"{describe_setting(setting)}{method}{trimmed}{unknown}"


def _describe_queue(observation: EngineObservation) -> str:
    gauges = [sample.gauges for sample in observation.samples]
    running = [gauge.running_requests for gauge in gauges if gauge.running_requests is not None]
    waiting = [gauge.waiting_requests for gauge in gauges if gauge.waiting_requests is not None]
    usage = [gauge.kv_cache_usage for gauge in gauges if gauge.kv_cache_usage is not None]
    parts = [f"{title} {_format_range(values)}" for title, values in (("running", running), ("waiting", waiting)) if values]
    if usage:
        parts.append(f"KV cache {100 * max(usage):.0f} % in use")
    return ", ".join([*parts, f"{observation.counters.preemptions:.0f} preemptions"])


def _render_positions(acceptance: Acceptance) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("POSITION", "ACCEPTED", "OF THOSE THAT GOT THERE", ""):
        table.add_column(title, no_wrap=True, justify="left" if title in ("", "OF THOSE THAT GOT THERE") else "right")
    for item in acceptance.positions:
        interval = f"{100 * item.interval.low:.0f} to {100 * item.interval.high:.0f} %"
        is_reached = item.conditional != Bounds(0.0, 1.0)
        conditional = f"{_format_share(item.conditional)}  ({interval})" if is_reached else "no draft got there"
        table.add_row(str(item.position), f"{100 * item.survival:.1f} %", conditional, draw_bar(item.survival))
    return table


def draw_bar(share: float) -> str:
    """Return a share as a bar of at most 20 characters.

    >>> draw_bar(0.26)
    '█████▎'
    """
    eighths = round(8 * _BAR_CELLS * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _render_lengths(acceptance: Acceptance) -> RenderableType:
    rows = acceptance.lengths_by_tokens()
    present = len(acceptance.positions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("K", "TOKENS PER STEP", "PAYS IF A STEP BECOMES LONGER BY LESS THAN"):
        table.add_column(title, no_wrap=True, justify="right" if title == "K" else "left")
    previous = TokensPerStep(0, 1.0, 1.0, 1.0, is_extrapolated=False)
    for row in rows:
        mark = " (now)" if row.draft_tokens == present else ""
        bounds = f" ({row.lower:.2f} to {row.upper:.2f}, extrapolated)" if row.is_extrapolated else mark
        gain = f"{100 * row.gain_over(previous):.1f} % over K={previous.draft_tokens}"
        table.add_row(str(row.draft_tokens), f"{row.length:.2f}{bounds}", gain)
        previous = row
    note = "How much longer a step becomes, the metrics of one K do not show: tuning measures it by trials."
    return Group(table, Text(note, "dim"))


def _render_findings(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    if not any(finding.severity is Severity.ACTION for finding in findings):
        yield Text("✓ nothing needs action", "green")
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        yield Text.assemble((f"{mark} {_clean(finding.title)}", style))
        yield Padding(Text(f"{_clean(finding.meaning)}."), (0, 0, 0, 2))
        yield Padding(Text.assemble(("Do: ", "bold"), f"{_clean(finding.fix)}."), (0, 0, 0, 2))


# -------------------------------------------------------------------------------------------------------------- for programs
def build_document(
    observation: EngineObservation, acceptance: Acceptance | Unknown, findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return the diagnosis for programs; docs/how-to/diagnose.md describes it."""
    counters, setting = observation.counters, observation.setting
    step, tokens = mean_step_interval(counters), tokens_per_step(counters)
    return {
        "address": observation.address,
        "version": observation.version or None,
        "models": list(observation.models),
        "speculation": None if isinstance(setting, Off) else describe_setting(setting),
        "isSinceStart": observation.is_since_start,
        "seconds": round(observation.seconds, 1),
        "requests": observation.request_count,
        "acceptance": None if isinstance(acceptance, Unknown) else _acceptance_to_document(acceptance),
        "stepSeconds": None if isinstance(step, Unknown) else step,
        "tokensPerStep": None if isinstance(tokens, Unknown) else tokens,
        "preemptions": counters.preemptions,
        "findings": [
            {name: getattr(finding, name) for name in ("severity", "title", "meaning", "fix", "source")} for finding in findings
        ],
    }


def _acceptance_to_document(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "length": acceptance.length.low,
        "lower": acceptance.interval.low,
        "upper": acceptance.interval.high,
        "drafts": acceptance.drafts,
        "positions": [
            {
                "position": item.position,
                "accepted": item.survival,
                "conditional": (item.conditional.low + item.conditional.high) / 2,
                "lower": item.interval.low,
                "upper": item.interval.high,
            }
            for item in acceptance.positions
        ],
        "tokensPerStepByK": [
            {
                "numSpeculativeTokens": row.draft_tokens,
                "estimate": row.length,
                "lower": row.lower,
                "upper": row.upper,
                "isExtrapolated": row.is_extrapolated,
            }
            for row in acceptance.lengths_by_tokens()
        ],
    }


def _format_bounds(bounds: Bounds) -> str:
    low, high = f"{bounds.low:.2f}", f"{bounds.high:.2f}"
    return low if low == high else f"{low} to {high}"


def _format_share(bounds: Bounds) -> str:
    low, high = f"{100 * bounds.low:.1f}", f"{100 * bounds.high:.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _format_range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _clean(text: str) -> str:
    """Return the text without control characters, which could move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
