"""Faults on purpose, each with its repair: what a fleet meets at night, in the lab by day."""

from aerie_lab.faults.faults import Fault, FaultInjector

__all__ = ["Fault", "FaultInjector"]
