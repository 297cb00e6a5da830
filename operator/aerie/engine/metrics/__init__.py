"""vLLM's metrics: their names, two ways to read them, and what a window of counters says."""
