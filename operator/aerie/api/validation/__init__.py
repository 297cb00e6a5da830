"""Validation of a manifest without an API server."""
