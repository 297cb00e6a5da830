"""Output of a reconcile: the new status and the notifications."""
