"""What is: the snapshot of one resource, and what is read off its pods, routes and metrics. Decides nothing."""
