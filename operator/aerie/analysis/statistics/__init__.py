"""Confidence sequences, exact bounds of counts, and the dispersion of blocks of equal arms."""
