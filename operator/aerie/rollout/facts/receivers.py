"""Receivers of notifications that resources may name in annotations, as far as decisions need them.

Addresses and secrets of receivers stay in the controller: nothing that a user of a namespace can read depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NotificationReceiver:
    """One receiver of the operator."""

    name: str
    accepts_recipients: bool
    """Whether an annotation may name a recipient, such as a channel."""
    namespaces: frozenset[str] | None = None
    """Namespaces whose resources it gets notifications of; None: all."""

    def serves(self, namespace: str | None) -> bool:
        """Return whether it gets notifications of resources in the namespace."""
        return self.namespaces is None or namespace in self.namespaces
