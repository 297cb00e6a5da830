"""Checkpoints: their files, their configs as vLLM reads them, the memory they take, and published drafters."""
