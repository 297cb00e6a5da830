"""Fault injection, with the repair of each fault."""

from aerie_lab.faults.faults import Fault, FaultInjector

__all__ = ["Fault", "FaultInjector"]
