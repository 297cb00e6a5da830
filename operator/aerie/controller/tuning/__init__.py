"""Runs the tuner: its child process, and what it holds of each resource."""
