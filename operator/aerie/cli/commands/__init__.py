"""One module for each command of `aerie`."""
