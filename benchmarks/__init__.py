"""Benchmarks: `make bench NAME=...` runs one. Figures that the docs quote are in results/NAME.json."""
