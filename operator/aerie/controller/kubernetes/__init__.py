"""The API server: client, cache, watches, and what is read from and written to it."""
