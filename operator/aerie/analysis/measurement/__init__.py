"""Paired blocks from counters: the counts of both arms in the same time window."""
