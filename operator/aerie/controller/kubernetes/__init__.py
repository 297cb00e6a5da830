"""API server: client, informer cache, watches, and what is read from it and written to it."""
