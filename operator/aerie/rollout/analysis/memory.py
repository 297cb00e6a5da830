"""What is remembered of the stable pods while nothing is rolled out, so that the next analysis knows how its criteria scatter.

    blocks of stable pods ─► Memory.counted ─► History of each criterion ─► scatters ─► terms of the next analysis

The stable pods are followed with `blocks.observe` as a control without a canary. Scatter is above all the traffic's: how lengths
and topics of requests differ, how long they stay alike, how they are spread over pods. So a promotion keeps what is known. What
does not is what makes other numbers of the same traffic (`fitted`): another length of blocks, another objective of latency, and
for the acceptance length more draft positions, because it scatters the more the longer it may get.

Guarantees: pure; text that `pack` made comes back as it was. Not guaranteed: that pods are under like loads, as those of an
analysis are where latencies count, so these may scatter less than is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aerie.rollout.analysis import packing
from aerie.rollout.analysis.blocks import Block, Rule
from aerie.rollout.analysis.calibration import History, Scatter
from aerie.rollout.analysis.criteria import ACCEPTANCE_LENGTH, FIRST_TIME, OUTPUT_TIME, Criterion, Terms, criteria

LEAST_SHARE = 0.5
"""Of the drafts and requests that a block is to hold of a pod, the share below which a pod is left out of it: a handful of
requests would tell of chance, and no block of an analysis is made of one."""


@dataclass(frozen=True, slots=True)
class Memory:
    """See the module."""

    terms: Terms
    """By which the blocks were counted."""
    histories: Mapping[str, History] = field(default_factory=dict)
    """By criterion."""
    blocks: int = 0
    """Blocks counted."""
    until: float = 0.0
    """When the last of them ended."""

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
        histories = dict(self.histories)
        for criterion in criteria(self.terms):
            parts = {name: criterion.value(counts) for name, counts in pods.items()}
            values = {name: part / whole for name, (part, whole) in parts.items() if whole > 0}
            histories[criterion.name] = histories.get(criterion.name, History()).add(values, criterion.relative)
        return Memory(self.terms, histories, self.blocks + 1, block.ended)

    def fitted(self, terms: Terms) -> Memory:
        """What of it holds for blocks that are counted by these terms."""
        if terms == self.terms:
            return self
        before = {criterion.name: criterion for criterion in criteria(self.terms)}
        kept = {
            criterion.name: self.histories[criterion.name]
            for criterion in criteria(terms)
            if criterion.name in self.histories and self._alike(before.get(criterion.name), criterion, terms)
        }
        return replace(self, terms=terms, histories=kept) if kept else Memory(terms)

    def _alike(self, before: Criterion | None, now: Criterion, terms: Terms) -> bool:
        if before is None or terms.block != self.terms.block or now.value is not before.value:
            return False
        kept, known = terms.kept, self.terms.kept
        if now.name == ACCEPTANCE_LENGTH:
            return kept.positions <= known.positions
        edges = {OUTPUT_TIME: (kept.output_edge, known.output_edge), FIRST_TIME: (kept.first_edge, known.first_edge)}
        mine, theirs = edges.get(now.name, (None, None))
        return mine == theirs

    def scatters(self, terms: Terms) -> dict[str, Scatter]:
        """By criterion, what it tells an analysis by these terms; nothing of those of which it knows too little."""
        found = {name: history.scatter() for name, history in self.fitted(terms).histories.items()}
        return {name: scatter for name, scatter in found.items() if scatter.batches}

    def pack(self) -> str:
        """As text."""
        histories = {name: history.to_dict() for name, history in self.histories.items()}
        return packing.pack({"terms": self.terms.to_dict(), "histories": histories, "blocks": self.blocks, "until": self.until})

    @classmethod
    def unpack(cls, text: str) -> Memory | None:
        """What `pack` made; None for what is none of this release's."""
        try:
            found = packing.unpack(text)
            histories = {name: History.from_dict(history) for name, history in found["histories"].items()}
            return cls(Terms.from_dict(found["terms"]), histories, found["blocks"], found["until"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
