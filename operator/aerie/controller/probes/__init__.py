"""Probes of the engines themselves: fixed prompts, and the context length."""
