"""Acceptance of a drafter's tokens by its target: acceptance length (AL) and acceptance per position, by category.

    prompts ─► answers ─► acceptance      greedy drafts, all columns of a text at once, visited as by a server
          └──► speculation                token by token, with exact rejection sampling: reference, and sampled drafts
          └──► server                     a running vLLM, by the counters of its /metrics

AL is the mean number of tokens that one verification step emits, its bonus token included: 1 + accepted / drafts, as in vLLM's
counters and SPEED-Bench (arXiv 2604.09557). 1 means that nothing was accepted.
"""

from aerie_drafter.evaluate.acceptance import AcceptanceCounts
from aerie_drafter.evaluate.prompts import Prompt, read_prompts

__all__ = ["AcceptanceCounts", "Prompt", "read_prompts"]
