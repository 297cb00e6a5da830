"""Blocks for analyses and calibration, out of the sliding windows."""
