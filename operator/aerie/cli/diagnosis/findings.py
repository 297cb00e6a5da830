"""What the numbers of an engine mean, and what to do: one rule for each finding.

Each limit is a measurement. `benchmarks/results/wrong_drafters.json` has correctly and wrongly loaded drafters of one small
target, greedy. `PUBLISHED` has what vLLM's tests expect of published drafters. A rule compares a 95 % interval with its limit,
so that few requests give no finding instead of a wrong one.

Guarantee: pure. Not guaranteed: the cause of a low acceptance. A weak drafter, or unusual traffic, may look like a drafter that
is loaded wrongly; the finding then names both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from aerie.cli.diagnosis.acceptance import Acceptance, PositionAcceptance, ratio_upper_bound
from aerie.cli.diagnosis.observation import EngineObservation
from aerie.engine.metrics.rates import Unknown, error_share
from aerie.engine.releases import (
    MIN_SECURE_VERSION,
    NEWEST_VERIFIED_VERSION,
    UnknownVersion,
    Version,
    VersionError,
    is_cpu_build,
    resolve_engine_version,
)
from aerie.engine.speculation import Off, Static

_MEASURED = "benchmarks/results/wrong_drafters.json"
LOWEST_LOADED_ACCEPTANCE = 0.225
"""S_1 of the bundle's weak drafter, which has seen a few answers once: the lowest of a correctly loaded one. Drafters that read
another vocabulary, or lost their weights, have 0.002 and less; wrong layers of a published drafter 0.04 (vLLM issue 50170)."""
PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "EAGLE 3 for Llama 3.1 8B": (0.730, 0.521, 0.355),
    "EAGLE 3 for Qwen3 8B": (0.654, 0.399, 0.202),
    "EAGLE 3 for gpt-oss 20B": (0.717, 0.512, 0.334),
}
"""S_1 to S_3 on MT-Bench at temperature 0: vLLM, tests/v1/spec_decode/test_acceptance_length.py."""
LOWEST_TRAINED_ACCEPTANCE = min(published[0] for published in PUBLISHED.values())
"""S_1, the lowest of a trained drafter: those of the bundle have more."""
_MAX_COMPARED_POSITION = 3
"""Last position whose q is compared with that of the first: the trainings' horizon is at least as long."""


class Severity(StrEnum):
    """Whether somebody has to act."""

    ACTION = "action"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One finding."""

    severity: Severity
    title: str
    meaning: str
    fix: str
    source: str
    """Where its limit comes from."""


def find_problems(observation: EngineObservation, acceptance: Acceptance | Unknown) -> tuple[Finding, ...]:
    """Return the findings, those that need action first."""
    findings = [*_check_version(observation), *_check_load(observation)]
    if isinstance(acceptance, Acceptance):
        findings += [*_check_drafter(acceptance, observation), *_check_sampling_on_cpu(observation)]
    elif not isinstance(observation.setting, Off):
        findings.append(
            Finding(
                Severity.NOTE,
                "acceptance is unknown",
                acceptance.message,
                "diagnose it again under traffic, with a longer --duration",
                "aerie.engine.metrics.rates",
            )
        )
    return tuple(sorted(findings, key=lambda finding: finding.severity is Severity.NOTE))


# ------------------------------------------------------------------------------------------------------------------- version
def describe_support(version: str) -> str:
    """Return whether Aerie supports a release of vLLM, in a few words."""
    try:
        parsed = Version.parse(version)
    except VersionError:
        return "unknown to Aerie"
    if parsed < MIN_SECURE_VERSION:
        return f"not supported by Aerie, which needs {MIN_SECURE_VERSION} or newer"
    if parsed.release[:2] > NEWEST_VERIFIED_VERSION.release[:2]:
        return f"newer than {NEWEST_VERIFIED_VERSION}, the newest that Aerie was verified with"
    return "supported by Aerie"


def _check_version(observation: EngineObservation) -> Iterator[Finding]:
    try:
        version = Version.parse(observation.version)
    except VersionError:
        yield Finding(
            Severity.NOTE,
            "unknown version",
            f"the engine reports the version '{observation.version}'" if observation.version else "the engine reports no version",
            "check that the address is vLLM's API server, and not a gateway before it",
            "GET /version",
        )
        return
    if version < MIN_SECURE_VERSION:
        yield Finding(
            Severity.ACTION,
            f"vLLM {version} is too old",
            "a remote request can crash an engine with speculation",
            f"use vLLM {MIN_SECURE_VERSION} or newer",
            "preflight check C20: vLLM pull request 44744",
        )
    engine = resolve_engine_version("", str(version))
    for warning in () if isinstance(engine, UnknownVersion) else engine.warnings:
        meaning, _, fix = warning.partition(". ")
        yield Finding(Severity.NOTE, "unverified version", meaning, _lower_first(fix), "aerie.engine.releases")


def _check_sampling_on_cpu(observation: EngineObservation) -> Iterator[Finding]:
    try:
        is_cpu = is_cpu_build("", Version.parse(observation.version))
    except VersionError:
        return
    if is_cpu:
        yield Finding(
            Severity.NOTE,
            "sampling on CPU",
            "vLLM's CPU backend verifies requests with a temperature above 0 wrongly: their acceptance is arbitrary, and so are "
            "their answers",
            "send this engine greedy requests alone, or switch speculation off",
            "preflight check C33: vLLM issue 55005",
        )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


# ------------------------------------------------------------------------------------------------------------------- drafter
def _check_drafter(acceptance: Acceptance, observation: EngineObservation) -> Iterator[Finding]:
    first = acceptance.positions[0]
    if first.interval.high < LOWEST_LOADED_ACCEPTANCE:
        yield _build_useless_finding(acceptance, first)
    elif (falling := _find_falling_position(acceptance, observation)) is not None:
        yield _build_falling_finding(first, falling)
    elif first.interval.high < LOWEST_TRAINED_ACCEPTANCE:
        yield Finding(
            Severity.NOTE,
            "low acceptance from the first position on",
            f"{_percent(first.survival)} of the first draft tokens are accepted. Trained drafters have "
            f"{_percent(LOWEST_TRAINED_ACCEPTANCE)} and more at temperature 0. Neighbouring layers instead of those of the "
            "training cost 7 to 24 points. A temperature of 1 with greedy drafts costs more than half",
            "run aerie preflight (C4, C22, C23); for sampled traffic try spec.speculation.draftSampling: Probabilistic",
            f"{_MEASURED}; benchmarks/results/sampled.json",
        )


def _build_useless_finding(acceptance: Acceptance, first: PositionAcceptance) -> Finding:
    return Finding(
        Severity.ACTION,
        "the drafter is of no use: acceptance near chance",
        f"{_percent(first.survival, 1)} of the first draft tokens are accepted, and a step with drafts gives "
        f"{acceptance.length.low:.2f} tokens instead of 1 without a drafter, at the price of drafting. So look drafters that "
        "propose in another vocabulary, that read other layers, or whose weights were lost in a sleep of level 2",
        "run aerie preflight for target and drafter (C4, C26, C35), and restart the pod if it has slept; meanwhile set "
        "numSpeculativeTokens: 0",
        f"{_MEASURED}; vLLM issues 50170 and 52479",
    )


def _find_falling_position(acceptance: Acceptance, observation: EngineObservation) -> PositionAcceptance | None:
    """Return the last position whose q, compared with the first, is below that of each published drafter.

    A fault may leave so few drafts at the last compared position that only an earlier one shows it.
    """
    if not isinstance(observation.setting, Static):
        return None
    first, *later = acceptance.positions[:_MAX_COMPARED_POSITION]
    falling = (
        position for position in reversed(later) if ratio_upper_bound(position, first) < lowest_published_ratio(position.position)
    )
    return next(falling, None)


def lowest_published_ratio(position: int) -> float:
    """Return the lowest q at a position over that at the first, of published drafters.

    >>> round(lowest_published_ratio(3), 2)
    0.77
    """
    return min(rates[position - 1] / rates[position - 2] / rates[0] for rates in PUBLISHED.values())


def _build_falling_finding(first: PositionAcceptance, falling: PositionAcceptance) -> Finding:
    limit = lowest_published_ratio(falling.position)
    return Finding(
        Severity.ACTION,
        "acceptance falls from position to position",
        f"of the drafts that get to position {falling.position}, {_percent(falling.conditional.high)} are accepted there, and "
        f"{_percent(first.survival)} at position 1. Published drafters keep {_percent(limit)} of that. So "
        "look drafters that are fed back another state than in their training: EAGLE 3.1 (fc_norm, norm_output) served as "
        "EAGLE 3, or the reverse, or norm_before_residual flipped. A training with too short a horizon may look the same",
        "run aerie preflight (C1, C6, C7, C8, C27); if it passes, ask for the trainer's norm_output and horizon, or lower K",
        f"{_MEASURED}; vLLM tests/v1/spec_decode/test_acceptance_length.py",
    )


# ---------------------------------------------------------------------------------------------------------------------- load
def _check_load(observation: EngineObservation) -> Iterator[Finding]:
    counters, gauges = observation.counters, [sample.gauges for sample in observation.samples]
    waiting = [gauge.waiting_requests or 0.0 for gauge in gauges]
    if len(waiting) > 1 and min(waiting) > 0:
        usage = max((gauge.kv_cache_usage or 0.0 for gauge in gauges), default=0.0)
        yield Finding(
            Severity.ACTION,
            "requests wait all the time",
            f"{min(waiting):.0f} to {max(waiting):.0f} requests waited at each of {len(waiting)} reads, with up to "
            f"{_percent(usage)} of the KV cache in use: the engine gets more than it serves",
            "add replicas or limit the traffic; at such load fewer draft tokens may serve more (docs/concepts/tuning.md)",
            "vllm:num_requests_waiting",
        )
    if counters.preemptions > 0:
        yield Finding(
            Severity.ACTION,
            "requests are preempted",
            f"{counters.preemptions:.0f} times the KV cache was full, and a request had to be computed again. A drafter takes "
            "memory from it",
            "lower --max-num-seqs, add GPU memory or replicas, or quantise the KV cache; see preflight check C21",
            "vllm:num_preemptions_total",
        )
    errors = error_share(counters)
    if not isinstance(errors, Unknown) and errors > 0:
        yield Finding(
            Severity.ACTION,
            "requests end with an error",
            f"{counters.finished.get('error', 0.0):.0f} requests, {_percent(errors, 1)} of those that ended",
            "look into the engine's log",
            'vllm:request_success_total{finished_reason="error"}',
        )


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
