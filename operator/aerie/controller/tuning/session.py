"""State of the tuner for one resource: its inputs, the last scrape of each pod, and the windows between scrapes.

    sample of a pod ─► window since the previous one, of the same run ─► TuningTelemetry since the last decision
                       with the setting of the pod's Deployment

Guarantees: a window is of one run of one pod. Its arm differs from the stable one in the setting alone, and is not known to be
compared on different hardware. A window over a gap or a restart is excluded and counted. A pod costs one sample, which the
scraper holds anyway. A resource without requests costs only this module's state, and no telemetry. Not guaranteed: that a
Deployment's pods run the setting in the status; the windows themselves show it
(`telemetry.setting_mismatch_reason`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.inputs import TuningInputs
from aerie.engine.metrics.sample import CounterReset, Sample, diff_samples
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.tuning.recommendation import Recommendation
from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry

MIN_TUNING_WINDOW_SECONDS = 10.0
"""Minimum duration of a window in seconds, unless the pods are scraped less often."""
MAX_TUNING_WINDOW_INTERVALS = 5.0
"""Maximum duration of a window in intervals; during longer ones requests may have come and gone unseen."""


@dataclass(slots=True)
class _LastScrape:
    run_id: str
    sampled_at: float
    sample: Sample


@dataclass(eq=False, slots=True)
class TuningSession:
    """State of the tuner for one resource. Times are seconds of Unix time."""

    inputs: TuningInputs
    startup_seconds: float | None = None
    """Seconds from the start of an engine until it was ready, where known."""
    tuning_record: TuningRecord | None = None
    recommendation: Recommendation | None = None
    pending_telemetry: TuningTelemetry | None = None
    """Telemetry since the last decision; None when there is none."""
    sample_count: int = 0
    """Samples since the last decision."""
    last_scrapes: dict[str, _LastScrape] = field(default_factory=dict)

    def record_sample(self, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float) -> None:
        """Record a sample of a pod that is scraped each `interval` seconds."""
        setting, last_scrape = self.inputs.settings_by_deployment.get(endpoint.deployment), self.last_scrapes.get(pod)
        self.sample_count += 1
        if setting is None:
            self.last_scrapes.pop(pod, None)
            return
        if (
            last_scrape is not None
            and last_scrape.run_id == endpoint.run_id
            and sampled_at - last_scrape.sampled_at < min(MIN_TUNING_WINDOW_SECONDS, 0.9 * interval)
        ):
            return  # too short: the window continues from the same scrape to the next one
        self.last_scrapes[pod] = _LastScrape(endpoint.run_id, sampled_at, sample)
        if last_scrape is None:
            return
        if last_scrape.run_id != endpoint.run_id or isinstance(window := diff_samples(last_scrape.sample, sample), CounterReset):
            self._ensure_telemetry().record_exclusion("between two scrapes the engine restarted, or its counters decreased.")
            return
        if sampled_at - last_scrape.sampled_at > MAX_TUNING_WINDOW_INTERVALS * interval:
            self._ensure_telemetry().record_exclusion("the pod was not scraped for more than five intervals.")
            return
        if not window.request_steps and not window.first_tokens:
            return
        engine_started_at = (
            sample.process_start_time
            if sample.process_start_time is not None
            else last_scrape.sampled_at - 2 * self.inputs.scale.warm_up_seconds
        )
        self._ensure_telemetry().add(ReplicaWindow(pod, sampled_at, setting, window, last_scrape.sampled_at - engine_started_at))

    def retain_pods(self, pods: frozenset[str]) -> None:
        """Drop the state of all pods but these."""
        for removed in self.last_scrapes.keys() - pods:
            del self.last_scrapes[removed]

    @property
    def queued_requests(self) -> float:
        """Requests in the queues of all pods, as of their last scrapes."""
        return sum(scrape.sample.gauges.waiting_requests or 0.0 for scrape in self.last_scrapes.values())

    def take_telemetry(self) -> TuningTelemetry | None:
        """Return the telemetry since the last decision, and start with an empty one."""
        telemetry, self.pending_telemetry, self.sample_count = self.pending_telemetry, None, 0
        return telemetry

    def restore_telemetry(self, telemetry: TuningTelemetry) -> None:
        """Put back telemetry that no decision was made on."""
        if self.pending_telemetry is not None and self.pending_telemetry.scale == telemetry.scale:
            telemetry.merge(self.pending_telemetry)
        self.pending_telemetry = telemetry

    def _ensure_telemetry(self) -> TuningTelemetry:
        if self.pending_telemetry is None:
            inputs = self.inputs
            self.pending_telemetry = TuningTelemetry(inputs.horizon, inputs.api_servers, inputs.scale)
        return self.pending_telemetry
