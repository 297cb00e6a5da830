"""Holds the baseline calibration of each resource's stable pods between reconciles.

    no canary ─► ComparisonConfig: stable pods ─► blocks (blocks.py) ─► BaselineCalibration ─► due? ─► reconcile ─► ConfigMap
    a canary  ─► no block is added, and the calibration is used by the analysis
    a rollout in place ─► no block is added, because pods differ by their drafters

Guarantees: a resource has a calibration only after two of its pods were counted in one block. It continues from the record that
an earlier operator has written for the same origin. With another one (image, version, traffic mode or choice of nodes) the
calibration is discarded. Not guaranteed: blocks that were added after that record was written, see
aerie.rollout.canary.analysis_run.calibration_record.
"""

from __future__ import annotations

from dataclasses import replace

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.measurement.blocks import ArmName, ClosedBlock
from aerie.api.status import Status
from aerie.controller.collection.blocks import ComparisonConfig
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming
from aerie.rollout.canary.analysis_run import calibration_record
from aerie.rollout.canary.analysis_run.run import build_block_rule
from aerie.rollout.facts.snapshot import Snapshot


class CalibrationCollector:
    """Baseline calibrations of all resources, and when each has to be written."""

    def __init__(self) -> None:
        self._calibrations: dict[NamespacedName, tuple[str | None, BaselineCalibration]] = {}
        """Calibration and uid of each resource. The uid is that of the resource that the calibration was measured on."""
        self._saved_records: dict[NamespacedName, calibration_record.StoredCalibration] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status, interval: float) -> ComparisonConfig | None:
        """Track the stable pods, scraped each `interval` seconds. Return the comparison to collect, or None without one."""
        resource, stable = snapshot.resource, status.stable
        if stable is None or status.canary is not None or status.in_place_rollout is not None or resource.spec.replicas < 2:
            return None
        plan = calibration_record.build_calibration_plan(resource, stable)
        origin = calibration_record.read_origin(snapshot, stable.revision)
        if not origin:
            return None  # the Deployment is about to be recreated, and until then there are no pods to count
        uid, calibration = self._calibrations.get(key, (None, None))
        if calibration is None or uid != resource.metadata.uid:
            calibration = calibration_record.find_calibration(snapshot, stable) or BaselineCalibration(plan, origin=origin)
        self._calibrations[key] = (resource.metadata.uid, calibration.compatible_with(plan, origin))
        self._saved_records[key] = calibration_record.read_stored_calibration(snapshot)
        rule = replace(build_block_rule(plan, interval), pods_per_minimum=plan.pod_counts[0])
        arms: dict[str, ArmName] = {naming.deployment_name(key.name, stable.revision, control=False): "control"}
        return ComparisonConfig(0.0, arms, plan.projection, rule, resource.spec.rollout.analysis.warmup_duration.total_seconds())

    def add_block(self, key: NamespacedName, block: ClosedBlock, config: ComparisonConfig) -> bool:
        """Add a block of the stable pods, and return True if the calibration is due to be written."""
        uid, calibration = self._calibrations[key]
        calibration = calibration.add_block(block, config.rule)
        self._calibrations[key] = (uid, calibration)
        return calibration_record.is_calibration_write_due(calibration, self._saved_records[key], canary_active=False)

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """Return the calibration of the resource with this uid, or None when it has no block yet."""
        calibrated_uid, calibration = self._calibrations.get(key, (None, None))
        return calibration if calibration is not None and calibration.block_count and calibrated_uid == uid else None

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._calibrations.pop(key, None)
        self._saved_records.pop(key, None)
