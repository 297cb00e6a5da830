"""The desired revision, its drafter, its pod template and its preflight result."""
