"""The decision on top of the fitted models: candidates, their forecast, and the recommendation with its explanation."""
