"""Progression of a rollout: the policies that decide which revisions have pods, and their chain."""
