"""Trials of a speculation setting: which runs, how they end, and what the status says of them."""
