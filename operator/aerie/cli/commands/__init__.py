"""The commands of `aerie`, one module each."""
