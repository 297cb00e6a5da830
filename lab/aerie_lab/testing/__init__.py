"""For tests against a lab: pytest fixtures (plugin.py) and a namespace with a few ways of waiting (namespace.py)."""

from aerie_lab.testing.namespace import Namespace, wait_until

__all__ = ["Namespace", "wait_until"]
