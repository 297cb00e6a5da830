"""From counters to paired blocks: what both arms counted in the same stretch of time."""
