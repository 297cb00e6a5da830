"""Replicas and traffic weight of each arm, and the order in which both change."""
