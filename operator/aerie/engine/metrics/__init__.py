"""vLLM's metrics: their names, two ways to read them, and the quantities that a window of counters identifies."""
