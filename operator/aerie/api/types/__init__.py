"""The types that all models of the resource are built of."""
