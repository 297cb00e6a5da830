"""Benchmarks: `make bench NAME=...` runs one. The values that the docs quote are in results/NAME*.json."""
