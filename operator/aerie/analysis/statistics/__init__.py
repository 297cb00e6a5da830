"""Confidence sequences, exact bounds of counts, and how blocks of equal arms scatter."""
