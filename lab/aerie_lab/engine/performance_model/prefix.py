"""Which tokens of a prompt are in the prefix cache already.

A prompt is a chain of segments (key, tokens): over HTTP one per block with the hash of its text, in a simulated fleet one for
the system prompt and one for the session. A segment counts only when all before it match, as in vLLM, where a block's hash
includes its parent's. The last segment may match in part. Least recently used segments go first.

Not modelled: that requests in flight share blocks (each is charged for its own), and that their blocks push cached ones out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

PromptSegments = Sequence[tuple[Hashable, int]]


class PrefixCache:
    """Tokens per chain of segments, bounded by a number of tokens."""

    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self._tokens: dict[int, int] = {}  # least recently used first; half the memory of an OrderedDict
        self._cached_tokens = 0

    def match(self, segments: PromptSegments, max_tokens: int) -> int:
        """Return the number of the prompt's cached tokens, in whole blocks, at most `max_tokens`."""
        matched, chain = 0, 0
        for key, tokens in segments:
            chain = hash((chain, key))
            held = self._tokens.pop(chain, None)
            if held is None:
                break
            self._tokens[chain] = held
            matched += min(held, tokens)
            if held < tokens:
                break
        return min(matched, max_tokens) // self.block_size * self.block_size

    def insert(self, segments: PromptSegments) -> None:
        """The prompt's tokens are in the cache from now on, as far as they fit."""
        chain = 0
        for key, tokens in segments:
            chain = hash((chain, key))
            held = self._tokens.pop(chain, 0)
            self._tokens[chain] = max(held, tokens)
            self._cached_tokens += self._tokens[chain] - held
        while self._cached_tokens > self.capacity_tokens:
            self._cached_tokens -= self._tokens.pop(next(iter(self._tokens)))
