"""Compares the catalog of published drafters with the files of their repositories.

compare      reads repositories, and states where a row and they differ
record       what the last comparison saw, as data: record.json
rebuilt.toml checkpoints rebuilt from public descriptions, for a comparison without a network
"""
