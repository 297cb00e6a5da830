"""What the API server would refuse of a manifest, where there is no API server."""
