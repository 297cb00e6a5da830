"""Facts: the snapshot of one resource, and what is read from its pods, routes and metrics. No decisions."""
