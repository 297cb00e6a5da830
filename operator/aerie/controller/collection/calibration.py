"""What is remembered of the stable pods of each resource, between the passes.

    no canary ─► Subject: the stable pods ─► blocks (compare.py) ─► Memory ─► due? ─► pass ─► ConfigMap
    a canary  ─► nothing more is counted, and the memory waits for its analysis

Guarantees: a resource has a memory once two of its pods were counted in one block, and not before; what an earlier operator has
written of the same engine is what it goes on from, and with another engine (image or version) nothing is kept. Not guaranteed:
the blocks that came since that was written, see aerie.rollout.canary.calibration_record.
"""

from __future__ import annotations

from dataclasses import replace

from aerie.analysis.baseline import Memory
from aerie.analysis.measurement.blocks import Arm, Block
from aerie.api.status import Status
from aerie.controller.collection.blocks import Subject
from aerie.controller.work_queue import Key
from aerie.manifests import naming
from aerie.rollout.canary import calibration_record
from aerie.rollout.canary.analysis_run import rule_of
from aerie.rollout.facts.snapshot import Observed


class Histories:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[str | None, Memory]] = {}
        """With the uid of the resource that it is of."""
        self._written: dict[Key, calibration_record.Written] = {}

    def follow(self, key: Key, observed: Observed, status: Status, interval: float) -> Subject | None:
        """The stable pods, read every `interval` seconds, as what is to be counted from now on; None while nothing is."""
        resource, stable = observed.resource, status.stable
        if stable is None or status.canary is not None or resource.spec.replicas < 2:
            return None
        terms, engine = calibration_record.terms(resource, stable), calibration_record.engine(observed, stable.revision)
        if not engine:
            return None  # its Deployment is about to be made again, and until then there is nobody to count
        uid, known = self._held.get(key, (None, None))
        if known is None or uid != resource.metadata.uid:
            known = calibration_record.recalled(observed, stable) or Memory(terms, engine=engine)
        self._held[key] = (resource.metadata.uid, known.fitted(terms, engine))
        self._written[key] = calibration_record.written(observed)
        rule = replace(rule_of(terms, interval), per=terms.pods[0])
        arms: dict[str, Arm] = {naming.deployment(key.name, stable.revision, control=False): "control"}
        return Subject(0.0, arms, terms.kept, rule, resource.spec.rollout.analysis.warmup.total_seconds())

    def count(self, key: Key, block: Block, subject: Subject) -> bool:
        """One more block of them; whether what is known is to be written."""
        uid, memory = self._held[key]
        memory = memory.counted(block, subject.rule)
        self._held[key] = (uid, memory)
        return calibration_record.due(memory, self._written[key], rolling=False)

    def memory(self, key: Key, uid: str | None) -> Memory | None:
        """What is held of this resource's stable pods; None for nothing."""
        of, memory = self._held.get(key, (None, None))
        return memory if memory is not None and memory.blocks and of == uid else None

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._held.pop(key, None)
        self._written.pop(key, None)
