"""The process that decides on settings, and its protocol with the operator: lines of JSON."""
