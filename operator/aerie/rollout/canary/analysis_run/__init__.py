"""The analysis of one canary: its run over the phases, and what it reads besides blocks."""
