"""What is remembered of the stable pods of each resource, between the passes.

    no canary ─► Subject: the stable pods ─► blocks (compare.py) ─► Memory ─► due? ─► pass ─► ConfigMap
    a canary  ─► nothing more is counted, and the memory waits for its analysis

Guarantees: a resource has a memory once two of its pods were counted in one block, and not before; what an earlier operator has
written of the same engine is what it goes on from, and with another engine (image or version) nothing is kept. Not guaranteed:
the blocks that came since that was written, see aerie.rollout.canary.calibration_record.
"""

from __future__ import annotations

from dataclasses import replace

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.measurement.blocks import ArmName, ClosedBlock
from aerie.api.status import Status
from aerie.controller.collection.blocks import ComparisonConfig
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming
from aerie.rollout.canary import calibration_record
from aerie.rollout.canary.analysis_run import build_block_rule
from aerie.rollout.facts.snapshot import Snapshot


class CalibrationCollector:
    """See the module."""

    def __init__(self) -> None:
        self._calibrations: dict[NamespacedName, tuple[str | None, BaselineCalibration]] = {}
        """With the uid of the resource that it is of."""
        self._saved_records: dict[NamespacedName, calibration_record.StoredCalibration] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status, interval: float) -> ComparisonConfig | None:
        """The stable pods, read every `interval` seconds, as what is to be counted from now on; None while nothing is."""
        resource, stable = snapshot.resource, status.stable
        if stable is None or status.canary is not None or resource.spec.replicas < 2:
            return None
        terms, engine = (
            calibration_record.build_calibration_plan(resource, stable),
            calibration_record.read_engine_identity(snapshot, stable.revision),
        )
        if not engine:
            return None  # its Deployment is about to be made again, and until then there is nobody to count
        uid, known = self._calibrations.get(key, (None, None))
        if known is None or uid != resource.metadata.uid:
            known = calibration_record.find_calibration(snapshot, stable) or BaselineCalibration(terms, engine=engine)
        self._calibrations[key] = (resource.metadata.uid, known.compatible_with(terms, engine))
        self._saved_records[key] = calibration_record.read_stored_calibration(snapshot)
        rule = replace(build_block_rule(terms, interval), pods_per_minimum=terms.pods[0])
        arms: dict[str, ArmName] = {naming.deployment_name(key.name, stable.revision, control=False): "control"}
        return ComparisonConfig(0.0, arms, terms.kept, rule, resource.spec.rollout.analysis.warmup.total_seconds())

    def add_block(self, key: NamespacedName, block: ClosedBlock, config: ComparisonConfig) -> bool:
        """One more block of them; whether what is known is to be written."""
        uid, memory = self._calibrations[key]
        memory = memory.add_block(block, config.rule)
        self._calibrations[key] = (uid, memory)
        return calibration_record.is_calibration_write_due(memory, self._saved_records[key], canary_active=False)

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """What is held of this resource's stable pods; None for nothing."""
        of, memory = self._calibrations.get(key, (None, None))
        return memory if memory is not None and memory.blocks and of == uid else None

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone."""
        self._calibrations.pop(key, None)
        self._saved_records.pop(key, None)
