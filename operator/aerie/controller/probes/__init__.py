"""Asks engines themselves: fixed prompts, and the length of their context."""
