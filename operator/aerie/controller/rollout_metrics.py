"""Exports the metrics of all resources and their rollouts (rollout/status/metric_samples.py).

    reconcile ─► update(key, status) ─► samples of this resource ─┐
    deletion ──► forget(key) ─────────► none ─────────────────────┼─► collect() at each scrape
    hold ──────► hold(key, reason) ───► its reason alone ─────────┘

Guarantees: the samples of a resource follow its last status, and disappear with it. Only the leader has any, because only the
leader reconciles. A scrape formats samples that exist already, and may run in another thread than the updates.

Finished rollouts and trials are counted when their record first appears in a status. A record that a resource already has at its
first reconcile by this leader is not counted: an earlier leader has counted it. So a new leader, and a restart, begin at 0, as
Prometheus expects of counters. Not guaranteed: a record that appears while no scrape follows is lost to Prometheus. This is so
when the leader ends within a scrape interval after the rollout, and when a status is written but its answer is lost. The
status and `aerie_rollout_last_completion_time_seconds` still have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import get_args

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from aerie.api.status import RolloutOutcome, Status, TrialResult
from aerie.controller.work_queue import NamespacedName
from aerie.metric_family import MetricFamily
from aerie.rollout.status.metric_samples import (
    ATTENTION,
    RESOURCE_LABELS,
    STATUS_FAMILIES,
    StatusSample,
    build_samples,
    parse_degraded_reason,
)

ROLLOUTS_FINISHED = MetricFamily(
    "aerie_rollouts_finished",
    "counter",
    "Rollouts that have ended since this operator became the leader, by result: Promoted, RolledBack, Superseded, Failed, "
    "Explored (a trial that only measured).",
    (*RESOURCE_LABELS, "result"),
)
TRIALS_FINISHED = MetricFamily(
    "aerie_tuning_trials_finished",
    "counter",
    "Trials of speculation settings that have ended since this operator became the leader, by result: Promoted, RolledBack, "
    "Inconclusive, Explored, Superseded, Failed.",
    (*RESOURCE_LABELS, "result"),
)
ROLLOUT_DURATION = MetricFamily(
    "aerie_rollout_duration_seconds",
    "histogram",
    "Duration of rollouts that have ended since this operator became the leader, from their start, by result. It includes the "
    "time that they waited for a user.",
    ("result",),
)
ROLLOUT_FAMILIES = (*STATUS_FAMILIES, ROLLOUTS_FINISHED, TRIALS_FINISHED, ROLLOUT_DURATION)
"""All families of this module and of the samples."""
ROLLOUT_RESULTS: tuple[str, ...] = get_args(RolloutOutcome.model_fields["result"].annotation)
TRIAL_RESULTS: tuple[str, ...] = get_args(TrialResult)
_MINUTE, _HOUR = 60.0, 3600.0
_DURATION_BUCKETS_SECONDS = (_MINUTE, 5 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE, *(hours * _HOUR for hours in (1, 2, 4, 8, 24, 72)))
_Record = tuple[str, datetime]
"""Identity of a finished rollout or trial: its revision and the time of its end."""


class _FinishedCounts:
    """Counts of finished rollouts or trials of all resources, by result."""

    def __init__(self, family: MetricFamily, results: tuple[str, ...]) -> None:
        self.family, self._results = family, results
        self._records: dict[NamespacedName, frozenset[_Record]] = {}
        """Records of the last status of each resource."""
        self._counts: dict[NamespacedName, dict[str, int]] = {}

    def update(self, key: NamespacedName, result_by_record: Mapping[_Record, str], *, in_progress: bool) -> list[_Record]:
        """Count the records that are new, and return them. From the start of the first rollout on, all results have a count.

        Without a 0 before the first 1, Prometheus would see no increase.
        """
        previous = self._records.get(key)
        self._records[key] = frozenset(result_by_record)
        added = [record for record in result_by_record if previous is not None and record not in previous]
        if in_progress or added:
            counts = self._counts.setdefault(key, dict.fromkeys(self._results, 0))
            for record in added:
                counts[result_by_record[record]] += 1
        return added

    def samples(self, key: NamespacedName) -> Iterator[StatusSample]:
        """Yield the counts of the resource as samples."""
        return (StatusSample(self.family, (result,), float(count)) for result, count in self._counts.get(key, {}).items())

    def forget(self, key: NamespacedName) -> None:
        """Drop the counts of a deleted resource."""
        self._records.pop(key, None)
        self._counts.pop(key, None)


class RolloutMetrics(Collector):
    """Collector of the metrics of all resources that this leader has reconciled."""

    def __init__(self) -> None:
        self._versions: dict[NamespacedName, str] = {}
        """resourceVersion that the samples of a resource were built from."""
        self._samples: dict[NamespacedName, Mapping[str, list[Sample]]] = {}
        """Samples of each resource by family. A value is replaced and never changed, because a scrape may be reading it."""
        self._rollouts = _FinishedCounts(ROLLOUTS_FINISHED, ROLLOUT_RESULTS)
        self._trials = _FinishedCounts(TRIALS_FINISHED, TRIAL_RESULTS)
        self._durations = Histogram(
            ROLLOUT_DURATION.name,
            ROLLOUT_DURATION.documentation,
            ROLLOUT_DURATION.labels,
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=None,
        )

    def update(self, key: NamespacedName, status: Status, resource_version: str = "") -> None:
        """Replace the samples of the resource by those of this status, which was stored.

        `resource_version`: that of the resource with this status, if it is known. Nothing is done if it has not changed.
        """
        if resource_version and self._versions.get(key) == resource_version:
            return
        self._versions[key] = resource_version
        outcomes = {(outcome.revision, outcome.completion_time): outcome for outcome in status.rollout_history}
        in_progress = status.canary is not None or status.in_place_rollout is not None
        for record in self._rollouts.update(
            key, {record: outcome.result for record, outcome in outcomes.items()}, in_progress=in_progress
        ):
            outcome = outcomes[record]
            self._durations.labels(outcome.result).observe((outcome.completion_time - outcome.start_time).total_seconds())
        speculation = status.speculation
        trials = speculation.trials if speculation is not None else []
        self._trials.update(
            key,
            {(trial.revision, trial.completion_time): trial.result for trial in trials},
            in_progress=speculation is not None and speculation.trial is not None,
        )
        self._store(key, build_samples(status))

    def hold(self, key: NamespacedName, reason: str) -> None:
        """Replace the samples of a resource that cannot be read or listed by its reason: its metrics are not up to date."""
        self._versions.pop(key, None)
        self._store(key, [StatusSample(ATTENTION, (parse_degraded_reason(reason),), 1.0)])

    def forget(self, key: NamespacedName) -> None:
        """Drop the samples of a deleted resource."""
        self._samples.pop(key, None)
        self._versions.pop(key, None)
        self._rollouts.forget(key)
        self._trials.forget(key)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, as prometheus_client calls it at each scrape."""
        resources = list(self._samples.values())
        for family in (*STATUS_FAMILIES, ROLLOUTS_FINISHED, TRIALS_FINISHED):
            metric = Metric(family.name, family.documentation, family.type)
            metric.samples = [sample for samples in resources for sample in samples.get(family.name, ())]
            yield metric
        yield from self._durations.collect()

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, for the check of duplicates at registration."""
        return [Metric(family.name, family.documentation, family.type) for family in ROLLOUT_FAMILIES]

    def _store(self, key: NamespacedName, status_samples: Iterable[StatusSample]) -> None:
        samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for family, label_values, value in (*status_samples, *self._rollouts.samples(key), *self._trials.samples(key)):
            labels = dict(zip(family.labels, (*key, *label_values), strict=True))
            samples[family.name].append(Sample(family.series_names[0], labels, value))
        self._samples[key] = dict(samples)
