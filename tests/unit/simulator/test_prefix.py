"""The prefix cache: whole blocks of a chain, bounded, eviction of the least recently used."""

from __future__ import annotations

from aerie_lab.engine.prefix import PrefixCache


def test_a_chain_counts_up_to_its_first_difference_in_whole_blocks() -> None:
    cache = PrefixCache(capacity_tokens=1000, block_size=16)
    cache.insert([("system", 48), ("session", 20)])
    assert cache.match([("system", 48), ("session", 20)], max_tokens=67) == 64
    assert cache.match([("system", 48), ("other", 20)], max_tokens=67) == 48
    assert cache.match([("other", 48), ("session", 20)], max_tokens=67) == 0
    assert cache.match([("system", 48), ("session", 200)], max_tokens=247) == 64
    assert cache.match([("system", 48)], max_tokens=47) == 32


def test_the_least_recently_used_blocks_are_evicted_first() -> None:
    cache = PrefixCache(capacity_tokens=100, block_size=1)
    for key in "ab":
        cache.insert([(key, 50)])
    assert cache.match([("a", 50)], max_tokens=50) == 50
    cache.insert([("c", 50)])
    assert [cache.match([(key, 50)], max_tokens=50) for key in "abc"] == [50, 0, 50]


def test_a_chain_larger_than_the_cache_leaves_it_empty() -> None:
    cache = PrefixCache(capacity_tokens=10, block_size=1)
    cache.insert([("a", 50)])
    assert cache.match([("a", 50)], max_tokens=50) == 0
    cache.insert([("b", 5)])
    assert cache.match([("b", 5)], max_tokens=5) == 5
