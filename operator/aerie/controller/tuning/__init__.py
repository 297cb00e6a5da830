"""I/O of the tuner: its worker process, and its session per resource."""
