"""Models as vLLM sees them: checkpoint files, configs, layer ids, GPU memory, and the published drafters."""
