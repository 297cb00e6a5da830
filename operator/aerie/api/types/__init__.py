"""Types from which all models of the resource are built."""
