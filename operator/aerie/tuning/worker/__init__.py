"""The process that decides on settings, and the lines of JSON by which the operator talks to it."""
