"""The objects that have to exist for a progression, and those to delete."""
