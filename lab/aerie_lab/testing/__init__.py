"""Helpers of tests against a lab: pytest fixtures (plugin.py) and a namespace with waits (namespace.py)."""

from aerie_lab.testing.namespace import Namespace, wait_until

__all__ = ["Namespace", "wait_until"]
