"""What is remembered of the stable pods while nothing is rolled out, so that the next analysis knows how its criteria scatter.

    blocks of stable pods ─► Memory.counted ─┬─► Elasticity of each metric that goes with the load ─┬─► terms of the next
                                             └─► History of each criterion, at like output ────────┘    analysis

The stable pods are followed with `blocks.observe` as a control without a canary. Scatter is above all the traffic's: how lengths
and topics of requests differ, how long they stay alike, how they are spread over pods. So a promotion keeps what is known. What
does not is what makes other numbers of the same traffic (`fitted`): another length of blocks, another objective of latency, and
for acceptance length and tokens per step more draft positions, because they scatter the more the longer they may get. Another
release of the engine ends all of it: from 0.33 on, vLLM drafts nothing in steps where no request can use a draft
(v1/core/sched/scheduler.py, `_drafts_unused`), so that times and how they go with the load are other numbers.

Guarantees: pure; text that `pack` made comes back as it was; blocks of one engine alone are in a memory, and text that does not
say of which engine it is, as releases of Aerie before wrote it, is none. Not guaranteed: that pods are under like loads, as those
of an analysis are where latencies count: what the elasticity leaves over of that is scatter here, and not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aerie.rollout.analysis import packing
from aerie.rollout.analysis.blocks import Block, Rule
from aerie.rollout.analysis.calibration import History
from aerie.rollout.analysis.criteria import (
    ACCEPTANCE_LENGTH,
    SLOW_FIRST,
    SLOW_OUTPUT,
    TOKENS_PER_STEP,
    Criterion,
    Terms,
    criteria,
    remembered,
)
from aerie.rollout.analysis.elasticity import LEAST, Elasticity

LEAST_SHARE = 0.5
"""Of the drafts and requests that a block is to hold of a pod, the share below which a pod is left out of it: a handful of
requests would tell of chance, and no block of an analysis is made of one."""


@dataclass(frozen=True, slots=True)
class Memory:
    """See the module."""

    terms: Terms
    """By which the blocks were counted."""
    histories: Mapping[str, History] = field(default_factory=dict)
    """By the names of `remembered`."""
    elasticities: Mapping[str, Elasticity] = field(default_factory=dict)
    """By the same names, of those that are adjusted."""
    blocks: int = 0
    """Blocks counted."""
    until: float = 0.0
    """When the last of them ended."""
    engine: str = ""
    """Of which engine the blocks are: its image, and the version that is written beside it (`aerie.rollout.history`)."""

    def counted(self, block: Block, rule: Rule) -> Memory:
        """With one more block. One in which fewer than two pods were counted tells nothing."""
        least = LEAST_SHARE / max(1, rule.per)
        pods = {
            name: counts
            for name, counts in (block.control.by_pod if block.control is not None else {}).items()
            if counts.drafts >= least * rule.drafts and counts.finished >= least * rule.finished
        }
        if len(pods) < 2:
            return self
        seconds = block.ended - block.began
        outputs = {name: counts.output_tokens / seconds for name, counts in pods.items()}
        usual = math.fsum(outputs.values()) / len(outputs)
        histories, elasticities = dict(self.histories), dict(self.elasticities)
        for row in remembered(self.terms):
            parts = {name: row.value(counts) for name, counts in pods.items()}
            values = {name: part / whole for name, (part, whole) in parts.items() if whole > 0}
            if row.adjusted:
                known = elasticities.get(row.name, Elasticity())
                elasticities[row.name] = known.add(values, outputs)
                if known.blocks < LEAST:
                    continue  # blocks at unlike outputs would tell of a scatter that no analysis has
                if (curve := known.curve) is not None:
                    values = {name: curve.at(value, outputs[name], usual) for name, value in values.items()}
            histories[row.name] = histories.get(row.name, History()).add(values, row.relative)
        return replace(self, histories=histories, elasticities=elasticities, blocks=self.blocks + 1, until=block.ended)

    def fitted(self, terms: Terms, engine: str) -> Memory:
        """What of it holds for blocks of this engine that are counted by these terms: nothing of another engine's."""
        if engine != self.engine:
            return Memory(terms, engine=engine)
        if terms == self.terms:
            return self
        rows = [(row, before) for row in remembered(terms) if (before := self._name(row, terms)) is not None]
        histories = {row.name: self.histories[before] for row, before in rows}
        elasticities = {row.name: self.elasticities[before] for row, before in rows if before in self.elasticities}
        return (
            replace(self, terms=terms, histories=histories, elasticities=elasticities) if rows else Memory(terms, engine=engine)
        )

    def _name(self, row: Criterion, terms: Terms) -> str | None:
        """Under which name the same is remembered; None where it is not, or what is remembered are other numbers."""
        name = next((before.name for before in remembered(self.terms) if before.value is row.value), None)
        if name is None or name not in self.histories or terms.block != self.terms.block:
            return None
        kept, known = terms.kept, self.terms.kept
        alike = {
            TOKENS_PER_STEP: kept.positions <= known.positions,
            ACCEPTANCE_LENGTH: kept.positions <= known.positions,
            SLOW_OUTPUT: kept.output_edge == known.output_edge,
            SLOW_FIRST: kept.first_edge == known.first_edge,
        }
        return name if alike.get(name, True) else None

    def informed(self, terms: Terms) -> Terms:
        """The terms of an analysis that begins, with what is known; nothing of criteria of which that is too little."""
        found = {row.name: name for row in criteria(terms) if (name := self._name(row, terms)) is not None}
        scatters = {name: self.histories[before].scatter() for name, before in found.items()}
        curves = {name: self.elasticities[before].curve for name, before in found.items() if before in self.elasticities}
        return replace(
            terms,
            scatters={name: scatter for name, scatter in scatters.items() if scatter.batches},
            curves={name: curve for name, curve in curves.items() if curve is not None},
        )

    def pack(self) -> str:
        """As text."""
        histories = {name: history.to_dict() for name, history in self.histories.items()}
        elasticities = {name: elasticity.to_list() for name, elasticity in self.elasticities.items()}
        told = {"histories": histories, "elasticities": elasticities, "blocks": self.blocks, "until": self.until}
        return packing.pack({"terms": self.terms.to_dict(), "engine": self.engine, **told})

    @classmethod
    def unpack(cls, text: str) -> Memory | None:
        """What `pack` made; None for what is none of this release's."""
        try:
            found = packing.unpack(text)
            histories = {name: History.from_dict(history) for name, history in found["histories"].items()}
            elasticities = {name: Elasticity(*values) for name, values in found["elasticities"].items()}
            terms, engine = Terms.from_dict(found["terms"]), str(found["engine"])
            return cls(terms, histories, elasticities, found["blocks"], found["until"], engine)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
